"""What compiled code depends on apart from its inputs is looked at before a loop is used again, or
refused.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import jaxtyping
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import adjsim
from adjsim import ReversibleAdjoint, TimeAverage
from adjsim.adjoints import CompileError
from adjsim.adjoints.loops.runner import cache
from adjsim.core.cache_key import cache_key
from tests.problems import parameter, slow_but, square

FACTOR = 1.0


@pytest.fixture(autouse=True)
def _unchecked():
    """The type checks of the tests cannot be traced."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@dataclass
class Shape:
    power: int = 2


class Reads(nn.Module):
    """Reads whatever may change the energy without being a number, a text or a tensor of the module
    itself.
    """

    level = 1.0

    def __init__(self):
        super().__init__()
        self.k = parameter(0.8)
        self.activation = torch.tanh
        self.number, self.array = np.float64(1.0), np.array([1.0, 2.0])
        self.shape, self.plain = Shape(), torch.tensor(1.0)
        self.inner = [nn.Linear(2, 2)]

    def forward(self, position):
        value = (
            self.activation(position) ** self.shape.power
            * float(self.number)
            * torch.as_tensor(self.array)
        )
        return (
            self.level
            * FACTOR
            * self.k
            * self.plain
            * (value + self.inner[0](position) ** 2).sum((-1, -2))
        )


def change_global(potential):
    globals()["FACTOR"] = 1.5


def change_class(potential):
    Reads.level = 1.5


CHANGES = {
    "activation": lambda potential: setattr(potential, "activation", torch.sin),
    "numpy number": lambda potential: setattr(potential, "number", np.float64(1.5)),
    "entry of an array": lambda potential: potential.array.__setitem__(0, 1.5),
    "data class": lambda potential: setattr(potential.shape, "power", 4),
    "tensor of the same place": lambda potential: setattr(potential, "plain", torch.tensor(1.5)),
    "written tensor": lambda potential: potential.plain.mul_(1.5),
    "written data": lambda potential: potential.plain.data.mul_(1.5),
    "module in a list": lambda potential: potential.inner[0].weight.data.mul_(1.5),
    "mode": lambda potential: potential.eval(),
    "hook": lambda potential: potential.register_forward_hook(lambda module, q, energy: 2 * energy),
    "class attribute": change_class,
    "global": change_global,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    dynamics = adjsim.Hamiltonian(Reads())
    before, again = cache_key(dynamics), cache_key(dynamics)
    assert before == again
    assert hash(before) == hash(again)
    try:
        change(dynamics.potential)
        assert cache_key(dynamics) != before
    finally:
        globals()["FACTOR"] = 1.0
        Reads.level = 1.0


def test_an_object_that_cannot_be_looked_at_is_compared_by_its_identity():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(1.0))
    dynamics.potential.lock = threading.Lock()
    before = cache_key(dynamics)
    assert cache_key(dynamics) == before
    dynamics.potential.lock = threading.Lock()
    assert cache_key(dynamics) != before


def test_a_solver_that_cannot_be_looked_at_is_refused():
    dynamics, solver = adjsim.Hamiltonian(adjsim.Harmonic(1.0)), adjsim.VelocityVerlet(0.01)
    solver.lock = threading.Lock()
    with pytest.raises(CompileError, match="cannot be inspected"), torch.no_grad():
        adjsim.simulate(dynamics, dynamics.init(*square()), [0.0, 0.1], solver=solver, compile=True)


def averaged(power, weight):
    return TimeAverage(lambda state: (weight * state.position**power).sum())


def test_a_function_made_anew_is_the_same_function():
    dynamics, weight = adjsim.Hamiltonian(adjsim.Harmonic(1.0)), torch.ones(2)
    keys = [cache_key(dynamics, averaged(2, weight).function) for _ in range(2)]
    assert keys[0] == keys[1]
    assert cache_key(dynamics, averaged(2, torch.ones(2)).function) == keys[0]
    for other in (averaged(4, weight), averaged(2, 2 * weight)):
        assert cache_key(dynamics, other.function) != keys[0]


def end(dynamics, compile, record=None, start=None):
    start = dynamics.init(*square()) if start is None else start
    run = adjsim.simulate(
        dynamics,
        start,
        [0.0, 0.12],
        solver=adjsim.VelocityVerlet(0.01),
        adjoint=ReversibleAdjoint(),
        record=record,
        compile=compile,
    )
    loss = (run.final.position**2).sum() + (0.0 if record is None else run.record)
    return loss.detach(), *torch.autograd.grad(loss, list(dynamics.parameters()))


def gradient(run, dynamics):
    return torch.autograd.grad((run.final.position**2).sum(), list(dynamics.parameters()))


def close(mine, theirs, rtol=1e-11):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-13)


def test_arrays_of_objects_are_compared_by_their_contents():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic())

    def key(number):
        # Of different objects with equal values.
        dynamics.potential.table = np.array([int(str(number)), "a"], dtype=object)
        return cache_key(dynamics)

    assert key(10**6) == key(10**6) != key(10**6 + 1)


@pytest.mark.usefixtures("own_loops")
def test_an_average_made_anew_compiles_nothing():
    """Forward and backward, and the loops that are kept do not grow in number."""
    dynamics, weight = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.3))), torch.tensor([1.0, 0.5])
    close(end(dynamics, True, averaged(2, weight)), end(dynamics, False, averaged(2, weight)))
    kept = len(cache)
    for _ in range(3):
        end(dynamics, True, averaged(2, weight))
    assert len(cache) == kept


def test_a_captured_tensor_that_changes_is_read_anew():
    dynamics, weight = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.3))), torch.tensor([1.0, 0.5])
    record = averaged(2, weight)
    first = end(dynamics, True, record)
    with torch.no_grad():
        again = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.12],
            solver=adjsim.VelocityVerlet(0.01),
            adjoint=ReversibleAdjoint(),
            record=record,
            compile=True,
        )
    assert again.stats["compile_seconds"] == 0.0
    weight.mul_(2)
    close(end(dynamics, True, record), end(dynamics, False, record))
    assert float(end(dynamics, True, record)[0]) != float(first[0])


@pytest.mark.parametrize(
    "scheme", slow_but(lambda scheme: scheme == "ABA", ["BAB", "ABA", "BABAB"])
)
def test_compiled_loops_count_their_evaluations(scheme):
    """Those of the steps one by one."""
    counts = []
    for compile in (True, False):
        dynamics = adjsim.Hamiltonian(adjsim.LennardJones(parameter(1.0)))
        run = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            torch.tensor([0.0, 0.07, 0.2, 0.37]),
            solver=adjsim.Splitting(scheme, 0.01),
            adjoint=ReversibleAdjoint(),
            compile=compile,
        )
        forward = run.stats["energy_evaluations"]
        (run.position**2).sum().backward()
        counts.append((forward, run.stats["energy_evaluations"]))
    # The backward loop of "BABAB" evaluates a force and a product of an absent step. Loops add the
    # cotangents of the two frames in between where the steps meet, and evaluate nothing for them.
    others = {"BAB": -4, "BABAB": 2 - 4}.get(scheme, 0)
    assert counts[0] == (counts[1][0], counts[1][1] + others)
    if scheme == "BAB":
        # One force a step and one at the start. Backward a force and a product at each of the 38
        # positions, and at the two saves in between for the frame as well.
        assert counts[1] == (38, 38 + 2 * (38 + 2))


class SoftCore(adjsim.potentials.PairPotential):
    """Finite where two atoms are in one place; one parameter under two names."""

    def __init__(self, height, **options):
        super().__init__(**options)
        self.height = self.width = height

    def pair_energy(self, s):
        return self.height * torch.exp(-s / self.width)


@pytest.mark.slow
def test_two_atoms_in_one_place_and_one_parameter_under_two_names():
    position = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.7, 0.2], [1.1, -0.3]])
    start = adjsim.PhaseState(
        position, torch.tensor([[0.1, 0.0], [0.1, 0.0], [0.0, 0.2], [0.0, 0.0]])
    )
    dynamics = adjsim.Hamiltonian(SoftCore(parameter(1.1)))
    record = TimeAverage(lambda state: dynamics.potential(state.position))
    close(end(dynamics, True, record, start), end(dynamics, False, record, start))


@pytest.mark.parametrize(
    ("dim", "cutoff"),
    slow_but(
        lambda dim, cutoff: dim == 2 and cutoff == 1.75,
        itertools.product([2, 3], [None, 1.75]),
        marathon=lambda dim, cutoff: cutoff is None,
    ),
)
def test_tilted_cells_compile(dim, cutoff):
    box = torch.tensor([[4.2, 0.0, 0.0], [1.9, 3.9, 0.0], [0.7, 1.1, 4.0]])[:dim, :dim]
    generator = torch.Generator().manual_seed(1)
    start = adjsim.PhaseState(*(torch.randn(5, dim, generator=generator) * x for x in (2.0, 0.3)))
    dynamics = adjsim.Hamiltonian(SoftCore(parameter(1.1), box=box, cutoff=cutoff))
    close(end(dynamics, True, start=start), end(dynamics, False, start=start))


@pytest.mark.slow
def test_exact_runs_of_functions_are_reversed():
    """Torch and a loop, and two loops, may round exp in two ways; under friction a difference would
    stay.
    """
    generator = torch.Generator().manual_seed(2)
    grid = 1.1 * torch.cartesian_prod(*[torch.arange(2.0)] * 3)[:7]
    dynamics = adjsim.Langevin(SoftCore(parameter(3.0)), kT=0.7, friction=1.0)
    start = dynamics.init(grid, generator=generator)
    found = [
        adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.5, 4.0],
            solver=adjsim.Splitting("BAOAB", 0.01, exact=True),
            adjoint=ReversibleAdjoint(),
            generator=1,
            compile=compile,
        )
        for compile in (True, False)
    ]
    assert found[0].stats["compiled_forward"] == "C++"
    ends = [(run.final.position, *gradient(run, dynamics)) for run in found]
    close(*ends)


@pytest.mark.marathon
def test_threads_compile_and_run_at_once():
    many = [adjsim.Hamiltonian(adjsim.DoubleWell(parameter(0.5 + 0.1 * i))) for i in range(3)]
    found = {}

    def work(i):
        found[i] = end(many[i], True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, dynamics in enumerate(many):
        close(found[i], end(dynamics, False))


def test_a_change_before_the_way_back_is_compiled_has_no_effect():
    """A run keeps the numbers that it read at its start."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.k, self.scale = parameter(1.1), 1.0

        def forward(self, position):
            return self.scale * self.k * (position**4).sum((-1, -2))

    found = []
    for compile in (False, True):
        dynamics = adjsim.Hamiltonian(Scaled())
        start, solver = dynamics.init(*square()), adjsim.VelocityVerlet(0.01)
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.12],
            solver=solver,
            adjoint=ReversibleAdjoint(),
            compile=compile,
        )
        if compile:
            dynamics.potential.scale = 1.5
        run.final.position.sum().backward()
        found.append(dynamics.potential.k.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


class Normalised(nn.Module):
    """A network whose first weight is computed by a hook, or by a parametrisation."""

    def __init__(self, normalise):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(normalise(nn.Linear(8, 5)), nn.Tanh(), nn.Linear(5, 1)).eval()

    def forward(self, position):
        return self.net(position.flatten(-2)).squeeze(-1)


# Spectral norms in eval mode are printed as C++, and torch evaluates weight_norm.
NORMS = {
    "spectral, hook": nn.utils.spectral_norm,
    "weight, hook": nn.utils.weight_norm,
    "weight, parametrisation": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", slow_but(lambda name: name == "spectral, hook", NORMS))
def test_weights_that_are_normalised_before_each_evaluation(name):
    gradients = []
    for compile in (False, True):
        dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.3)) + Normalised(NORMS[name]))
        run = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.1],
            solver=adjsim.VelocityVerlet(0.01),
            adjoint=ReversibleAdjoint(),
            compile=compile,
        )
        loss = (run.final.position**2).sum()
        found = torch.autograd.grad(loss, list(dynamics.parameters()), materialize_grads=True)
        # Tracing leaves none of its tensors in the module.
        weights = [x for part in dynamics.modules() for x in vars(part).values()]
        assert not any(isinstance(x, FakeTensor) for x in weights)
        gradients.append(torch.cat([x.flatten() for x in found]))
    assert float(gradients[0].abs().max()) > 0.01
    # Ten steps, rounded in another order.
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
