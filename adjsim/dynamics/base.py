"""Physics as a sum of terms.

Continuous solvers sum the drifts of the terms, and splittings compose their flows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, Protocol, cast

import torch
from torch import Tensor, nn

from adjsim.core.parameters import check_count, trainable
from adjsim.core.refusal import Refusal
from adjsim.core.state import (
    AnyState,
    PhaseState,
    State,
    check_fields,
    check_kind,
    check_position,
    in_transform,
    point_of,
    position_of,
)
from adjsim.core.typing import Energies, PositionsLike, Seed
from adjsim.dynamics.density import StationaryDensity
from adjsim.dynamics.forces import add_to
from adjsim.dynamics.masses import HeatLimit, Masses
from adjsim.dynamics.starts import as_start, check_potential
from adjsim.dynamics.terms import Term
from adjsim.potentials.evaluated import as_module


class StateLimit(Protocol):
    """A limit of the states of a dynamics."""

    def margin(self, state: AnyState, t: Any) -> Tensor | None:
        """Return how far a state is from the limit, negative beyond it; None: no state is near."""
        ...

    def refuse(self, state: AnyState, t: float) -> None:
        """Raise a ValueError if a state is beyond the limit."""
        ...


class Dynamics(nn.Module, Generic[State]):
    """The base class of dynamics. Subclasses set ``state_type`` and write ``terms``.

    ``system_axes`` is the number of trailing axes of the first field that belong to one system:
    atoms and dim of a position. The axes before them are the batch. ``potential`` is None where the
    equations of motion have no forces.
    """

    state_type: type[State] = cast("type[State]", PhaseState)
    system_axes = 2
    # Parameters that are one number, or one for each atom.
    per_atom: ClassVar[tuple[str, ...]] = ()
    metric_name: ClassVar[str] = "mass"
    # Whether states between steps are those of an interpolation.
    interpolates = False
    damping_name = "friction"
    # -1 for the mirrored equation of a run backwards, whose time is minus that of the user.
    time_sign = 1
    potential: nn.Module | None

    def __init__(self, potential: nn.Module) -> None:
        super().__init__()
        self.potential = as_module("potential", potential)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A named tuple of tensors is safe for torch.load with weights_only=True.
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
            position: ``(*batch, atoms, dim)``; integers become float64.
            momentum: of the same shape; cast to the dtype and device of position.
            generator: a generator, or a seed, which may also be that of the run.
        """
        at, p = as_start(position, momentum)
        state = self.state_type._make(self.started(at, p, generator))
        self.check(state)
        return state

    def started(self, position: Tensor, p: Tensor | None, generator: Seed) -> tuple[Tensor, ...]:
        """Return the fields of a start."""
        raise TypeError(
            f"{type(self).__name__} does not define its start: write init(position, momentum, "
            "generator)."
        )

    def in_reverse(self) -> Dynamics[State] | Refusal:
        """Return the dynamics whose state at the time -t is that of this one at t."""
        return Refusal("time runs one way")

    def shown_time(self, t: Any) -> float:
        """Return the time of an error message, which is that of the user."""
        # Not -0, which reads like a rounded number.
        return self.time_sign * float(t) + 0.0

    def batch_shape(self, state: AnyState) -> torch.Size:
        """Return the shape of the batch of a state."""
        return state[0].shape[: -self.system_axes]

    def draw_shape(self, t: float, state: AnyState) -> torch.Size:
        """Return the shape of one draw of noise for one system: that of the first field."""
        return state[0].shape[-self.system_axes :]

    @property
    def metric(self) -> Masses | None:
        """The masses M by which constraints project, with G M^-1 G^T; None: none can hold it.

        ``metric_name`` is the name of the number that they are, ``"mass"`` unless declared.
        """
        return None

    def projected(self, state: State, project: Callable[[Tensor], Tensor]) -> State:
        """Return the state with its momenta, if it has any, projected along constraints."""
        return state

    def drift(self, t: Any, state: State) -> State:
        """Compute dy/dt without the noise, as a state of rates."""
        total: dict[str, Tensor] = {}
        for term in self.terms.values():
            for name, rate in term.drift(t, state).items():
                add_to(total, name, rate)
        fields = state._asdict().items()
        zeros = {name: torch.zeros_like(x) for name, x in fields if name not in total}
        return type(state)(**zeros, **total)

    def diffusion(self, t: Any, state: State) -> State:
        """Compute the diffusion of ``dy = drift dt + diffusion dW``, zero without noise."""
        amplitude = {name: torch.zeros_like(value) for name, value in state._asdict().items()}
        for term in self.terms.values():
            for name, value in term.diffusion(t, state).items():
                amplitude[name] = value.expand_as(amplitude[name])
        return type(state)(**amplitude)

    @property
    def stochastic(self) -> bool:
        """Whether the dynamics has noise."""
        return any(term.draws > 0 for term in self.terms.values())

    def damping(self, state: State) -> float:
        """Return the fastest rate (1/time) of decay of momenta, and of errors of reversed steps."""
        return 0.0

    def error_growth(self, t: Any, state: State) -> Tensor | None:
        """Compute rates, beyond :meth:`damping`, at which rounding errors grow in reversed steps.

        They have any shape; None: they are the same in all states.
        """
        return None

    def returned_to(self, start: State) -> State:
        """Return the state to which undone steps come back, where a start is a little off."""
        return start

    def characteristic_scales(self, t: float, state: State, time: float) -> dict[str, Tensor]:
        """Return the known sizes of fields over a time from the start, for the exact lattice."""
        return {}

    def invariant(self, state: State) -> Energies:
        """Compute a conserved quantity of the exact dynamics, ``(*batch,)``."""
        raise TypeError(f"{type(self).__name__} has no conserved quantity.")

    def stationary_density(self) -> StationaryDensity | None:
        """Return the density that the equations of motion sample; None: no density is declared.

        ScoreFunction and Reweighting read this density alone. Dynamics of your own declare theirs,
        for example by returning ``Canonical(self)``, only if they sample it. A TypeError says that
        the density needs an energy, and the potential is a force field.
        """
        return None

    def check(self, state: AnyState) -> None:
        """Refuse, before any work, a state that this dynamics cannot step."""
        check_kind(state, self.state_type)
        check_position(state[0])
        check_fields(state)
        for name in self.per_atom:
            check_count(name, getattr(self, name), state[0].shape[-2])

    def check_values(self, t: float, state: State) -> None:
        """Refuse, before any work, a start without a finite energy, or with one far too high.

        Of the checks of a start, compiled runs of a known form make this one alone.
        """
        if self.potential is not None:
            check_potential(self.potential, *self.force_point(state))

    def check_rates(self, t: float, state: State) -> dict[str, Tensor]:
        """Refuse, before any work, a start at which the equations have no finite value.

        Returns drift and diffusion there by descriptions, if a graph is recorded.
        """
        self.check_values(t, state)
        if in_transform() or not torch.is_grad_enabled():
            return {}
        at = torch.tensor(t, dtype=torch.float64)
        found = named_rates("drift", self.drift(at, state))
        if self.stochastic:
            found |= named_rates("diffusion", self.diffusion(at, state))
        return found

    def check_step(self, dt: float, state: State, t: float = 0.0) -> None:
        """Refuse, before any work, an explicit step that is too long to be stable at a start."""

    def check_noise(self, t: float, state: State) -> None:
        """Refuse noise that is not of its declared kind, whenever a run is checked as finite."""

    def heat_limit(self, start: AnyState) -> HeatLimit | None:
        """Return the kinetic energy above which a run has blown up; None: there is no limit.

        With a bath at kT it is ``HeatLimit(self, start)``.
        """
        return None

    @property
    def limit(self) -> StateLimit | None:
        """The limit beyond which no state may be, checked after every step; None without one.

        A compiled loop is run again up to the step that ends beyond it.
        """
        return None

    @property
    def reference_box(self) -> Tensor | None:
        """The box to which the strains of states refer; None: states have no strain."""
        return None

    def force_point(self, state: AnyState) -> tuple[Tensor, ...]:
        """Return the fields that forces depend on."""
        return point_of(state) if self.potential is not None else ()

    def potential_energy(self, state: AnyState) -> Energies:
        """Compute the energy that depends on positions, ``(*batch,)``."""
        assert self.potential is not None
        return self.potential(position_of(state))

    def trainable(self) -> dict[str, Tensor]:
        """Collect everything registered that requires grad, by name."""
        return trainable(self)


def named_rates(what: str, rates: AnyState) -> dict[str, Tensor]:
    """Return the fields of a drift or a diffusion by their descriptions."""
    return {f"the {what} of {name}": rate for name, rate in rates._asdict().items()}
