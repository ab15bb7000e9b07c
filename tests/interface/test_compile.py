"""Every step is a pure function of tensors: it compiles whole, with no break in its graph."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.core.reading import read
from adjsim.solvers.base import StepContext
from tests.problems import Case, parameter, slow_but, square

ROWS = [
    ("hamiltonian", "BAB", "lennard-jones"),
    ("hamiltonian", "BAB", "cutoff"),
    ("hamiltonian", "ABA", "plain-module"),
    ("hamiltonian-masses", "BAB", "double-well"),
    ("hamiltonian", "BAB", "muller-brown"),
    ("chain-3", "NBABN", "lennard-jones"),
    ("chain-1", "NBABN", "harmonic"),
    ("esh", "EAE", "lennard-jones"),
    ("langevin", "BAOAB", "lennard-jones"),
    ("generalised-2", "BAGAB", "lennard-jones"),
    ("overdamped", "EulerMaruyama", "double-well"),
    ("overdamped", "LeimkuhlerMatthews", "lennard-jones"),
]


# The type checks of the tests cannot be traced by the compiler.
pytestmark = pytest.mark.usefixtures("unchecked")

STEPS = [Case(*row, exact) for row in ROWS for exact in (False, True)]


@pytest.mark.parametrize(
    "case",
    slow_but(
        lambda c: c.dynamics == "langevin",
        [c for c in STEPS if c.couplings or not c.exact],
        # An exact step is the same moves with roundings.
        marathon=lambda c: c.couplings and not c.exact,
    ),
    ids=repr,
)
def test_a_step_compiles_whole(case):
    torch._dynamo.reset()
    # A run steps the copy of a reading.
    dynamics, solver = read(case.build()), case.solver
    state = case.start(dynamics, *square())
    plan, coefficients = (
        solver.plan(dynamics, state, 0.0),
        solver.coefficients(dynamics, state),
    )
    if case.exact:
        state, coefficients = (
            plan.lattice.to_lattice(state),
            plan.lattice.rationals(coefficients),
        )

    def step(time, state, noise):
        forces = plan.forces(dynamics.potential)
        return plan.step(state, StepContext(lambda share: time, coefficients, noise, forces))

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with torch.no_grad():
        time = torch.tensor(0.0)
        noise = torch.randn(plan.draws * plan.noise_steps, *state.position.shape).unbind(0)
        for a, b in zip(compiled(time, state, noise), step(time, state, noise), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("case", [c for c in STEPS if c.couplings or not c.exact], ids=repr)
def test_a_step_knows_whether_it_shares_its_force(case):
    """A step has its last force at the end, and needs it at the beginning, or neither."""
    dynamics, solver = case.build(), case.solver
    state = case.start(dynamics, *square())
    plan, coefficients = (
        solver.plan(dynamics, state, 0.0),
        solver.coefficients(dynamics, state),
    )
    if case.exact:
        state, coefficients = (
            plan.lattice.to_lattice(state),
            plan.lattice.rationals(coefficients),
        )
    noise = [torch.zeros_like(state.position)] * plan.draws * plan.noise_steps
    forces, counts = plan.forces(dynamics.potential), []
    for _ in range(2):
        state = plan.step(state, StepContext(float, coefficients, noise, forces))
        counts.append(forces.report.energy_evaluations)
    shared = forces.cached((state.position,)) is not None and counts[1] < 2 * counts[0]
    assert plan.shares_force == shared


class Simulated(torch.nn.Module):
    """A network that makes the start of a run."""

    def __init__(self):
        super().__init__()
        self.k, self.scale = parameter(1.3), parameter(0.7)
        self.dynamics = adjsim.Hamiltonian(adjsim.Harmonic(self.k))

    def forward(self, q):
        q = torch.tanh(self.scale * q)
        run = adjsim.simulate(
            self.dynamics,
            adjsim.PhaseState(q, torch.zeros_like(q)),
            [0.0, 0.5],
            solver=adjsim.VelocityVerlet(0.05),
            adjoint=adjsim.ReversibleAdjoint(),
        )
        return (run.final.position**2).sum()


def test_a_module_around_simulate_is_compiled_once():
    """The run is left to Python."""
    # Importing it takes a second.
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    module, q, found = Simulated(), torch.ones(4, 3), []
    compiled, built = torch.compile(module, backend="eager"), []
    for call in (module, compiled, compiled, compiled):
        value = call(q)
        value.backward()
        found.append((value.detach(), module.k.grad, module.scale.grad))
        module.zero_grad()
        built.append(counters["stats"]["unique_graphs"])
    for values in found[1:]:
        torch.testing.assert_close(values, found[0], rtol=1e-12, atol=0)
    assert built[1] == built[2] == built[3]
    assert built[1] - built[0] <= 4
