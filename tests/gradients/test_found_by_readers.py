"""Silent errors that readers of the finished work have found; each is right now, or refused."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
from torch import nn

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, Splitting, TimeAverage
from adjsim.core.cache_key import cache_key
from adjsim.dynamics import MassiveDynamics, Term
from adjsim.dynamics.terms import Stream
from adjsim.potentials import PairPotential
from adjsim.potentials.statics.minimum import minimize
from tests.problems import parameter, square

SWEPT = {
    "checkpoint": CheckpointAdjoint(),
    "one-segment": CheckpointAdjoint(1),
    "reversible": ReversibleAdjoint(),
}
swept = pytest.mark.parametrize("adjoint", SWEPT.values(), ids=SWEPT)


class Quartic(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = parameter(0.7)

    def forward(self, position):
        return self.k * (position**4).sum((-1, -2))


def run(dynamics, adjoint, solver=None, times=(0.0, 0.5), **options):
    solver = adjsim.VelocityVerlet(0.05) if solver is None else solver
    return adjsim.simulate(
        dynamics, dynamics.init(*square()), times, solver=solver, adjoint=adjoint, **options
    )


def gradient(dynamics, adjoint, **options):
    made = run(dynamics, adjoint, **options)
    return torch.autograd.grad((made.final.position**2).sum(), list(dynamics.parameters()))


class Clock(Term):
    """T: time, and nothing else."""

    advances_time = True

    def drift(self, t, state):
        return {}

    def moves(self, h, state):
        return ()


class StillStream(Stream):
    advances_time = False


class Swing(adjsim.ForceField):
    def __init__(self):
        super().__init__()
        self.amplitude = parameter(0.8)

    def forward(self, t, position):
        return self.amplitude * torch.cos(3.0 * torch.as_tensor(t)) * torch.ones_like(position)


class Driven(MassiveDynamics):
    """With a clock of its own, which moves nothing."""

    def __init__(self):
        super().__init__(Swing(), 1.0)

    @property
    def terms(self):
        return {**self.motion, "A": StillStream(self.masses), "T": Clock()}

    def init(self, position, momentum=None, generator=None):
        return adjsim.PhaseState(position, momentum)


@pytest.mark.parametrize("word", ["BTBA", "BABT", "TBAB", "ATBTBTA", "BATAB"])
@pytest.mark.parametrize("adjoint", [DirectAdjoint(), *SWEPT.values()], ids=["direct", *SWEPT])
def test_a_force_is_that_of_its_time(word, adjoint):
    """The force does not depend on the position: the momentum is a sum over the kicks' times."""
    h, steps = 0.1, 10
    made = run(Driven(), adjoint, solver=Splitting(word, h), times=[0.0, steps * h])
    kicks, passed = [], 0.0
    for letter in word:
        if letter == "B":
            kicks.append(passed)
        passed += h / word.count("T") if letter == "T" else 0.0
    times = torch.tensor([k * h + kick for k in range(steps) for kick in kicks])
    expected = square()[1] + h / len(kicks) * (0.8 * torch.cos(3.0 * times)).sum()
    torch.testing.assert_close(made.final.momentum.detach(), expected, rtol=1e-12, atol=1e-13)


def test_exact_runs_of_forces_in_time_come_back_from_any_start():
    dynamics = adjsim.Hamiltonian(Swing())
    made = run(
        dynamics,
        ReversibleAdjoint(),
        solver=Splitting("BABAB", 0.1, exact=True),
        times=[1000.3, 1020.3],
    )
    made.final.position.sum().backward()
    assert made.stats["reconstruction_error"] == 0.0


@swept
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
@pytest.mark.parametrize("write", ["data", "step"])
def test_numbers_of_the_dynamics_are_read_once_too(adjoint, kind, write):
    """Coefficients, whose graph is walked at the end, are functions of the copies."""

    def build():
        kT = parameter(0.5) if kind == "parameter" else 0.5
        return adjsim.Langevin(adjsim.Harmonic(1.3), mass=parameter(1.1), kT=kT, friction=0.7)

    def made(dynamics, adjoint):
        end = run(dynamics, adjoint, solver=adjsim.BAOAB(0.05), generator=3).final
        return (end.position**2).sum() + (end.momentum**2).sum()

    one, other = build(), build()
    (expected,) = torch.autograd.grad(made(one, DirectAdjoint()), one.mass)
    loss = made(other, adjoint)
    if write == "data":
        other.kT.data = torch.tensor(2.0)
    else:
        with torch.no_grad():
            other.kT.add_(1.5)
    (found,) = torch.autograd.grad(loss, other.mass)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


class Remembers(Quartic):
    """Its buffer changes whenever it is evaluated."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("n", torch.tensor(1.0))

    def forward(self, position):
        new = 0.99 * self.n + 0.01 * position.detach().pow(2).mean()
        if self.in_place:
            self.n.copy_(new)
        else:
            self.n = new
        return super().forward(position) / self.n.clone()


@swept
@pytest.mark.parametrize("in_place", [False, True])
def test_a_potential_that_writes_to_its_buffers_is_refused(adjoint, in_place):
    with pytest.raises(ValueError, match="writes to its own"):
        gradient(adjsim.Hamiltonian(Remembers(in_place)), adjoint)


@swept
def test_complex_averages(adjoint):
    found = []
    for choice in (DirectAdjoint(), adjoint):
        dynamics = adjsim.Hamiltonian(Quartic())
        record = TimeAverage(lambda state: torch.exp(1j * state.position).sum())
        made = run(dynamics, choice, record=record)
        found.append(torch.autograd.grad(made.record.abs(), dynamics.potential.k)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=0)


@swept
@pytest.mark.parametrize("average", [False, True])
def test_records_that_are_zero_by_conservation(adjoint, average):
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(parameter(1.1), 0.95))

    def total(state):
        return (state.momentum - square()[1].mean(-2)).sum(-2)

    made = run(dynamics, adjoint, record=TimeAverage(total) if average else total)
    (found,) = torch.autograd.grad(made.record.sum(), dynamics.potential.epsilon)
    assert abs(float(found)) < 1e-12


class Listed(nn.Module):
    """Reads its registered parameter through a list of its own."""

    def __init__(self):
        super().__init__()
        self.k = parameter(1.3)
        self.ks = [self.k]

    def forward(self, position):
        return self.ks[0] * (position**2).sum((-1, -2))


class Quadratic(Listed):
    """The same energy, whose parameter is read from its module."""

    def forward(self, position):
        return self.k * (position**2).sum((-1, -2))


def simulation(potential):
    dynamics = adjsim.OverdampedLangevin(potential, kT=0.5)

    def initial(count, generator):
        return dynamics.init(torch.ones(count, 1, 1))

    return adjsim.Simulation(dynamics, initial, [0.0, 0.5], adjsim.EulerMaruyama(0.05))


SQUARE = adjsim.Final(lambda state: (state.position**2).sum((-1, -2)))


@pytest.mark.slow
def test_estimators_on_a_parameter_that_is_not_read_from_its_module():
    expected = adjsim.Pathwise()(simulation(Listed()), SQUARE, replicas=64, generator=0).grad[
        "potential.k"
    ]
    found = adjsim.FiniteDifference()(simulation(Listed()), SQUARE, replicas=64, generator=0).grad[
        "potential.k"
    ]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    found = adjsim.ForwardSensitivity()(
        simulation(Listed()), SQUARE, replicas=64, generator=0
    ).grad["potential.k"]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    scores = [
        adjsim.Girsanov()(simulation(potential), SQUARE, replicas=64, generator=0)
        for potential in (Listed(), Quadratic())
    ]
    assert torch.equal(*(score.grad["potential.k"] for score in scores))


@pytest.mark.slow
def test_differences_reach_what_an_observable_reads_without_a_graph():
    found = []
    for read in (lambda k: k, float, lambda k: k.detach(), lambda k: (k > -1).double() * k.item()):
        made = simulation(adjsim.Harmonic(parameter(1.3)))
        k = made.dynamics.potential.k
        observable = adjsim.Final(
            lambda state, k=k, read=read: state.position.sum((-1, -2)) * read(k)
        )
        found.append(
            adjsim.FiniteDifference()(made, observable, replicas=32, generator=0).grad[
                "potential.k"
            ]
        )
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=0)


@pytest.mark.marathon
def test_the_score_keeps_its_digits_beside_an_offset():
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), kT=1.0)

    def initial(count, generator):
        return dynamics.init(torch.ones(count, 1, 1), generator=generator)

    made, found = adjsim.Simulation(dynamics, initial, [0.0, 15.0], adjsim.BAOAB(0.1)), []
    for offset in (0.0, 1e8):
        average = TimeAverage(
            lambda state, offset=offset: offset + (state.position**2).sum((-1, -2)), burn_in=5.0
        )
        found.append(adjsim.ScoreFunction()(made, average, replicas=32, generator=1))
    torch.testing.assert_close(found[1].grad, found[0].grad, rtol=1e-5, atol=0)
    assert found[1].diagnostics["ess"] == pytest.approx(found[0].diagnostics["ess"], rel=1e-5)
    counted = TimeAverage(lambda state: (state.position > 0.5).flatten(1).any(1), burn_in=5.0)
    assert 0 < float(adjsim.ScoreFunction()(made, counted, replicas=32, generator=1).value) < 1


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.GRU(2, 3, batch_first=True).double()

    def forward(self, position):
        flat = position.reshape(-1, *position.shape[-2:])
        return self.net(flat)[0].pow(2).sum((-1, -2)).reshape(position.shape[:-2])


def test_a_recurrent_network_as_potential():
    torch.manual_seed(0)
    dynamics = adjsim.Hamiltonian(Recurrent())
    expected = gradient(dynamics, DirectAdjoint())
    for found, direct in zip(gradient(dynamics, ReversibleAdjoint()), expected, strict=True):
        torch.testing.assert_close(found, direct, rtol=1e-9, atol=1e-13)


# What compiled code depends on.

CONFIG = type(torch)("config")
CONFIG.scale = 1.0


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Quartic(), Quartic()
        self.active = self.one
        self.a, self.b = parameter(0.3), parameter(0.4)

    def forward(self, position):
        return CONFIG.scale * self.active(position) + self.a * position.sum((-1, -2))


def swap(reader):
    a, b = reader.a, reader.b
    del reader.a, reader.b
    reader.b, reader.a = b, a


def retie(reader):
    reader.two.k = reader.one.k


CHANGES = {
    "module alias": lambda reader: setattr(reader, "active", reader.two),
    "number of a Python module": lambda reader: setattr(CONFIG, "scale", 2.0),
}


@pytest.mark.parametrize("change", ["module alias", "number of a Python module"])
def test_changes_that_the_key_has_to_see(change):
    dynamics = adjsim.Hamiltonian(Reader())
    before = cache_key(dynamics)
    try:
        CHANGES[change](dynamics.potential)
        assert cache_key(dynamics) != before
    finally:
        CONFIG.scale = 1.0


@pytest.mark.parametrize("change", [swap, retie])
def test_places_of_tensors_are_part_of_the_key(change):
    from adjsim.core.reading import Reading

    dynamics = adjsim.Hamiltonian(Reader())
    before = Reading(dynamics).slots
    change(dynamics.potential)
    assert Reading(dynamics).slots != before


class Table(PairPotential):
    """A number for each pair of species, stacked of scalars."""

    def __init__(self):
        super().__init__()
        self.aa, self.ab, self.bb = parameter(1.0), parameter(0.6), parameter(0.3)
        self.register_buffer(
            "kind", torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 2, 2], [1, 1, 2, 2]])
        )

    def pair_energy(self, s):
        return torch.stack([self.aa, self.ab, self.bb])[self.kind] * torch.exp(-s)


class Scaled(PairPotential):
    """Not elementwise in its scalar."""

    def __init__(self):
        super().__init__()
        self.a, self.w = parameter(0.7), nn.Parameter(torch.tensor([0.5, 0.2, 0.3, 0.4]))

    def pair_energy(self, s):
        c = self.a * self.w
        return (c[0] + c[1] * s) * torch.exp(-s / (2 * (self.a**2).sum()))


@pytest.mark.marathon
@pytest.mark.parametrize("kind", [Table, Scaled])
def test_compiled_gradients_of_pair_formulas_of_ones_own(kind):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        expected = gradient(adjsim.Hamiltonian(kind()), ReversibleAdjoint())
        found = gradient(adjsim.Hamiltonian(kind()), ReversibleAdjoint(), compile=True)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_a_minimum_keeps_a_buffer_that_changes():
    """The backward pass solves with the Hessian of the body that was minimised."""
    network = adjsim.HarmonicBond([[0, 1], [1, 2], [0, 2]], parameter(3.0), [1.0, 1.2, 1.1])
    start = torch.tensor([[0.0, 0.0], [1.0, 0.1], [0.4, 0.9]], dtype=torch.float64)
    (expected,) = torch.autograd.grad(minimize(network, start, fixed=[0, 1]).sum(), network.k)
    found = minimize(network, start, fixed=[0, 1])
    network.length.mul_(1.1)
    assert torch.equal(torch.autograd.grad(found.sum(), network.k)[0], expected)


@pytest.mark.parametrize("solver", [adjsim.BackwardEuler(0.1), adjsim.ImplicitMidpoint(0.1)])
def test_an_implicit_step_keeps_a_buffer_that_changes(solver):
    bond = adjsim.HarmonicBond([[0, 1]], parameter(3.0), 1.0)
    dynamics = adjsim.Hamiltonian(bond)
    gradients = []
    for factor in (1.0, 1.1):
        made = run(dynamics, DirectAdjoint(), solver)
        bond.length.mul_(factor)
        gradients.append(torch.autograd.grad((made.final.position**2).sum(), bond.k)[0])
    assert torch.equal(*gradients)
