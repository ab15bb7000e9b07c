"""Loops are found again by what they compute: for objects made anew, and for no others."""

from __future__ import annotations

import copy
import itertools
import sys

import pytest
import torch
from torch import nn

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, TimeAverage
from adjsim.adjoints import CompileError
from adjsim.adjoints.loops.runner import cache
from tests import mechanics
from tests.constraints import MixedClusters, weighted
from tests.problems import parameter, slow_but, square

pytestmark = pytest.mark.usefixtures("own_loops")


class Well(nn.Module):
    """An energy with a plain number, a part, a tensor that is not registered and a buffer."""

    scale = 1.0

    def __init__(self, k=0.8, power=2, part=None, weight=1.0, shift=None):
        super().__init__()
        self.k, self.power = parameter(k), power
        self.part = nn.Tanh() if part is None else part
        self.weight = torch.tensor(weight)
        self.register_buffer("shift", None if shift is None else torch.tensor(shift))

    def forward(self, position):
        x = position if self.shift is None else position - self.shift
        energy = self.k * self.weight * x**self.power + 0.3 * self.part(x)
        return self.scale * energy.sum((-1, -2))


class Tied(nn.Module):
    """Two wells, which may be one."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, position):
        return self.first(position) + 2 * self.second(position**2)


class Named(nn.Module):
    """Two parts without tensors, registered in one order under two orders of names."""

    def __init__(self, *names):
        super().__init__()
        for name, part in zip(names, (nn.Tanh(), nn.Softplus()), strict=True):
            self.add_module(name, part)

    def forward(self, position):
        return (self.first(position) + 2 * self.second(position)).sum((-1, -2))


class Sharper(Well):
    scale = 3.0


def energy_of(potential):
    return adjsim.Hamiltonian(potential, parameter(1.1))


def result(dynamics, compile, *, record=None, adjoint=None, solver=None):
    """The end, the average and their gradients, and the seconds that loops took to compile."""
    position, momentum = (x.requires_grad_() for x in square())
    run = adjsim.simulate(
        dynamics,
        dynamics.init(position, momentum),
        [0.0, 0.1],
        solver=solver or adjsim.VelocityVerlet(0.01),
        adjoint=adjoint or ReversibleAdjoint(),
        record=record,
        compile=compile,
        generator=torch.Generator().manual_seed(2),
    )
    loss = (run.final.position**2).sum() + (0 if record is None else run.record.sum())
    inputs = [position, momentum, *dynamics.parameters()]
    wanted = [x for x in inputs if x.requires_grad]
    values = [loss.detach(), *torch.autograd.grad(loss, wanted, materialize_grads=True)]
    return values, run.stats.get("compile_seconds")


def agree(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def molecule(k):
    bonds = adjsim.potentials.HarmonicBond([[0, 1], [2, 3]], parameter(k), 1.1)
    return adjsim.Langevin(adjsim.LennardJones(parameter(k), 1.0) + bonds, kT=0.3)


def well_of_a_class_made_anew(k):
    class Local(Well):
        def forward(self, position):
            return 1.5 * super().forward(position)

    return energy_of(Local(k))


def well_with_a_hook(k):
    well = Well(k)
    well.part.register_forward_hook(lambda part, given, value: 2 * value)
    return energy_of(well)


MADE = {
    "pairs and bonds": (molecule, adjsim.BAOAB(0.01)),
    "a module": (lambda k: energy_of(Well(k)), None),
    "a buffer": (lambda k: energy_of(Well(k, shift=k)), None),
    "a class": (well_of_a_class_made_anew, None),
    "a hook": (well_with_a_hook, None),
    "exact": (molecule, adjsim.Splitting("BAOAB", 0.01, exact=True)),
}


@pytest.mark.parametrize(
    ("name", "adjoint"),
    slow_but(
        lambda name, adjoint: (
            isinstance(adjoint, ReversibleAdjoint) and name not in ("a hook", "exact")
        ),
        itertools.product(MADE, [ReversibleAdjoint(), CheckpointAdjoint(3)]),
        # By what a loop is found does not depend on the adjoint.
        marathon=lambda name, adjoint: (
            isinstance(adjoint, CheckpointAdjoint) and name != "pairs and bonds"
        ),
    ),
    ids=str,
)
def test_a_dynamics_made_anew_compiles_nothing(name, adjoint):
    """With other numbers, of which it has the gradient; a closure is made anew too."""
    make, solver = MADE[name]
    for k in (0.8, 0.9, 1.3):
        average = TimeAverage(lambda state: (state.position**3).sum((-1, -2)))
        options = {"record": average, "adjoint": adjoint, "solver": solver}
        found, seconds = result(make(k), True, **options)
        if k == 0.8:
            kept = len(cache)
        else:
            assert seconds == 0.0
            assert len(cache) == kept
        agree(found, result(make(k), False, **options)[0])


@pytest.mark.slow
def test_a_soft_body_made_anew_compiles_nothing():
    kept = None
    for _ in range(2):
        dynamics = mechanics.BODIES["prescribed"]()
        begin = mechanics.start_of(dynamics, *mechanics.start())
        solver = adjsim.Splitting(dynamics.scheme, 0.01)
        run = adjsim.simulate(dynamics, begin, [0.0, 0.03], solver=solver, compile=True)
        torch.autograd.grad((run.final.position**2).sum(), list(dynamics.parameters()))
        assert kept is None or (len(cache) == kept and run.stats["compile_seconds"] == 0.0)
        kept = len(cache)


@pytest.mark.marathon
@pytest.mark.parametrize("exact", [False, True])
def test_constrained_dynamics_made_anew_compile_nothing(exact):
    """Though cotangents along constraints cancel, up to rounding."""
    kept = None
    for _ in range(2):
        system = MixedClusters()
        numbers = system.parameters()
        run = system.run(numbers, 6, exact=exact, adjoint=ReversibleAdjoint(), compile=True)
        torch.autograd.grad(weighted(run.final), list(numbers.values()))
        assert kept is None or (len(cache) == kept and run.stats["compile_seconds"] == 0.0)
        kept = len(cache)


def captured(number):
    tensor = torch.tensor(number)
    return TimeAverage(lambda state: tensor * (state.position**2).sum((-1, -2)))


def closed_over(number):
    return TimeAverage(lambda state: number * (state.position**2).sum((-1, -2)))


def of_a_module(number):
    outside = nn.Linear(2, 1)
    nn.init.constant_(outside.weight, number)
    outside.requires_grad_(False)
    return TimeAverage(lambda state: outside(state.position).sum((-1, -2)))


def sums(one):
    well = Well(0.7)
    return Tied(well, well if one else Well(0.7))


def made_of(kind):
    """A well of a class that is made in this call."""

    class Local(Well):
        def forward(self, position):
            return kind * super().forward(position)

    return Local()


OTHERS = {
    "a number": (lambda i: energy_of(Well(power=2 + 2 * i)), None),
    "a part": (lambda i: energy_of(Well(part=[nn.Tanh(), nn.Softplus()][i])), None),
    "a setting of a part": (lambda i: energy_of(Well(part=nn.Softplus(beta=1.0 + i))), None),
    "a tensor that is not registered": (lambda i: energy_of(Well(weight=1.0 + i)), None),
    "a buffer or none": (lambda i: energy_of(Well(shift=[None, 0.2][i])), None),
    "a class": (lambda i: energy_of([Well, Sharper][i]()), None),
    "a class made anew": (lambda i: energy_of(made_of(1.0 + i)), None),
    "one part or two": (lambda i: energy_of(sums(i)), None),
    "the order of parts": (
        lambda i: energy_of(Tied(*[Well(0.7), Sharper(0.7)][:: 1 - 2 * i])),
        None,
    ),
    "the names of parts": (
        lambda i: energy_of(Named(*["first", "second"][:: 1 - 2 * i])),
        None,
    ),
    "a parameter that is held": (
        lambda i: energy_of(Well().requires_grad_(bool(i))),
        None,
    ),
    "a captured tensor": (lambda i: energy_of(Well()), lambda i: captured(1.0 + i)),
    "a closure": (lambda i: energy_of(Well()), lambda i: closed_over(1.0 + i)),
    "a module of the record": (lambda i: energy_of(Well()), lambda i: of_a_module(1.0 + i)),
    "a cutoff": (
        lambda i: energy_of(adjsim.LennardJones(parameter(0.5), 1.0, cutoff=[1.3, 2.5][i])),
        None,
    ),
}


# One of each kind of key: numbers, parts, classes, what requires grad, records, pairs.
BY_DEFAULT = (
    *("a number", "a class", "a parameter that is held"),
    "a closure",
)


@pytest.mark.parametrize(
    ("first", "name"),
    slow_but(
        lambda first, name: first == 0 and name in BY_DEFAULT,
        itertools.product((0, 1), OTHERS),
        marathon=lambda first, name: first == 1,
    ),
)
def test_another_computation_has_another_loop(name, first):
    """Whichever was compiled first."""
    make, record = OTHERS[name]
    for i in (first, 1 - first):
        average = None if record is None else record(i)
        expected = result(make(i), False, record=average)[0]
        agree(result(make(i), True, record=average)[0], expected)


@pytest.mark.parametrize(
    "adjoint",
    [pytest.param(DirectAdjoint(), marks=pytest.mark.slow), ReversibleAdjoint()],
    ids=["direct", "rev"],
)
def test_a_copy_that_has_changed_has_a_loop_of_its_own(adjoint):
    """And the first one, used again, has the loop that it had."""
    one = energy_of(Well())
    expected = result(one, False, adjoint=adjoint)[0]
    agree(result(one, True, adjoint=adjoint)[0], expected)
    other = copy.deepcopy(one)
    other.potential.power = 4
    agree(result(other, True, adjoint=adjoint)[0], result(other, False, adjoint=adjoint)[0])
    found, seconds = result(one, True, adjoint=adjoint)
    assert seconds == 0.0
    agree(found, expected)


def test_pairs_with_tensors_in_their_parts_have_their_own_numbers():
    """Torch evaluates them: numbers of parts are no operands of a printed formula."""

    class Screened(adjsim.potentials.PairPotential):
        def __init__(self, number):
            super().__init__()
            self.part = nn.Module()
            self.part.register_buffer("number", torch.tensor(number))

        def pair_energy(self, s):
            return torch.exp(-s * self.part.number)

    q, _ = square()
    for number in (1.0, 2.0):
        distance = torch.pdist(q) ** 2
        torch.testing.assert_close(Screened(number)(q), torch.exp(-number * distance).sum())


FACTOR = 1.0


class Hidden(Well):
    """A well that reads a number by a computed name, which no key has."""

    def forward(self, position):
        return globals()["".join(["FAC", "TOR"])] * super().forward(position)


@pytest.mark.slow
def test_a_loop_of_another_dynamics_is_checked_before_it_is_taken(monkeypatch):
    """Though its step is too short for a check that the time of the loop would allow."""
    for factor in (1.0, 2.0, 1.0):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        for _ in range(2):
            dynamics = energy_of(Hidden())
            agree(result(dynamics, True)[0], result(dynamics, False)[0])


def test_a_tensor_of_another_dynamics_may_come_to_require_grad():
    """It is no tensor of the dynamics that has its loop."""
    first, second = Well(), Well()
    agree(result(energy_of(first), True)[0], result(energy_of(first), False)[0])
    first.weight.requires_grad_()
    agree(result(energy_of(second), True)[0], result(energy_of(second), False)[0])


def grow(t, x):
    """A rate with a tensor by a computed name, which no key has."""
    return globals()["".join(["FAC", "TOR"])] * x


def test_a_tensor_that_no_key_has_may_not_come_to_require_grad(monkeypatch):
    """The loop that has its number has no gradient to it."""
    number = torch.tensor(2.0)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", number)
    field, solver = adjsim.ODE(grow), adjsim.RungeKutta("rk4", 0.01)

    def end():
        start = field.init(torch.ones(2, requires_grad=True))
        return adjsim.simulate(field, start, [0.0, 0.1], solver=solver, compile=True).final

    for _ in range(2):
        torch.testing.assert_close(end().y, torch.full((2,), 0.2).exp(), rtol=1e-9, atol=0.0)
    number.requires_grad_()
    with pytest.raises(CompileError, match="requires grad and is not registered"):
        end()


def test_a_captured_tensor_may_be_detached_where_it_is_read():
    """It has no gradient then, with and without compilation, and stays found."""
    number = torch.tensor(2.0, requires_grad=True)
    average = TimeAverage(lambda state: number.detach() * (state.position**2).sum((-1, -2)))
    expected = result(energy_of(Well()), False, record=average)[0]
    found, first = result(energy_of(Well()), True, record=average)
    agree(found, expected)
    found, again = result(energy_of(Well()), True, record=average)
    assert first > again == 0.0
    agree(found, expected)
