"""Readings inside of readings: boxes, memos, and the ways by which values reach a module."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import adjsim
from adjsim.adjoints.checkpoint import CheckpointAdjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.adjoints.reversible import ReversibleAdjoint
from adjsim.potentials import Potential
from tests.problems import parameter, square

ADJOINTS = [DirectAdjoint(), CheckpointAdjoint(), ReversibleAdjoint()]
NAMES = [type(adjoint).__name__ for adjoint in ADJOINTS]
POINTS = torch.tensor(
    [[0.0, 0.0, 0.0], [4.4, 0.0, 0.0], [0.0, 1.5, 0.0], [1.2, 1.3, 1.1]], dtype=torch.float64
)
CHARGE = (1.0, -1.0, 1.0, -1.0)
CELL, OTHER = [6.0, 6.0, 6.0], torch.tensor([5.5, 5.0, 5.0], dtype=torch.float64)
PARTS = {
    "pairs": lambda box: adjsim.LennardJones(1.0, 1.0, cutoff=2.4, box=box),
    "Ewald": lambda box: adjsim.Ewald(CHARGE, box=box, cutoff=2.4),
    "mesh": lambda box: adjsim.ParticleMeshEwald(CHARGE, box=box, cutoff=2.4, grid=12),
    "bonds": lambda box: adjsim.HarmonicBond([[0, 1]], 1.0, 1.0, box=box),
}


class AtBox(Potential):
    """A potential that evaluates its part in another box, in one of several ways."""

    def __init__(self, part, box, how):
        super().__init__()
        self.part, self.how = part, how
        self.other = nn.Parameter(box.clone()) if how == "parameter" else box

    def forward(self, position):
        if self.how == "call":
            return torch.func.functional_call(self.part, {"box": self.other}, (position,))
        if self.how == "set":
            self.part.box = self.other
            return self.part(position)
        return self.part(position, box=self.other)


@pytest.mark.parametrize("how", ["argument", "parameter", "call", "set"])
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_a_copy_evaluates_its_parts_in_another_box(make, how):
    expected = make(OTHER)(POINTS)
    found = AtBox(make(CELL), OTHER, how)(POINTS)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert found.requires_grad == (how == "parameter")


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_a_record_evaluates_the_potential_in_another_box(make):
    dynamics = adjsim.Hamiltonian(make(CELL))
    start = dynamics.init(POINTS, momentum=torch.zeros_like(POINTS))
    run = adjsim.simulate(
        dynamics, start, [0.0, 0.01], solver=adjsim.VelocityVerlet(0.01),
        record=lambda state: dynamics.potential(state.position, box=OTHER),
    )  # fmt: skip
    torch.testing.assert_close(run.record[0], make(OTHER)(POINTS), rtol=1e-13, atol=0)


def test_a_box_that_cannot_be_replaced_is_refused():
    class Waves(Potential):
        def __init__(self, box):
            super().__init__()
            self.box = box

        def forward(self, position):
            return torch.cos(position / self.box).sum((-1, -2))

    total = PARTS["pairs"](CELL) + Waves(CELL)
    with pytest.raises(ValueError, match=r"Waves has a box that .* cannot replace"):
        total(POINTS, box=OTHER)


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=NAMES)
@pytest.mark.parametrize("name", ["pairs", "Ewald"])
def test_a_trained_box_is_differentiated_or_refused(adjoint, name):
    dynamics = adjsim.Hamiltonian(PARTS[name](CELL))
    start = dynamics.init(POINTS, momentum=torch.zeros_like(POINTS))

    def loss(box):
        def run(dynamics):
            return (
                adjsim.simulate(
                    dynamics,
                    start,
                    [0.0, 0.03],
                    solver=adjsim.VelocityVerlet(0.01),
                    adjoint=adjoint,
                )
                .final.position.square()
                .sum()
            )

        held = nn.Module()
        held.dynamics, held.forward = dynamics, lambda: run(dynamics)
        return torch.func.functional_call(held, {"dynamics.potential.box": box}, ())

    box = torch.tensor(CELL, dtype=torch.float64, requires_grad=True)
    if name == "Ewald" or not isinstance(adjoint, DirectAdjoint):
        with pytest.raises(ValueError, match=r"the box of .* requires grad"):
            loss(box)
        return
    (found,) = torch.autograd.grad(loss(box), box)
    step = torch.tensor([1e-5, 0.0, 0.0], dtype=torch.float64)
    with torch.no_grad():
        difference = (loss(box + step) - loss(box - step)) / 2e-5
    # The truncation of the difference is 1e-10, its rounding 1e-11.
    torch.testing.assert_close(found[0], difference, rtol=1e-6, atol=1e-9)


NAMED = None


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=NAMES)
def test_a_global_record_after_the_end_of_a_functional_call(adjoint):
    """The module holds its own tensors again when the backward pass evaluates the record."""
    global NAMED
    NAMED = adjsim.Hamiltonian(adjsim.Harmonic(1.5))
    held = nn.Module()
    held.dynamics = NAMED
    start = NAMED.init(*square())

    def forward():
        return adjsim.simulate(
            NAMED, start, [0.0, 0.1, 0.2], solver=adjsim.VelocityVerlet(0.02), adjoint=adjoint,
            record=lambda state: NAMED.potential(state.position),
        ).record.sum()  # fmt: skip

    held.forward = forward

    def loss(k):
        return torch.func.functional_call(held, {"dynamics.potential.k": k}, ())

    k = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(k), k)
    with torch.no_grad():
        difference = (loss(k + 1e-5) - loss(k - 1e-5)) / 2e-5
    torch.testing.assert_close(found, difference, rtol=1e-8, atol=0)


class Reaching(nn.Module):
    """A module that reaches its part in a way of its own."""

    def __init__(self, how):
        super().__init__()
        self.part = part = adjsim.Harmonic(parameter(1.5))
        inner = lambda q: part(q)  # noqa: E731
        held = SimpleNamespace(part=part)

        def recursive(q, depth=1):
            return recursive(q, depth - 1) if depth else part(q)

        self.way = {
            "object": lambda q: held.part(q),
            "default": lambda q, p=part: p(q),
            "twice": [inner, inner],
            "shared": [lambda q: inner(q), lambda q: inner(q)],
            "set": {part},
            "key": {part: 1},
            "recursive": recursive,
            "keyword": functools.partial(lambda q, p: p(q), p=part),
        }[how]

    def forward(self, position):
        if callable(self.way):
            return self.way(position)
        energies = [way(position) for way in self.way]
        return sum(energies[1:], energies[0]) / len(energies)


@pytest.mark.parametrize(
    "how", ["object", "default", "twice", "shared", "set", "key", "recursive", "keyword"]
)
def test_copies_reach_their_parts(how):
    """Differences run on copies with other values, and would be zero by another module."""
    dynamics = adjsim.Hamiltonian(Reaching(how))
    position, momentum = square()
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, g: dynamics.init(*(x.expand(n, *x.shape).clone() for x in (position, momentum))),
        [0.0, 0.2],
        adjsim.VelocityVerlet(0.02),
    )
    observable = adjsim.Final(lambda state: state.position.square().sum((-1, -2)))
    found, exact = (
        estimator(simulation, observable, replicas=2, chunks=2, generator=0).grad[
            "potential.part.k"
        ]
        for estimator in (adjsim.FiniteDifference(), adjsim.Pathwise(ReversibleAdjoint()))
    )
    assert abs(float(exact)) > 1e-3
    # Truncation of h^2 = 1e-6.
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def test_differences_of_a_force_that_reads_a_global_are_refused():
    global NAMED
    NAMED = adjsim.Harmonic(parameter(1.5))

    class Global(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = NAMED

        def forward(self, position):
            return NAMED(position)

    dynamics = adjsim.Hamiltonian(Global())
    simulation = adjsim.Simulation(
        dynamics, lambda n, g: dynamics.init(torch.ones(n, 1, 1), momentum=torch.zeros(n, 1, 1)),
        [0.0, 0.1], adjsim.VelocityVerlet(0.05),
    )  # fmt: skip
    observable = adjsim.Final(lambda state: state.position.sum((-1, -2)))
    with pytest.raises(ValueError, match="FiniteDifference: the force reads a parameter"):
        adjsim.FiniteDifference()(simulation, observable, replicas=2, generator=0)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = parameter(0.7)

    @functools.cached_property
    def k(self):
        return self.a.exp()

    def forward(self, position):
        return self.k * position.pow(2).sum((-1, -2))


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=NAMES)
def test_a_number_that_is_computed_once_is_refused(adjoint):
    dynamics = adjsim.Hamiltonian(Kept())
    with pytest.raises(ValueError, match=r"keeps 'potential\.k'"):
        adjsim.simulate(
            dynamics, dynamics.init(*square()), [0.0, 0.1],
            solver=adjsim.VelocityVerlet(0.05), adjoint=adjoint,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"keeps '0\.k'|keeps 'parts\.0\.k'"):
        adjsim.minimize(
            adjsim.potentials.SumPotential(Kept(), adjsim.Harmonic(1.0, 1.0)), square()[0]
        )


class Quartic(adjsim.Harmonic):
    """An energy of one's own, whose base class has another force."""

    def __init__(self):
        super().__init__(parameter(1.0))
        self.extra = parameter(0.3)

    def forward(self, position):
        return super().forward(position) + self.extra * position.pow(4).sum((-1, -2))


class Softer(adjsim.LennardJones):
    def pair_energy(self, s):
        return super().pair_energy(s) + 0.1 / s


@pytest.mark.parametrize("make", [Quartic, Softer])
def test_an_energy_of_a_subclass_has_its_own_force(make):
    potential, q = make(), (1.2 * square()[0]).requires_grad_()
    (slope,) = torch.autograd.grad(potential(q), q)
    torch.testing.assert_close(adjsim.force(potential, q), -slope, rtol=1e-12, atol=1e-12)
    gradients = []
    for adjoint in ADJOINTS:
        dynamics = adjsim.Hamiltonian(potential)
        begin = dynamics.init(q.detach(), momentum=torch.zeros_like(q))
        begin = begin._replace(position=q)
        run = adjsim.simulate(
            dynamics, begin, [0.0, 0.1], solver=adjsim.VelocityVerlet(0.02), adjoint=adjoint
        )
        gradients.append(torch.autograd.grad(run.final.position.pow(3).sum(), q)[0])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_inference_mode_leaves_nothing_behind(make):
    potential, q = make(CELL), POINTS.clone().requires_grad_()
    with torch.inference_mode():
        potential(POINTS)
    (found,) = torch.autograd.grad(potential(q), q)
    torch.testing.assert_close(-found, adjsim.force(make(CELL), POINTS), rtol=1e-10, atol=1e-12)
