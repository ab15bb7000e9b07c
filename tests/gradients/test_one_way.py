"""Forces, parameters and settings have one way through a run: cases in which they once came by
another, and gradients were wrong in silence. Each is right now, or an error that says what to
do."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint
from adjsim.adjoints import ReconstructionError
from adjsim.dynamics import Force, MassiveDynamics, Shear, Term
from adjsim.dynamics.terms import Kick
from tests.problems import parameter, square

SWEPT = {"checkpoint": CheckpointAdjoint(), "reversible": ReversibleAdjoint()}
ADJOINTS = {"direct": DirectAdjoint(), **SWEPT}
every_adjoint = pytest.mark.parametrize("adjoint", ADJOINTS.values(), ids=ADJOINTS)
swept = pytest.mark.parametrize("adjoint", SWEPT.values(), ids=SWEPT)


def simulate(dynamics, adjoint, *, steps=12, record=None, exact=False, start=None):
    start = dynamics.init(*square()) if start is None else start
    solver = adjsim.Splitting("BAB", 0.02, exact=exact)
    return adjsim.simulate(
        dynamics, start, [0.0, steps * 0.02], solver=solver, adjoint=adjoint, record=record
    )


def gradient(dynamics, adjoint, wanted: Iterable[torch.Tensor], **options):
    run = simulate(dynamics, adjoint, **options)
    loss = (run.final.position**2).sum() if run.record is None else run.record.sum()
    return torch.autograd.grad(loss, list(wanted))


class Quartic(nn.Module):
    def __init__(self, k=1.3):
        super().__init__()
        self.k = parameter(k)

    def forward(self, position):
        return self.k * (position**4).sum((-1, -2))


class Noisy(Quartic):
    """Draws from a generator of its own: another force whenever it is evaluated."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, position):
        kept = torch.rand(position.shape, generator=self.generator) > 0.3
        return self.k * ((kept * position) ** 2).sum((-1, -2))


class Scaled(Quartic):
    """Reads an attribute of its class."""

    scale = 1.0

    def forward(self, position):
        return self.scale * super().forward(position)


@swept
def test_a_random_force_is_refused(adjoint):
    dynamics = adjsim.Hamiltonian(Noisy())
    with pytest.raises(ReconstructionError, match="random"):
        gradient(dynamics, adjoint, dynamics.parameters())


@swept
def test_a_force_that_has_changed_since_is_refused(adjoint, monkeypatch):
    dynamics = adjsim.Hamiltonian(Scaled())
    run = simulate(dynamics, adjoint)
    monkeypatch.setattr(Scaled, "scale", 1.5)
    with pytest.raises(ReconstructionError, match="changed since"):
        run.final.position.sum().backward()


@swept
@pytest.mark.parametrize("average", [False, True], ids=["saved", "averaged"])
def test_a_record_that_is_random_is_refused(adjoint, average):
    def function(state):
        return (nn.functional.dropout(state.position, 0.5) ** 2).sum()

    dynamics = adjsim.Hamiltonian(Quartic())
    torch.manual_seed(0)
    with pytest.raises(ReconstructionError, match="computed it again"):
        gradient(
            dynamics,
            adjoint,
            dynamics.parameters(),
            record=adjsim.TimeAverage(function) if average else function,
        )


@pytest.mark.parametrize("adjoint", ADJOINTS.values(), ids=ADJOINTS)
@pytest.mark.parametrize("change", ["step", "data", "buffer"])
def test_a_run_reads_its_parameters_once(adjoint, change):
    """An optimiser's step between a run and its backward changes the next run alone."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.3), center=0.2))
    expected = gradient(dynamics, DirectAdjoint(), [dynamics.potential.k])
    run = simulate(dynamics, adjoint)
    with torch.no_grad():
        if change == "step":
            dynamics.potential.k.add_(0.7)
        elif change == "data":
            dynamics.potential.k.data = torch.tensor(2.0)
        else:
            dynamics.potential.center.add_(0.7)
    (run.final.position**2).sum().backward()
    torch.testing.assert_close(dynamics.potential.k.grad, expected[0], rtol=1e-11, atol=0)


class Simulates(nn.Module):
    """A run as a function of its dynamics' parameters."""

    def __init__(self, adjoint):
        super().__init__()
        self.dynamics, self.adjoint = adjsim.Hamiltonian(Quartic(), parameter(1.2)), adjoint

    def forward(self, start):
        return (simulate(self.dynamics, self.adjoint, start=start).final.position ** 2).sum()


@every_adjoint
def test_parameters_given_by_functional_call(adjoint):
    """A network's output replaces a parameter; backward comes after the call has ended."""
    start, raw = adjsim.PhaseState(*square()), parameter(0.3)
    module = Simulates(adjoint)
    names = {"dynamics.potential.k": raw.exp(), "dynamics.mass": 1 + raw**2}
    (found,) = torch.autograd.grad(torch.func.functional_call(module, names, (start,)), raw)

    def loss(x):
        dynamics = adjsim.Hamiltonian(Quartic(float(x.exp())), float(1 + x**2))
        return float((simulate(dynamics, DirectAdjoint(), start=start).final.position ** 2).sum())

    h = 1e-5
    with torch.no_grad():
        expected = (loss(raw + h) - loss(raw - h)) / (2 * h)
    # Truncation h^2 and rounding 1e-16 / h.
    assert float(found) == pytest.approx(expected, rel=1e-7)


def second_derivative(adjoint):
    module = Simulates(adjoint)
    names = list(module.parameters())
    first = torch.autograd.grad(module(adjsim.PhaseState(*square())), names, create_graph=True)
    return torch.autograd.grad(first[0].sum(), names)


@swept
def test_second_derivatives_are_refused(adjoint):
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        second_derivative(adjoint)


def test_direct_has_second_derivatives():
    assert all(bool(torch.isfinite(x).all()) for x in second_derivative(DirectAdjoint()))


ODE = {"rk4": adjsim.ODESolver("rk4", dt=0.02), "dopri5": adjsim.ODESolver()}


@pytest.mark.parametrize(
    ("solver", "adjoint"),
    [
        *((adjsim.VelocityVerlet(0.02), adjoint) for adjoint in ADJOINTS.values()),
        *((solver, adjsim.BacksolveAdjoint()) for solver in ODE.values()),
    ],
    ids=[*ADJOINTS, *(f"backsolve-{name}" for name in ODE)],
)
def test_hooks_run_once(solver, adjoint):
    """A hook that doubles doubles, and sees the whole gradient."""
    dynamics = adjsim.Hamiltonian(adjsim.DoubleWell(parameter(0.8)), parameter(1.1))
    wanted = [dynamics.potential.barrier, dynamics.mass]

    def run():
        made = adjsim.simulate(
            dynamics, dynamics.init(*square()), [0.0, 0.2], solver=solver, adjoint=adjoint
        )
        return torch.autograd.grad((made.final.position**2).sum(), wanted)

    expected, calls = run(), []
    for x in wanted:
        x.register_hook(lambda grad: calls.append(1) or 2 * grad)
    for found, single in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, 2 * single, rtol=1e-12, atol=0)
    assert len(calls) == len(wanted)


@swept
@pytest.mark.parametrize("where", ["force", "pair", "record", "term"])
def test_what_is_captured_is_seen_whenever_it_is_read(adjoint, where):
    """A tensor that is read only where the particles come later."""
    hidden = torch.tensor(0.4, requires_grad=True)
    calls = []

    def late(x):
        # The first evaluations, before the run starts, do not read it. A formula of pairs is traced
        # in six.
        calls.append(1)
        return hidden * x if len(calls) > (5 if where == "pair" else 8) else 0.4 * x

    class Hiding(Quartic):
        def forward(self, position):
            return super().forward(position) + late(position**2).sum((-1, -2))

    class HidingPair(adjsim.potentials.PairPotential):
        def pair_energy(self, s):
            return late(torch.exp(-s))

    class Drag(Term):
        def drift(self, t, state):
            return {}

        def moves(self, h, state):
            return (
                Shear(
                    "momentum", adjsim.dynamics.Function(lambda c, q: late(-h * q), ("position",))
                ),
            )

    class Dragged(adjsim.Hamiltonian):
        @property
        def terms(self):
            return super().terms | {"D": Drag()}

    potential = {"force": Hiding, "pair": HidingPair}.get(where, Quartic)()
    dynamics, solver = adjsim.Hamiltonian(potential, parameter(1.0)), adjsim.VelocityVerlet(0.02)
    if where == "term":
        dynamics, solver = Dragged(potential, parameter(1.0)), adjsim.Splitting("DBABD", 0.02)
    record = (lambda state: late(state.position).sum()) if where == "record" else None
    start = dynamics.init(*square())

    def run_and_differentiate():
        made = adjsim.simulate(
            dynamics, start, [0.0, 0.1, 0.2, 0.3], solver=solver, adjoint=adjoint, record=record
        )
        (made.position if record is None else made.record).sum().backward()

    with pytest.raises(ValueError, match="not registered"):
        run_and_differentiate()


class ReadsForce(Force):
    """A source of a user's own, which evaluates the force itself."""

    def vjp(self, state, at, cotangents):
        value = at.forces.values((state.position,), at.t)[0]
        linear = at.forces.linear((state.position,), at.t)
        torch.testing.assert_close(linear.values[0], value, rtol=1e-13, atol=1e-13)

        def accumulate(cotangent):
            cotangents.add_to_force(linear, 0, value * 0 + cotangent)

        return value.detach(), accumulate


class OwnKick(Kick):
    def moves(self, h, state):
        return (Shear("momentum", ReadsForce(), "h"),)


class OwnDynamics(MassiveDynamics):
    def __init__(self, potential):
        super().__init__(potential, parameter(1.2))

    @property
    def terms(self):
        return {**self.motion, "B": OwnKick(self.masses, self.potential)}

    def init(self, position, momentum=None, generator=None):
        return adjsim.PhaseState(position, momentum)


@swept
def test_a_source_of_ones_own_reads_the_force_where_it_is(adjoint):
    dynamics = OwnDynamics(adjsim.DoubleWell(parameter(0.8)))
    expected = gradient(dynamics, DirectAdjoint(), dynamics.parameters())
    for found, direct in zip(
        gradient(dynamics, adjoint, dynamics.parameters()), expected, strict=True
    ):
        torch.testing.assert_close(found, direct, rtol=1e-11, atol=0)


class Writes(nn.Module):
    def forward(self, position):
        position[..., 0, :] = 0.0
        return (position**2).sum((-1, -2))


class WritesWithoutGradient(nn.Module):
    def forward(self, position):
        with torch.no_grad():
            position.mul_(0.5)
        return (position**2).sum((-1, -2))


@pytest.mark.parametrize("kind", [Writes, WritesWithoutGradient])
def test_a_potential_that_writes_into_its_argument_is_refused(kind):
    position, momentum = square()
    kept, dynamics = position.clone(), adjsim.Hamiltonian(kind())
    with pytest.raises(ValueError, match="writes into"):
        simulate(dynamics, DirectAdjoint(), start=dynamics.init(position, momentum))
    torch.testing.assert_close(position, kept, rtol=0, atol=0)


def test_a_record_that_writes_into_the_state_is_refused():
    dynamics = adjsim.Hamiltonian(Quartic())
    with pytest.raises(ValueError, match="writes into"), torch.no_grad():
        simulate(dynamics, DirectAdjoint(), record=lambda state: state.position.mul_(2.0))


@pytest.mark.parametrize("exact", [False, True])
def test_backward_twice_gives_the_same(exact):
    """Each backward has a rewind and sums of its own."""
    dynamics = adjsim.Langevin(
        adjsim.DoubleWell(parameter(0.8)), kT=parameter(0.5), friction=parameter(0.7)
    )
    start = dynamics.init(*square())
    solver = adjsim.Splitting("BAOAB", 0.02, exact=exact)
    generator = torch.Generator().manual_seed(3)
    run = adjsim.simulate(
        dynamics, start, [0.0, 0.3], solver=solver, adjoint=ReversibleAdjoint(), generator=generator
    )
    loss = (run.final.position**2).sum()
    first, second = (
        torch.autograd.grad(loss, list(dynamics.parameters()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_threads(shared):
    """Runs at once, of dynamics of their own and of one that they share, give what they give one
    after the other.
    """
    one = adjsim.Hamiltonian(Quartic(), parameter(1.1))
    many = [
        one if shared else adjsim.Hamiltonian(Quartic(1.0 + 0.1 * i), parameter(1.1))
        for i in range(3)
    ]
    adjoints = [ReversibleAdjoint(), CheckpointAdjoint(), DirectAdjoint()]
    # A dynamics that another thread runs has other tensors in place of its parameters.
    jobs = [
        (dynamics, adjoint, list(dynamics.parameters()))
        for dynamics, adjoint in zip(many, adjoints, strict=True)
    ]

    def work(job, out, i):
        out[i] = gradient(*job, steps=60)

    expected: dict = {}
    for i, job in enumerate(jobs):
        work(job, expected, i)
    for _ in range(3):
        found: dict = {}
        threads = [
            threading.Thread(target=work, args=(job, found, i)) for i, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in expected:
            for a, b in zip(found[i], expected[i], strict=True):
                assert torch.equal(a, b)


@pytest.mark.slow
def test_time_averages_keep_their_digits():
    """Of true and false, of integers, and of many float32 numbers."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(1.0))
    one = torch.ones(1, 1)
    start, solver = dynamics.init(one, 0 * one), adjsim.VelocityVerlet(0.05)

    def average(function, start=start, time=200.0):
        record = adjsim.TimeAverage(function)
        return adjsim.simulate(dynamics, start, [0.0, time], solver=solver, record=record).record

    share = average(lambda state: (state.position > 0.5).squeeze())
    # The cosine is above 1/2 for 2 pi / 3 in each of 31 turns, and for pi / 3 of the last.
    assert float(share) == pytest.approx(21 * math.pi / 200, abs=2e-3)
    assert float(average(lambda state: (state.position > 0.5).long().squeeze())) == float(share)
    single = adjsim.PhaseState(one.float(), 0 * one.float())
    # A sum of 4,000 in float32 would be rounded in most of its terms.
    offset = average(lambda state: 1000.1 + 0 * state.position.squeeze(), single)
    assert offset.dtype == torch.float32
    assert offset == torch.tensor(1000.1, dtype=torch.float32)


@pytest.mark.parametrize("adjoint", [adjsim.CheckpointAdjoint(), adjsim.ReversibleAdjoint()])
def test_a_small_record_that_is_random_is_caught(adjoint):
    """Its error is compared with its own size, or with its terms where it depends on the state."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    for small in (
        lambda state: 1e-9 * torch.rand(()),
        lambda state: 1e-9 * (1 + 0.1 * torch.rand(())) * state.position.square().sum(),
    ):
        run = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.05, 0.1],
            solver=adjsim.VelocityVerlet(0.01),
            adjoint=adjoint,
            record=lambda state, small=small: small(state) + 0 * state.position.sum(),
        )
        with pytest.raises(adjsim.ReconstructionError, match="computed it again"):
            run.record.sum().backward()


@swept
@pytest.mark.parametrize("average", [False, True], ids=["saved", "averaged"])
@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_record_finite_in_other_entries_is_refused(adjoint, average, lost):
    """One entry of two is lost after the run, or it is lost in both and then equal."""
    offset = torch.zeros(2, dtype=torch.float64)

    def function(state):
        return (state.position**2).sum() + offset

    dynamics = adjsim.Hamiltonian(Quartic())
    record = adjsim.TimeAverage(function) if average else function
    run = simulate(dynamics, adjoint, record=record)
    offset[1] = lost
    with pytest.raises(ReconstructionError, match="finite in other entries"):
        run.record.sum().backward()
    both = simulate(dynamics, adjoint, record=record)
    both.record[..., 0].sum().backward()
    assert bool(torch.isfinite(dynamics.potential.k.grad))
