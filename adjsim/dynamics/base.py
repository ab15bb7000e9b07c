"""Physics as a sum of terms.

A :class:`Term` is one summand of the equations of motion, named by a letter. It has a drift, and,
if it can be solved alone, the moves of its flow over a time h. Continuous solvers sum the drifts,
and splittings compose the flows. Both come from the same term. A :class:`Dynamics` is a module that
owns the physical numbers and lists its terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Generic, cast

import torch
from torch import Tensor, nn

from adjsim._inputs import as_tensor, refuse_uncalled
from adjsim._noise import Noise, NoiseStream, seed_from
from adjsim._params import check_count, register, trainable
from adjsim._state import (
    AnyMomentumState,
    AnyState,
    MomentumState,
    PhaseState,
    State,
    check_fields,
    check_kind,
    check_position,
    in_transform,
    position_of,
)
from adjsim._typing import Energies, Number, Positions, PositionsLike, Seed
from adjsim.dynamics.couplings import Move
from adjsim.dynamics.density import StationaryDensity
from adjsim.dynamics.heat import HeatLimit
from adjsim.dynamics.start_energy import check_potential, describe_force_not_finite


class Term(Generic[State]):
    """One summand of the equations of motion.

    ``advances_time`` marks the term whose flow advances the time (dt/dt = 1): the streaming of
    positions. ``draws`` is the number of fields of standard normal numbers, each of the shape of
    position, that its flow takes. ``no_equation`` says, for error messages, why continuous solvers
    cannot take the term: it is not a drift with noise that is independent of the state. It is empty
    for a term that they can take.
    """

    advances_time = False
    draws = 0
    no_equation = ""

    def drift(self, t: Any, state: State) -> Mapping[str, Tensor]:
        """Compute the rates of change that the term contributes, by field."""
        raise TypeError(f"{type(self).__name__} has no drift.")

    def diffusion(self, t: Any, state: State) -> Mapping[str, Tensor]:
        """Compute the amplitude of its white noise, by field.

        It must not depend on the state. Without noise it is empty.
        """
        return {}

    def coefficients(self, h: float, state: State) -> dict[str, Tensor]:
        """Compute the coefficients of its flow over a time h, differentiably.

        They are functions of the parameters, computed once a run.
        """
        return {}

    def moves(self, h: float, state: State) -> Sequence[Move]:
        """List the moves of its flow over a time h, in order."""
        raise TypeError(f"{type(self).__name__} cannot be solved alone.")


class Dynamics(nn.Module, Generic[State]):
    """The base class of dynamics. Subclasses set ``state_type`` and write ``terms``.

    ``system_axes`` is the number of trailing axes of the first field that belong to one system:
    atoms and dim of a position. The axes before them are the batch.
    """

    state_type: type[State] = cast("type[State]", PhaseState)
    system_axes = 2
    damping_name = "friction"
    # What the message of a run that leaves the finite numbers recommends beside a smaller step.
    remedy = "start from a configuration with smaller forces"
    # Whether check_state is called for the states of a run.
    checks_states = False
    potential: nn.Module

    def __init__(self, potential: nn.Module) -> None:
        super().__init__()
        refuse_uncalled("potential", potential)
        if not isinstance(potential, nn.Module):
            raise TypeError(
                "potential must be an nn.Module mapping position to energy; got "
                f"{type(potential).__name__}. Wrap a function in a module."
            )
        self.potential = potential

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A named tuple of tensors is safe to load; torch.load then accepts it with
        # weights_only=True.
        torch.serialization.add_safe_globals([cls.state_type])

    @property
    def terms(self) -> dict[str, Term[State]]:
        """The terms by their letters, made at each use, so that a copy has terms of its own."""
        raise TypeError(
            f"{type(self).__name__} does not list its terms: write a property terms that returns "
            "a dictionary from letters to terms."
        )

    def init(
        self, position: PositionsLike, momentum: PositionsLike | None = None, generator: Seed = None
    ) -> State:
        """Make a start at a position, and draw the fields that are not given.

        Args:
            position: ``(*batch, atoms, dim)``, a tensor or an array or list of numbers; integers
                become float64.
            momentum: of the same shape; cast to the dtype and device of position.
            generator: a generator, or a seed. One seed serves the start and the run, which have
                separate streams.
        """
        raise TypeError(
            f"{type(self).__name__} does not define its start: write init(position, momentum, "
            "generator)."
        )

    def batch_shape(self, state: AnyState) -> torch.Size:
        """Return the shape of the batch of a state."""
        return state[0].shape[: -self.system_axes]

    def draw_shape(self, t: float, state: AnyState) -> torch.Size:
        """Return the shape of one draw of noise for one system: that of the first field."""
        return state[0].shape[-self.system_axes :]

    def drift(self, t: Any, state: State) -> State:
        """Compute dy/dt without the noise, as a state of rates."""
        total: dict[str, Tensor] = {}
        for term in self.terms.values():
            for name, rate in term.drift(t, state).items():
                total[name] = total[name] + rate if name in total else rate
        zeros = {
            name: torch.zeros_like(value)
            for name, value in state._asdict().items()
            if name not in total
        }
        return type(state)(**{**zeros, **total})

    def diffusion(self, t: Any, state: State) -> State:
        """Compute the diffusion of ``dy = drift dt + diffusion dW``, zero without noise."""
        amplitude = {name: torch.zeros_like(value) for name, value in state._asdict().items()}
        for term in self.terms.values():
            for name, value in term.diffusion(t, state).items():
                amplitude[name] = value.expand_as(amplitude[name])
        return type(state)(**amplitude)

    def noisy_fields(self, t: Any, state: State) -> list[bool]:
        """Return which fields have noise."""
        with torch.no_grad():
            return [bool((x != 0).any()) for x in self.diffusion(t, state)]

    @property
    def stochastic(self) -> bool:
        """Whether the dynamics has noise."""
        return any(term.draws > 0 for term in self.terms.values())

    def damping(self, state: State) -> float:
        """Return the fastest rate (1/time) at which momenta decay.

        In reversed steps rounding errors grow at this rate.
        """
        return 0.0

    def error_growth(self, t: Any, state: State) -> Tensor | None:
        """Compute rates, beyond :meth:`damping`, at which rounding errors grow in reversed steps.

        The result has one rate for each vertex, or of any other shape. None: the rates are the same
        in all states. In a compiled loop the time is a tensor.
        """
        return None

    def characteristic_scales(self, t: float, state: State, time: float) -> dict[str, Tensor]:
        """Return the sizes that fields reach over a time from the start at t, where they are known.

        They determine the lattice of exact runs.
        """
        return {}

    def invariant(self, state: State) -> Energies:
        """Compute a conserved quantity of the exact dynamics, ``(*batch,)``."""
        raise TypeError(f"{type(self).__name__} has no conserved quantity.")

    def stationary_density(self) -> StationaryDensity | None:
        """Return the density that the equations of motion sample; None: no density is declared.

        ScoreFunction and Reweighting read this density alone. Dynamics of your own declare theirs,
        for example by returning ``Canonical(self)``, only if they sample it.

        Raises:
            TypeError: the density needs an energy, and the potential is a force field.
        """
        return None

    def check(self, state: AnyState) -> None:
        """Refuse, before any work, a state that this dynamics cannot step."""
        check_kind(state, self.state_type)
        check_position(position_of(state))
        check_fields(state)

    def check_rates(self, t: float, state: State) -> dict[str, Tensor]:
        """Refuse, before any work, a start at which the equations have no finite value.

        Returns:
            drift and diffusion at the start, by descriptions of them, with their graphs; it may be
            empty where no graph is recorded.
        """
        check_potential(self.potential, position_of(state))
        if in_transform() or not torch.is_grad_enabled():
            return {}
        at = torch.tensor(t, dtype=torch.float64)
        found = named_rates("drift", self.drift(at, state))
        if self.stochastic:
            found |= named_rates("diffusion", self.diffusion(at, state))
        return found

    def describe_first_step(self, t: float, state: AnyState) -> str | None:
        """Return why the first step from a state is not finite; None if its rates are finite."""
        return describe_force_not_finite(self.potential, position_of(state), t)

    def check_step(self, dt: float, state: State, t: float = 0.0) -> None:
        """Refuse, before any work, an explicit step that is too long to be stable at a start."""

    def check_start(self, t: float, state: State) -> None:
        """Refuse, before any work, a start that does not fit the time of the start."""

    def check_noise(self, t: float, state: State) -> None:
        """Refuse noise that is not of the kind it was declared to be, at a state of a run.

        It is called at the start, and with the finiteness checks of a run.

        Raises:
            ValueError: the reason; the run adds the step.
        """

    def heat_limit(self, start: AnyState) -> HeatLimit | None:
        """Return the kinetic energy above which a run has blown up; None: there is no limit.

        It is checked together with the finiteness of a run. Dynamics with a bath at kT return
        ``HeatLimit(self, start)``.
        """
        return None

    def margin(self, t: Any, state: State) -> Tensor | None:
        """Compute distances to the states that ``check_state`` refuses, negative beyond.

        Compiled loops of steps compute it after each step. None: there are no such states. The
        time may be a tensor.
        """
        return None

    def check_state(self, t: float, state: State) -> None:
        """Refuse a state of a run that the model excludes, such as a body behind a wall.

        It is called with the run's parameters after every step if ``checks_states`` is true; in
        compiled runs after every loop of steps. A loop in which :meth:`margin` was negative is run
        again up to the step where it was.

        Raises:
            ValueError: the reason; the run adds the step.
        """

    def trainable(self) -> dict[str, Tensor]:
        """Collect everything registered that requires grad, by name."""
        return trainable(self)


def named_rates(what: str, rates: AnyState) -> dict[str, Tensor]:
    """Return the fields of a drift or a diffusion by descriptions of them."""
    return {f"the {what} of {name}": rate for name, rate in rates._asdict().items()}


class MassiveDynamics(Dynamics[MomentumState]):
    """The base class of dynamics with masses.

    Args:
        potential: energy module, or a :class:`~adjsim.potentials.ForceField`.
        mass: scalar, ``(atoms,)`` or ``(atoms, 1)``. An infinite mass pins its atom: it never
            moves.
    """

    mass: Tensor

    def __init__(self, potential: nn.Module, mass: Number = 1.0) -> None:
        super().__init__(potential)
        register(self, "mass", mass, positive=True)
        check_per_atom("mass", self.mass)

    def masses(self, like: Tensor) -> Tensor:
        """Return the masses in a field's dtype, a scalar or ``(atoms, 1)``.

        The trailing axis keeps them per atom where the number of atoms equals dim.
        """
        check_count("mass", self.mass, like.shape[-2])
        return per_atom(self.mass, like)

    def mobile(self, like: Tensor) -> Tensor:
        """Return 1 for atoms that move, 0 for pinned ones; a scalar or ``(atoms, 1)``."""
        return torch.isfinite(self.masses(like.detach())).to(like)

    def mobile_dof(self, position: Tensor) -> float:
        """Count the degrees of freedom of one system, without pinned atoms."""
        return float(self.mobile(position).expand(position.shape[-2], 1).sum()) * position.shape[-1]

    def kinetic_energy(self, state: MomentumState) -> Energies:
        """Compute ``sum p^2 / 2m``, ``(*batch,)``."""
        return 0.5 * (state.momentum**2 / self.masses(state.momentum)).sum((-1, -2))

    def check(self, state: AnyState) -> None:
        super().check(state)
        check_entries("mass", self.mass, state)
        assert isinstance(state, AnyMomentumState)
        if state.momentum.shape != state.position.shape:
            raise ValueError(
                f"momentum has shape {tuple(state.momentum.shape)} and position "
                f"{tuple(state.position.shape)}; they must be equal."
            )

    def thermal_momentum(
        self, position: PositionsLike, kT: Number, generator: Seed = None
    ) -> Positions:
        """Draw momenta sqrt(m kT) xi, zero on pinned atoms.

        They carry a gradient to mass and kT. xi of replica i is the same in a batch of any size.
        The seed may also be that of the run, which has a separate stream.
        """
        at, temperature = as_start(position)[0], as_tensor("kT", kT)
        refuse_several("kT", temperature)
        return self.thermal_scale(at, temperature) * standard_normal(at, generator)

    def characteristic_scales(
        self, t: float, state: MomentumState, time: float
    ) -> dict[str, Tensor]:
        kT = getattr(self, "kT", None)
        if kT is None:
            return {}
        momentum = self.thermal_scale(state.momentum, kT)
        return {"momentum": momentum, "position": time * momentum / self.masses(state.momentum)}

    def thermal_scale(self, like: Tensor, kT: Tensor) -> Tensor:
        """Compute the thermal momentum sqrt(m kT), zero on pinned atoms.

        It is a scalar or ``(atoms, 1)``.
        """
        mass = self.masses(like)
        mobile = torch.isfinite(mass.detach())
        thermal = torch.sqrt(torch.where(mobile, mass, 1.0) * kT.to(like))
        return torch.where(mobile, thermal, 0.0)


def as_start(
    position: PositionsLike, momentum: PositionsLike | None = None
) -> tuple[Positions, Positions | None]:
    """Convert position and momentum to tensors of one shape, dtype and device.

    Raises:
        ValueError: a position that is not ``(*batch, atoms, dim)``, or a momentum of another shape.
    """
    at = as_tensor("position", position)
    check_position(at)
    if momentum is None:
        return at, None
    p = as_tensor("momentum", momentum)
    if p.shape != at.shape:
        raise ValueError(
            f"momentum has shape {tuple(p.shape)} and position {tuple(at.shape)}; they must be "
            "equal."
        )
    return at, p.to(at)


def standard_normal(
    position: Tensor,
    generator: Seed,
    stream: NoiseStream = NoiseStream.MOMENTA,
    links: tuple[int, ...] = (),
) -> Tensor:
    """Draw numbers for a start, ``(*batch, *links, atoms, dim)``.

    Replica i gets the same numbers in a batch of any size.
    """
    *batch, atoms, dim = position.shape
    drawn = Noise(seed_from(generator), stream=stream)(
        0, (math.prod(batch), math.prod((*links, atoms, dim))), position
    )
    return drawn.reshape((*batch, *links, atoms, dim))


def per_atom(value: Tensor, like: Tensor) -> Tensor:
    """Convert a number to a field's dtype, as a scalar or ``(atoms, 1)``."""
    value = value.to(like)
    return value.reshape(-1, 1) if value.ndim and value.numel() > 1 else value.reshape(())


def check_per_atom(name: str, value: Tensor) -> None:
    if value.ndim > 2 or (value.ndim == 2 and value.shape[1] != 1):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must be a scalar, (atoms,) or (atoms, 1)."
        )


def refuse_several(name: str, value: Tensor) -> None:
    """Refuse more than one number for a property of a whole system."""
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be one number, for all atoms and replicas; got shape "
            f"{tuple(value.shape)}. Make a simulation for each {name}."
        )


def check_dof(dof: float | None, state: AnyState) -> None:
    """Refuse more degrees of freedom than a system has coordinates.

    Frozen coordinates and conserved momenta make them fewer.
    """
    coordinates = math.prod(position_of(state).shape[-2:])
    if dof is not None and dof > coordinates:
        raise ValueError(
            f"dof is {dof:g}, more than atoms x dim = {coordinates} of one system: give at most "
            f"{coordinates}, or None."
        )


def check_entries(name: str, value: Tensor, state: AnyState) -> None:
    check_count(name, value, position_of(state).shape[-2])
