"""Numbers do not depend on torch's default dtype: a float64 run has equal bits under float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor

import adjsim
from adjsim.dynamics.mechanics.mechanics import Mechanics
from adjsim.potentials.base import SumPotential, force, force_vjp
from tests import bonded, contact, fields, mechanics
from tests.problems import (
    POTENTIALS,
    SCHEMES,
    STOCHASTIC_SCHEMES,
    THERMOSTAT_SCHEMES,
    Case,
    slow_but,
    square,
)

PLANAR = {f"planar {name}": (make, square()[0]) for name, make in POTENTIALS.items()}
CHAINS = {f"chain {name}": (make, bonded.CHAIN) for name, make in bonded.EVERY.items()}
CONTACTS = {
    f"contact {surface} {penalty}": (
        lambda surface=surface, penalty=penalty: contact.contact(surface, penalty),
        contact.POINTS,
    )
    for surface, penalty in contact.SHORT
}
# Points on a line, whose angle is the constant pi.
LINES = {
    "line": (
        lambda: adjsim.HarmonicAngle([[0, 1, 2]], 3.0, 1.9),
        torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]], dtype=torch.float64),
    )
}
EVERY_POTENTIAL = PLANAR | CHAINS | CONTACTS | LINES
EVERY_SCHEME = [
    Case(dynamics, scheme, "lennard-jones")
    for dynamics, words in {**SCHEMES, **STOCHASTIC_SCHEMES, **THERMOSTAT_SCHEMES}.items()
    for scheme in words[:1]
]


@pytest.fixture
def under_both() -> Iterator[Callable[[Callable[[], list[Tensor]]], None]]:
    """Compare the bits of a computation under both default dtypes."""

    def compare(computed: Callable[[], list[Tensor]]) -> None:
        found = []
        for dtype in (torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            found.append(computed())
        double, single = found
        assert len(double) == len(single) > 0
        for x, y in zip(double, single, strict=True):
            assert y.dtype == x.dtype
            assert torch.equal(x, y), f"they differ by up to {float((x - y).abs().max()):.2g}"

    yield compare
    torch.set_default_dtype(torch.float64)


def of_potential(potential: torch.nn.Module, position: Tensor) -> list[Tensor]:
    """Energy, force, virial, and the products of force and energy with their gradients."""
    parameters = [x for x in potential.parameters() if x.requires_grad]
    q = position.clone().requires_grad_()
    energy = potential(q)
    found = [energy, *torch.autograd.grad(energy, (q, *parameters), allow_unused=True)]
    value, pullback = force_vjp(potential, position, parameters)
    along, rest = pullback(torch.cos(position))
    rest = rest if isinstance(rest, list) else rest.gradient(parameters)
    found += [force(potential, position), value, along, *rest]
    if not isinstance(potential, SumPotential) and hasattr(potential, "virial"):
        with suppress(TypeError):  # Restraints have no virial.
            found.append(potential.virial(position))
    return [x.detach() for x in found if x is not None]


def of_run(dynamics, state, solver, adjoint=None, steps: int = 4, **options) -> list[Tensor]:
    """The states of a run, and the gradients of a function of its end."""
    start = type(state)(*(x.detach().clone().requires_grad_() for x in state))
    trajectory = adjsim.simulate(
        dynamics,
        start,
        [0.0, steps * solver.dt],
        solver=solver,
        adjoint=adjsim.DirectAdjoint() if adjoint is None else adjoint,
        generator=3,
        **options,
    )
    end = trajectory.final
    loss = torch.stack([torch.sin(x).sum() for x in end]).sum()
    inputs = [*start, *(x for x in dynamics.parameters() if x.requires_grad)]
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [x.detach() for x in (*end, *grads) if x is not None]


# Pairs trace their formulas in every process first, which takes a second.
@pytest.mark.parametrize("name", slow_but(lambda name: name not in PLANAR, EVERY_POTENTIAL))
def test_potentials(name, under_both):
    make, position = EVERY_POTENTIAL[name]
    under_both(lambda: of_potential(make(), position))


@pytest.mark.parametrize("case", EVERY_SCHEME, ids=str)
def test_steps(case, under_both):
    def computed() -> list[Tensor]:
        dynamics = case.build()
        return of_run(dynamics, case.start(dynamics, *square()), case.solver)

    under_both(computed)


@pytest.mark.parametrize("case", [c for c in EVERY_SCHEME if c.couplings], ids=str)
def test_exact_steps(case, under_both):
    def computed() -> list[Tensor]:
        dynamics = case.build()
        solver = adjsim.Splitting(case.scheme, case.dt, exact=True)
        state = case.start(dynamics, *square())
        return of_run(dynamics, state, solver, adjsim.ReversibleAdjoint())

    under_both(computed)


@pytest.mark.parametrize("name", mechanics.BODIES)
def test_bodies(name, under_both):
    def computed() -> list[Tensor]:
        dynamics = mechanics.BODIES[name]()
        state = mechanics.start_of(dynamics, *mechanics.start())
        return of_run(dynamics, state, adjsim.Splitting(dynamics.scheme, 0.01))

    under_both(computed)


@pytest.mark.parametrize("solver", [adjsim.BackwardEuler, adjsim.ImplicitMidpoint])
@pytest.mark.parametrize("name", ["viscous", "feedback", "hamiltonian"])
def test_implicit_steps(solver, name, under_both):
    def computed() -> list[Tensor]:
        if name == "hamiltonian":
            dynamics = Case("hamiltonian", "BAB", "lennard-jones").build()
            state = dynamics.init(*square())
        else:
            dynamics = mechanics.BODIES[name]()
            state = mechanics.start_of(dynamics, *mechanics.start())
        return of_run(dynamics, state, solver(0.01))

    under_both(computed)


EQUATIONS = {
    "rk4": (None, lambda: adjsim.RungeKutta("rk4", 0.01)),
    "coupled": (None, lambda: adjsim.Coupled("rk4", 0.01)),
    "coupled exact": (None, lambda: adjsim.Coupled("rk4", 0.01, exact=True)),
    "implicit": (None, lambda: adjsim.ImplicitMidpoint(0.01)),
    "euler": ("diagonal", lambda: adjsim.EulerMaruyama(0.01)),
    "milstein": ("diagonal", lambda: adjsim.Milstein(0.01)),
    "heun": ("general", lambda: adjsim.StochasticHeun(0.01)),
    "reversible heun": ("general", lambda: adjsim.ReversibleHeun(0.01)),
}


SLOW_EQUATIONS = ("coupled exact", "milstein", "implicit")


@pytest.mark.parametrize("name", slow_but(lambda name: name not in SLOW_EQUATIONS, EQUATIONS))
def test_vector_fields(name, under_both):
    noise, solver = EQUATIONS[name]

    def computed() -> list[Tensor]:
        dynamics = fields.equation(noise)
        return of_run(dynamics, dynamics.init(fields.start()), solver())

    under_both(computed)


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_continuous_solvers(method, under_both):
    def computed() -> list[Tensor]:
        dynamics = Case("hamiltonian", "BAB", "lennard-jones").build()
        solver = adjsim.ODESolver(method, dt=0.01 if method == "rk4" else None)
        run = adjsim.simulate(dynamics, dynamics.init(*square()), [0.0, 0.1], solver=solver)
        run.final.position.sum().backward()
        return [run.final.position.detach(), *(x.grad for x in dynamics.parameters())]

    under_both(computed)


def test_time_average_of_a_count(under_both):
    """Its dtype is that of the state."""

    def computed() -> list[Tensor]:
        dynamics = adjsim.Hamiltonian(adjsim.Harmonic())
        count = adjsim.TimeAverage(lambda state: state.position > 0)
        options = {"solver": adjsim.VelocityVerlet(0.1), "record": count}
        run = adjsim.simulate(dynamics, dynamics.init(*square()), [0.0, 0.3], **options)
        return [run.record]

    under_both(computed)


def test_a_control_acts_for_the_whole_step(under_both):
    """A constant force of 1 leaves the momentum 1 after the time 1."""

    class Push(adjsim.Controller):
        def forward(self, t, position, velocity):
            return torch.ones_like(position)

    def computed() -> list[Tensor]:
        dynamics = Mechanics(adjsim.Harmonic(0.0), 1.0, control=Push())
        start = dynamics.init(torch.zeros(1, 2, dtype=torch.float64), [[0.0, 0.0]])
        solver = adjsim.Splitting(dynamics.scheme, 0.1)
        run = adjsim.simulate(dynamics, start, [0.0, 1.0], solver=solver)
        # Ten additions of 0.1 are rounded.
        assert float((run.final.momentum - 1).abs().max()) < 1e-15
        return [run.final.momentum]

    under_both(computed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("esh", marks=pytest.mark.slow),
        pytest.param("rayleigh", marks=pytest.mark.marathon),
    ],
)
def test_compiled_steps(name, under_both):
    def computed() -> list[Tensor]:
        if name == "esh":
            case = Case("esh", "EAE", "lennard-jones")
            dynamics, solver = case.build(), case.solver
            state = case.start(dynamics, *square())
        else:
            dynamics = mechanics.BODIES["rayleigh"]()
            state = mechanics.start_of(dynamics, *mechanics.start())
            solver = adjsim.Splitting(dynamics.scheme, 0.01)
        return of_run(dynamics, state, solver, adjsim.ReversibleAdjoint(), compile=True)

    under_both(computed)
