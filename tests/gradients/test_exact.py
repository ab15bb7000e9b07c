"""Exact runs: every adjoint on one path, to the last bit; where floating-point reversal is lost,
the gradient is not.
"""

from __future__ import annotations

import itertools
import math

import ase.units
import pytest
import torch
from torch import nn

import adjsim
from adjsim import (
    CheckpointAdjoint,
    DirectAdjoint,
    ReconstructionError,
    ReversibleAdjoint,
    Splitting,
    TimeAverage,
)
from adjsim.dynamics import Coefficient, Scale
from adjsim.io.systems import cluster
from tests.gradients.test_table import (
    LOSSES,
    agree,
    by_default,
    gradients,
    in_a_marathon,
    moment,
)
from tests.problems import (
    Case,
    chaotic,
    parameter,
    potentials,
    schemes,
    slow_but,
    square,
    start as start_of,
    vector,
)
from tests.retracing import forth_and_back

CASES = [
    Case(c.dynamics, c.scheme, c.potential, exact=True)
    for c in [*schemes(), *potentials()]
    if c.couplings
]
PLAIN = "langevin-BAOAB-plain-module"
# One scheme of each dynamics with every loss, and all others with saves.
FIRST = {case.dynamics: case for case in reversed(CASES)}
ROWS = [(case, kind) for case in FIRST.values() for kind in LOSSES]
ROWS += [(case, "saves") for case in CASES if case not in FIRST.values()]


def distance_of_lattice(case: Case) -> float:
    """How far gradients of exact steps are from those of plain steps, relative to the latter."""
    dynamics = case.build()
    state = case.start(dynamics, *square())
    moves = [move for term in dynamics.terms.values() for move in term.moves(case.dt, state)]
    sources = [move.source for move in moves if isinstance(move, Scale)]
    # The lattice is fine to 1e-12, fractions of coefficients to 1e-7 and factors that depend on the
    # state to 2^-23, in each flow; the gradient's derivative by what they move is some tens of it
    # (a gradient that cancels is held to a thousandth of the largest).
    if any(not isinstance(source, Coefficient) for source in sources):
        return 1e-4
    return 3e-6 if sources else 1e-8


@pytest.mark.parametrize(
    ("case", "kind"),
    # What a record or an average reads does not depend on the rounding of the steps.
    slow_but(
        by_default,
        ROWS,
        lambda c, kind: kind in ("record", "average") or in_a_marathon(c, kind),
    ),
    ids=str,
)
def test_all_adjoints_agree(case, kind):
    direct = gradients(case, kind, DirectAdjoint())
    # Where segments end does not depend on the scheme or on what is saved.
    for segments in (None, 7) if kind == "final" else (7,):
        agree(gradients(case, kind, CheckpointAdjoint(segments)), direct, 1e-12)
    for every in (None, 7) if kind == "final" else (None,):
        agree(gradients(case, kind, ReversibleAdjoint(checkpoint_every=every)), direct, 1e-12)
    plain = gradients(Case(case.dynamics, case.scheme, case.potential), kind, DirectAdjoint())
    agree(direct, plain, distance_of_lattice(case))


@pytest.mark.parametrize(
    "case",
    slow_but(
        lambda case: by_default(case, "final") and case in FIRST.values(),
        [case for case in CASES if case.potential == "lennard-jones" or str(case) == PLAIN],
        # Schemes of the same dynamics: the longest of each stays.
        marathon=lambda case: case.scheme in ("ABA", "BA", "ANBNA", "BAN", "ABOBA", "BAO", "BAGAB"),
    ),
    ids=str,
)
def test_one_path_whatever_is_asked_of_it(case):
    """Saves, records, segments and adjoints: the final state is the same to the last bit."""
    ends, end, saves = [], [0, 71], [0, 1, 64, 65, 71]
    for steps, adjoint, record in (
        (end, DirectAdjoint(), None),
        (saves, DirectAdjoint(), TimeAverage(moment)),
        (saves, CheckpointAdjoint(5), None),
        (end, ReversibleAdjoint(), TimeAverage(moment)),
    ):
        dynamics = case.build()
        run = adjsim.simulate(
            dynamics,
            case.start(dynamics, *square()),
            torch.tensor(steps) * case.dt,
            solver=case.solver,
            adjoint=adjoint,
            record=record,
            generator=torch.Generator().manual_seed(1),
        )
        ends.append(run.final)
        if record is None:
            frame = type(run.final)(*(getattr(run, name)[-1] for name in run.final._fields))
            assert all(torch.equal(a, b) for a, b in zip(frame, run.final, strict=True))
    for end in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(end, ends[0], strict=True))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("hamiltonian", "BAB"),
        ("langevin", "BAOAB"),
        ("generalised-2", "BAGAB"),
        ("chain-3", "NBABN"),
    ],
)
def test_a_system_does_not_depend_on_its_batch(name, scheme):
    """Lattice, buffers and spills are each system's own, so a batch is its systems one by one, to
    the last bit.
    """
    case = Case(name, scheme, "lennard-jones", exact=True)
    dynamics = case.build()
    if name == "langevin":
        dynamics.friction.data.fill_(80.0)  # spills after 30 steps
    position, momentum = (x[..., :, :] for x in square((3,)))
    momentum = momentum * torch.tensor([1.0, 0.3, 0.1]).reshape(3, 1, 1)

    def end(count):
        start = start_of(dynamics, position[:count], momentum[:count])
        return adjsim.simulate(
            dynamics,
            start,
            [0, 0.75],
            solver=case.solver,
            generator=torch.Generator().manual_seed(1),
        ).final

    for mine, theirs in zip(end(1), end(3), strict=True):
        assert torch.equal(mine[0], theirs[0])


@pytest.mark.parametrize(
    "name", ["langevin", pytest.param("generalised-2", marks=pytest.mark.marathon)]
)
def test_spilled_words_come_back(name):
    """Friction fills the buffers many times over, in a batch, with saves between the spills."""
    scheme = {"langevin": "OBABO", "generalised-2": "GBABG"}[name]
    found = {}
    for adjoint in (ReversibleAdjoint(), CheckpointAdjoint(7)):
        dynamics = Case(name, scheme, "lennard-jones").build()
        if name == "langevin":
            dynamics.friction.data.fill_(180.0)
        start = start_of(dynamics, *square((2,)))
        run = adjsim.simulate(
            dynamics,
            start,
            torch.tensor(
                [0.0, 0.44, 1.26, 1.51] if name == "langevin" else [0.0, 3.33, 7.77, 9.01]
            ),
            solver=Splitting(scheme, 0.01, exact=True),
            adjoint=adjoint,
            generator=torch.Generator().manual_seed(1),
        )
        found[adjoint] = torch.autograd.grad(
            moment(run.final) + run.position.sum(), list(dynamics.parameters())
        )
        assert run.stats["buffer_bits"] * run.stats["steps"] > 64
    for mine, theirs in zip(*found.values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def lj13():
    return adjsim.LennardJones(parameter(1.0), parameter(1.0))


# Temperatures at which the cluster is a hot liquid drop or, without friction, melts.
HOT = {
    "BAB": lambda: adjsim.Hamiltonian(lj13(), parameter(1.0)),
    "BAOAB, friction 1": lambda: adjsim.Langevin(
        lj13(), parameter(1.0), parameter(0.25), parameter(1.0)
    ),
    "BAOAB, friction 10": lambda: adjsim.Langevin(
        lj13(), parameter(1.0), parameter(0.25), parameter(10.0)
    ),
    "NBABN": lambda: adjsim.NoseHooverChain(
        lj13(), parameter(1.0), parameter(0.25), parameter(0.3)
    ),
    "BAGAB": lambda: adjsim.GeneralizedLangevin(
        lj13(), parameter(1.0), parameter(0.25), vector(1.0, 4.0), vector(1.0, 8.0)
    ),
}


def hot_start(dynamics, temperature=0.6):
    position, generator = cluster().position, torch.Generator().manual_seed(3)
    momentum = math.sqrt(temperature) * torch.randn(13, 3, generator=generator)
    return dynamics.init(position, momentum - momentum.mean(0), generator)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("BAOAB, friction 10", 3007, marks=pytest.mark.slow),
        *(
            pytest.param(name, 100_003, marks=pytest.mark.marathon)
            for name in ("BAB", "BAOAB, friction 1", "BAOAB, friction 10", "NBABN", "BAGAB")
        ),
    ],
)
def test_long_runs_come_back_bit_for_bit(name, steps):
    """And empty buffers with them. The numbers of steps are prime."""
    dynamics = HOT[name]()
    before, after, back = forth_and_back(
        dynamics, hot_start(dynamics), Splitting(name.split(",")[0], 0.005, exact=True), steps
    )
    assert float((before.position - after.position).abs().max()) > 0.1
    for field, a, b in zip(before._fields, before, back, strict=True):
        assert torch.equal(a, b), field


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("BAOAB, friction 1", 7_000, marks=pytest.mark.marathon),
        pytest.param("NBABN", 4_000, marks=pytest.mark.marathon),
    ],
)
@chaotic
def test_gradient_where_floating_point_is_lost(name, steps):
    """A chaotic cluster, fewer steps of the costlier schemes: plain reversal fails, the exact one
    does not.
    """
    word = name.split(",")[0]

    def run(adjoint, exact):
        dynamics = HOT[name]()
        result = adjsim.simulate(
            dynamics,
            hot_start(dynamics),
            torch.tensor([0.0, 0.4, 1.0]) * steps * 0.005,
            solver=Splitting(word, 0.005, exact=exact),
            adjoint=adjoint,
            record=lambda state: (state.position**2).mean(),
            generator=torch.Generator().manual_seed(4),
        )
        return torch.autograd.grad(result.record[-1], list(dynamics.parameters())), result.stats

    mine, stats = run(ReversibleAdjoint(), True)
    theirs, _ = run(CheckpointAdjoint(), True)
    assert stats["reconstruction_error"] == 0.0
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=0)
    with pytest.raises(ReconstructionError):
        run(ReversibleAdjoint(checkpoint_every=steps), False)


@pytest.mark.marathon
@chaotic
def test_twenty_thousand_chaotic_steps():
    """Reversal against backpropagation through the same exact run, two gigabytes of it."""

    def gradients(adjoint):
        dynamics = HOT["BAB"]()
        start = hot_start(dynamics)
        start = type(start)(*(x.requires_grad_() for x in start))
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, 100.0],
            solver=Splitting("BAB", 0.005, exact=True),
            adjoint=adjoint,
        )
        return torch.autograd.grad((run.final.position**2).mean(), [*dynamics.parameters(), *start])

    for mine, direct in zip(
        gradients(ReversibleAdjoint()), gradients(DirectAdjoint()), strict=True
    ):
        assert float(direct.norm()) > 1e12  # chaos
        assert float((mine - direct).norm()) <= 1e-9 * float(direct.norm())


@pytest.mark.parametrize(
    ("scheme", "make"),
    [
        pytest.param(
            "BAOAB",
            lambda: adjsim.Langevin(
                adjsim.DoubleWell(parameter(0.7)),
                vector(1.0, 1.5, 0.8, 2.0),
                parameter(0.6),
                parameter(20.0),
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "BAGAB",
            lambda: adjsim.GeneralizedLangevin(
                adjsim.DoubleWell(parameter(0.7)),
                parameter(1.4),
                parameter(0.6),
                vector(5.0, 20.0),
                vector(20.0, 80.0),
            ),
            marks=pytest.mark.marathon,
        ),
    ],
)
def test_friction_times_time_of_a_hundred(scheme, make):
    """Without a checkpoint, where floating-point reversal has lost the state 27 times over."""
    dt = 0.005
    time = round(100.0 / make().damping(start_of(make(), *square())) / dt) * dt
    found = {}
    for adjoint in (DirectAdjoint(), CheckpointAdjoint(), ReversibleAdjoint()):
        dynamics = make()
        position, momentum = (x.requires_grad_() for x in square())
        run = adjsim.simulate(
            dynamics,
            start_of(dynamics, position, momentum),
            [0.0, time],
            solver=Splitting(scheme, dt, exact=True),
            adjoint=adjoint,
            generator=torch.Generator().manual_seed(2),
        )
        loss = sum((x**2).sum() for x in run.final)
        found[adjoint] = torch.autograd.grad(loss, [*dynamics.parameters(), position, momentum])
        if isinstance(adjoint, ReversibleAdjoint):
            assert run.stats["reconstruction_error"] == 0.0
            assert run.stats["checkpoint_every"] is None
    direct, *others = found.values()
    largest = max(float(g.norm()) for g in direct)
    for mine in others:
        for a, b in zip(mine, direct, strict=True):
            # What friction has forgotten, the start, has a gradient of 1e-40 of the others.
            assert float((a - b).norm()) <= 1e-9 * max(float(b.norm()), 1e-12 * largest)


UNITS = {
    "reduced": (1.0, 1.0, 1.0, 0.005, 0.3),
    "eV, angstrom, amu": (0.0104, 3.4, 39.948, 4 * ase.units.fs, 85 * ase.units.kB),
    "SI": (1.67e-21, 3.4e-10, 6.63e-26, 1e-14, 1.17e-21),
    "tiny": (1e-60, 1e-40, 1e-50, 0.005e-35, 0.3e-60),
}


@pytest.mark.parametrize(
    ("name", "units"),
    slow_but(
        lambda name, units: (name, units) == ("hamiltonian", "SI"),
        itertools.product(["hamiltonian", "langevin", "chain"], UNITS),
        marathon=lambda name, units: name == "chain" and units != "SI",
    ),
)
def test_any_units(name, units):
    epsilon, sigma, mass, dt, kT = UNITS[units]
    potential = adjsim.LennardJones(epsilon, sigma)
    dynamics, scheme = {
        "hamiltonian": (adjsim.Hamiltonian(potential, mass), "BAB"),
        "langevin": (adjsim.Langevin(potential, mass, kT, 0.02 / dt), "BAOAB"),
        "chain": (adjsim.NoseHooverChain(potential, mass, kT, 100 * dt), "NBABN"),
    }[name]
    momentum = math.sqrt(mass * kT) * torch.randn(13, 3, generator=torch.Generator().manual_seed(0))
    start = dynamics.init(cluster().position * sigma, momentum)
    before, after, back = forth_and_back(dynamics, start, Splitting(scheme, dt, exact=True), 250)
    assert float((before.position - start.position).abs().max()) < 1e-11 * sigma
    assert float((before.position - after.position).abs().max()) > 0.01 * sigma
    assert all(torch.equal(a, b) for a, b in zip(before, back, strict=True))


@pytest.mark.slow
def test_starts_without_a_scale_of_their_own():
    """At the origin, at rest: the forces and the temperature say how large things will be."""
    zeros = torch.zeros(1, 2)
    falling = adjsim.Hamiltonian(adjsim.AsymmetricDoubleWell(parameter(1.0), parameter(0.3)))
    resting = adjsim.Langevin(adjsim.Harmonic(1.0))
    for dynamics, scheme in ((falling, "BAB"), (resting, "BAOAB")):
        before, after, back = forth_and_back(
            dynamics, dynamics.init(zeros, zeros), Splitting(scheme, 0.01, exact=True), 3000
        )
        assert float(after.position.abs().max()) > 0.01
        assert all(torch.equal(a, b) for a, b in zip(before, back, strict=True))


class Noisy(nn.Module):
    """A force that is never the same twice, in its last digits."""

    def __init__(self):
        super().__init__()
        self.k, self.generator = parameter(1.0), torch.Generator().manual_seed(0)

    def forward(self, position):
        noise = 1 + 1e-12 * torch.randn((), generator=self.generator)
        return (0.5 * self.k * position**2 * noise).sum((-1, -2))


@pytest.mark.parametrize("record", [None, TimeAverage(moment)], ids=["frames", "average"])
def test_a_force_that_is_not_reproducible_is_caught(record):
    dynamics = adjsim.Hamiltonian(Noisy())
    run = adjsim.simulate(
        dynamics,
        dynamics.init(*square()),
        [0.0, 0.5, 1.0],
        solver=Splitting("BAB", 0.01, exact=True),
        adjoint=ReversibleAdjoint(),
        record=record,
    )
    with pytest.raises(ReconstructionError, match=r"step 50, .*random"):
        moment(run.final).backward()


class Stiff(torch.nn.Module):
    """With a number of the class, which a run cannot hold fast."""

    k = 1.0

    def __init__(self):
        super().__init__()
        self.center = parameter(0.0)

    def forward(self, position):
        return (0.5 * self.k * (position - self.center) ** 2).sum((-1, -2))


def test_a_number_changed_between_forward_and_backward_is_caught(monkeypatch):
    dynamics = adjsim.Hamiltonian(Stiff())
    run = adjsim.simulate(
        dynamics,
        dynamics.init(*square()),
        [0.0, 1.0],
        solver=Splitting("BAB", 0.01, exact=True),
        adjoint=ReversibleAdjoint(),
    )
    monkeypatch.setattr(Stiff, "k", 1.0 + 1e-13)
    with pytest.raises(ReconstructionError, match="did not recover"):
        moment(run.final).backward()


def test_more_fingerprints_find_a_change_sooner(monkeypatch):
    dynamics = adjsim.Hamiltonian(Stiff())
    run = adjsim.simulate(
        dynamics,
        dynamics.init(*square()),
        [0.0, 1.0],
        solver=Splitting("BAB", 0.01, exact=True),
        adjoint=ReversibleAdjoint(checkpoint_every=30),
    )
    monkeypatch.setattr(Stiff, "k", 1.0 + 1e-13)
    with pytest.raises(ReconstructionError, match="did not recover the state of step 90,"):
        moment(run.final).backward()


@pytest.mark.slow
def test_the_order_of_a_sum_does_not_matter():
    """Forward on one thread, backward on two: pair contributions are on a grid, so their sum has no
    order.
    """
    generator = torch.Generator().manual_seed(0)
    corner = torch.cartesian_prod(*[torch.arange(6.0)] * 3) * 1.15
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(parameter(1.0), parameter(1.0)))
    start = dynamics.init(corner, torch.randn(216, 3, generator=generator))
    run = adjsim.simulate(
        dynamics,
        start,
        [0.0, 0.1],
        solver=Splitting("BAB", 0.005, exact=True),
        adjoint=ReversibleAdjoint(),
    )
    try:
        torch.set_num_threads(2)
        run.final.position.square().sum().backward()
    finally:
        torch.set_num_threads(1)
    assert run.stats["reconstruction_error"] == 0.0
    # And in any order at all: the atoms the other way round. Without the grid the last digits
    # differ.
    potential, grid = (
        dynamics.potential,
        Splitting("BAB", 0.005, exact=True).plan(dynamics, start, 0.0).force_roundings[0],
    )
    position = run.final.position.detach()
    assert torch.equal(
        potential.force(position, grid), potential.force(position.flip(0), grid).flip(0)
    )
    assert not torch.equal(potential.force(position), potential.force(position.flip(0)).flip(0))


def test_backward_twice_and_no_graph_of_its_own():
    dynamics = Case("langevin", "BAOAB", "lennard-jones").build()
    run = adjsim.simulate(
        dynamics,
        start_of(dynamics, *square()),
        [0.0, 1.0],
        solver=Splitting("BAOAB", 0.01, exact=True),
        adjoint=ReversibleAdjoint(),
    )
    loss, inputs = moment(run.final), list(dynamics.parameters())
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, inputs, retain_graph=True), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="DirectAdjoint"):
        torch.autograd.grad(loss, inputs, create_graph=True)


def test_direct_can_be_differentiated_twice():
    """The second derivative of an exact run is that of the plain one, up to the lattice."""
    found = []
    for exact in (False, True):
        dynamics = Case("hamiltonian", "BAB", "lennard-jones").build()
        start = start_of(dynamics, *square())
        run = adjsim.simulate(
            dynamics, start, [0.0, 0.2], solver=Splitting("BAB", 0.01, exact=exact)
        )
        inputs = list(dynamics.parameters())
        slopes = torch.autograd.grad(moment(run.final), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(s.sum() for s in slopes), inputs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# What is refused, before a step is taken.


def test_float32_is_refused_with_the_reason():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic())
    start = dynamics.init(*(x.float() for x in square()))
    with pytest.raises(ValueError, match=r"needs a float64 state, not torch\.float32.*53 bits"):
        adjsim.simulate(dynamics, start, [0.0, 0.1], solver=Splitting("BAB", 0.01, exact=True))


def test_a_flow_that_is_no_coupling_is_refused():
    dynamics = adjsim.ESH(adjsim.Harmonic())
    with pytest.raises(TypeError, match="shears and scales, and term 'E' of ESH is neither"):
        adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.1],
            solver=Splitting("EAE", 0.01, exact=True),
        )


def test_transforms_are_refused():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic())
    position, momentum = square()

    def end(q):
        start = dynamics.init(q, momentum)
        return adjsim.simulate(
            dynamics, start, [0.0, 0.1], solver=Splitting("BAB", 0.01, exact=True)
        ).final.position.sum()

    with pytest.raises(RuntimeError, match=r"torch\.func transforms"):
        torch.func.grad(end)(position)


@pytest.mark.parametrize(("friction", "way"), [(1e-9, "larger"), (5e3, "smaller")])
def test_friction_that_no_fraction_stands_for_is_refused(friction, way):
    dynamics = adjsim.Langevin(adjsim.Harmonic(), friction=friction)
    with pytest.raises(ValueError, match=f"'decay' of term 'O'.*Use a {way} dt"):
        adjsim.simulate(
            dynamics,
            start_of(dynamics, *square()),
            [0.0, 0.1],
            solver=Splitting("BAOAB", 0.01, exact=True),
        )


def test_friction_that_would_overfill_the_buffers_is_refused():
    dynamics = adjsim.Langevin(adjsim.Harmonic(), friction=1200.0)
    with pytest.raises(ValueError, match="bits a step"):
        adjsim.simulate(
            dynamics,
            start_of(dynamics, *square()),
            [0.0, 0.1],
            solver=Splitting("BAOAB", 0.01, exact=True),
        )


# Where the lattice ends.


def test_a_particle_that_flies_off_names_the_step():
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones())
    position = torch.tensor([[0.0, 0.0], [0.4, 0.0]])
    start = dynamics.init(position, torch.zeros(2, 2))
    with pytest.raises(
        OverflowError,
        match=r"position left the lattice of the exact run, which reaches to .*, in step \d+ ",
    ):
        adjsim.simulate(dynamics, start, [0, 100.0], solver=Splitting("BAB", 0.001, exact=True))


def test_a_force_that_explodes_names_the_step_and_the_remedy():
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones())
    position = torch.tensor([[0.0, 0.0], [1.2, 0.0]])
    momentum = torch.tensor([[12.0, 0.0], [-12.0, 0.0]])
    with pytest.raises(OverflowError, match=r"left the lattice.*in step \d.*Use a smaller dt"):
        adjsim.simulate(
            dynamics,
            dynamics.init(position, momentum),
            [0, 5.0],
            solver=Splitting("BAB", 0.05, exact=True),
        )


# What the buffers cost, and what they must not change.


@pytest.mark.parametrize("scheme", ["BAOAB", "OBABO"])
def test_buffers_hold_what_friction_took(scheme):
    """Bits a degree of freedom and step within 1.5 of friction dt / ln 2, at friction dt = 0.01
    over 20,000 steps.
    """
    dynamics = adjsim.Langevin(adjsim.DoubleWell(1.0), friction=2.0)
    start = dynamics.init(torch.ones(13, 3), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, 100.0],
            solver=Splitting(scheme, 0.005, exact=True),
            adjoint=ReversibleAdjoint(),
            compile=True,
        )
    bound = 0.01 / math.log(2)
    assert run.stats["buffer_bound"] == pytest.approx(bound, rel=1e-6)
    assert 0.95 * bound < run.stats["buffer_bits"] < 1.5 * bound


@pytest.mark.slow
def test_buffers_of_conservative_and_thermostatted_runs():
    """Nothing is lost without friction, and a chain takes back most of what it lends."""
    for name, scheme in (("hamiltonian", "BAB"), ("chain-3", "NBABN")):
        case = Case(name, scheme, "lennard-jones", exact=True)
        dynamics = case.build()
        with torch.no_grad():
            run = adjsim.simulate(
                dynamics, case.start(dynamics, *square()), [0.0, 10.0], solver=case.solver
            )
        if name == "hamiltonian":
            assert run.stats["buffer_bits"] == run.stats["buffer_bound"] == 0.0
        else:
            assert run.stats["buffer_bound"] is None
            assert 0 < run.stats["buffer_bits"] < 0.02


@pytest.mark.slow
def test_single_particles_cost_little_more():
    """A hundred systems of one degree of freedom, which spill one by one."""
    dynamics = adjsim.Langevin(adjsim.DoubleWell(1.0), friction=1.0)
    start = dynamics.init(torch.ones(100, 1, 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics, start, [0.0, 100.0], solver=Splitting("BAOAB", 0.01, exact=True)
        )
    assert run.stats["buffer_bits"] < 1.5 * run.stats["buffer_bound"]


def test_a_thermostat_that_takes_everything_at_once_is_an_error():
    dynamics = adjsim.NoseHooverChain(adjsim.Harmonic(parameter(1.0)), kT=1e-6, tau=1e-3)
    start = dynamics.init(*(100 * x for x in square()))
    with pytest.raises(OverflowError, match="smaller dt"):
        adjsim.simulate(dynamics, start, [0.0, 10.0], solver=Splitting("NBABN", 0.1, exact=True))


def test_a_potential_whose_force_knows_no_grid_is_refused():
    class Spring(adjsim.potentials.Potential):
        def forward(self, position):
            return 0.5 * (position**2).sum((-1, -2))

        def force(self, position):
            return -position

    dynamics = adjsim.Hamiltonian(Spring())
    with pytest.raises(TypeError, match="must also take rounding=UNROUNDED"):
        adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.1],
            solver=Splitting("BAB", 0.01, exact=True),
        )


def test_a_store_adds_no_bits(tmp_path):
    """To those that the buffers hold at the end."""
    case = Case("langevin", "BAOAB", "double-well", exact=True)
    dynamics = case.build()
    start = case.start(dynamics, *square())
    found = []
    for store in (None, tmp_path):
        with torch.no_grad():
            run = adjsim.simulate(
                dynamics,
                start,
                [0.0, 1.0],
                solver=case.solver,
                store=store,
                generator=torch.Generator().manual_seed(1),
            )
        found.append(run.stats["buffer_bits"])
    assert found[0] == found[1] > 0


class Wandering(nn.Module):
    """A spring that is another one each time, as a force of nondeterministic kernels is."""

    def __init__(self):
        super().__init__()
        self.evaluations = itertools.count()

    def forward(self, position):
        return (0.5 + 1e-6 * next(self.evaluations)) * position.square().sum((-1, -2))


def test_a_force_with_other_bits_each_time_is_said():
    dynamics = adjsim.Hamiltonian(Wandering())
    start = dynamics.init(*(x.requires_grad_() for x in square()))
    run = adjsim.simulate(
        dynamics,
        start,
        [0.0, 1.0],
        solver=adjsim.Splitting("BAB", 0.1, exact=True),
        adjoint=ReversibleAdjoint(),
    )
    with pytest.raises(adjsim.ReconstructionError, match="computed twice at one position it has"):
        run.final.position.sum().backward()
