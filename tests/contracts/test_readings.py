"""A module is what the user edits, a reading is what is computed: it holds each number once."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import adjsim
from adjsim.adjoints.checkpoint import CheckpointAdjoint
from adjsim.adjoints.direct import DirectAdjoint
from adjsim.adjoints.reversible import ReversibleAdjoint
from adjsim.core.derived import derived
from adjsim.core.reading import Reading
from tests.copies import WAYS
from tests.problems import DYNAMICS, POTENTIALS, STOCHASTIC, THERMOSTATS, parameter, square, start

ADJOINTS = [DirectAdjoint(), CheckpointAdjoint(), ReversibleAdjoint()]
NAMES = [type(adjoint).__name__ for adjoint in ADJOINTS]
BOX, LONGER = [10.0] * 3, [10.5] * 3


def charges():
    return torch.linspace(-1, 1, 20, dtype=torch.float64) + 0.1


def positions():
    generator = torch.Generator().manual_seed(0)
    return 10 * torch.rand(20, 3, generator=generator, dtype=torch.float64)


def ewald(kind, box, charge=None):
    return kind(charges() if charge is None else charge, box=box, cutoff=4.0)


def liquid(box):
    """A sum of parts with one box."""
    pairs = adjsim.LennardJones(0.1, 1.5, cutoff=4.0, box=box)
    bonds = adjsim.potentials.HarmonicBond([[0, 1], [2, 3]], 0.2, 1.0, box=box)
    return pairs + ewald(adjsim.ParticleMeshEwald, box) + bonds


SUMS = {
    "Ewald": lambda box: ewald(adjsim.Ewald, box),
    "mesh": lambda box: ewald(adjsim.ParticleMeshEwald, box),
    "parts": liquid,
    "tilted": lambda box: ewald(adjsim.Ewald, [[box[0], 0, 0], [4.0, box[0], 0], [0, 0, box[0]]]),
}


def assert_equal(found, expected, q):
    # Waves and derived tables are computed by the same operations from the same box.
    assert torch.equal(found(q), expected(q))
    assert torch.equal(adjsim.force(found, q), adjsim.force(expected, q))
    assert torch.equal(found.virial(q), expected.virial(q))


@pytest.mark.parametrize("make", SUMS.values(), ids=SUMS)
def test_a_box_is_held_once(make):
    q, expected = positions(), make(LONGER)
    written = make(BOX)
    written(q)
    new = expected.box.clone()
    with torch.no_grad():
        written.box.copy_(new)
    assert_equal(written, expected, q)
    loaded = make(BOX)
    loaded.load_state_dict(expected.state_dict())
    assert_equal(loaded, expected, q)
    assigned = make(BOX)
    assigned.box = new
    assert_equal(assigned, expected, q)
    assert torch.equal(make(BOX)(q, box=new), expected(q))


def test_the_derivative_by_the_box_of_an_evaluation_is_the_virial():
    q, pairs = positions(), adjsim.LennardJones(0.1, 1.5, cutoff=4.0, box=BOX)
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    stretch = torch.eye(3, dtype=torch.float64) + strain
    box = torch.diag(torch.tensor(BOX, dtype=torch.float64)) @ stretch
    (found,) = torch.autograd.grad(pairs(q @ stretch, box=box), strain)
    # Random atoms nearly overlap, and the energy of such a pair amplifies the rounding of r^2.
    torch.testing.assert_close(-found, pairs.virial(q), rtol=1e-10, atol=0)


def test_a_box_that_does_not_fit_is_refused():
    q, pairs = positions(), adjsim.LennardJones(cutoff=4.0, box=BOX)
    with pytest.raises(ValueError, match="cutoff 4 is above half"):
        pairs(q, box=[7.0] * 3)
    pairs.box.mul_(0.5)
    with pytest.raises(ValueError, match="cutoff 4 is above half"):
        pairs(q)
    with pytest.raises(ValueError, match="Harmonic has no box to replace"):
        adjsim.Harmonic()(q, box=BOX)
    with pytest.raises(ValueError, match="a sum has one box"):
        adjsim.LennardJones(cutoff=4.0, box=BOX) + adjsim.Morse(cutoff=4.0, box=LONGER)
    total = adjsim.LennardJones(cutoff=4.0, box=BOX) + adjsim.Morse(cutoff=4.0, box=BOX)
    total.parts[0].box = torch.tensor(LONGER, dtype=torch.float64)
    with pytest.raises(ValueError, match="a sum has one box"):
        total(q)


class Neutral(nn.Module):
    def forward(self, charge):
        return charge - charge.mean()


@pytest.mark.parametrize("kind", [adjsim.Ewald, adjsim.ParticleMeshEwald])
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=NAMES)
def test_a_parametrisation_is_read_by_all_parts(kind, adjoint):
    """The usual way to keep charges neutral in a fit, against charges that are neutral."""
    charge, q = nn.Parameter(charges()), positions()
    potential = ewald(kind, BOX, charge)
    parametrize.register_parametrization(potential, "charge", Neutral())
    (own,) = potential.parameters()
    given = charges().requires_grad_()
    plain = ewald(kind, BOX, given - given.mean())
    ends, slopes = [], []
    for model, leaf in ((potential, own), (plain, given)):
        dynamics = adjsim.Hamiltonian(model)
        begin = dynamics.init(q, momentum=torch.zeros_like(q))
        run = adjsim.simulate(
            dynamics, begin, [0.0, 0.1], solver=adjsim.VelocityVerlet(0.02), adjoint=adjoint
        )
        ends.append(run.final.position)
        slopes.append(torch.autograd.grad((run.final.position**3).sum(), leaf)[0])
    torch.testing.assert_close(*ends, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=NAMES)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
def test_a_run_keeps_what_it_has_read(adjoint, compiled):
    """Whatever is done to the module between the run and its backward pass."""

    def run():
        sigma = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        potential = adjsim.LennardJones(1.0, sigma) + adjsim.Harmonic(0.1)
        dynamics = adjsim.Langevin(potential, kT=0.1)
        begin = dynamics.init(1.2 * square()[0], generator=1)
        made = adjsim.simulate(
            dynamics, begin, [0.0, 0.2], solver=adjsim.BAOAB(0.01), adjoint=adjoint,
            generator=2, compile=compiled, record=lambda state: dynamics.potential(state.position),
        )  # fmt: skip
        return sigma, dynamics, made.record.sum()

    sigma, _, loss = run()
    (expected,) = torch.autograd.grad(loss, sigma)
    sigma, dynamics, loss = run()
    sigma.data.fill_(1.1)
    dynamics.kT.fill_(3.0)
    dynamics.friction = torch.tensor(0.0, dtype=torch.float64)
    dynamics.potential.parts[1].k.mul_(2.0)
    dynamics.potential.parts[0].exclusions = torch.tensor([[0, 1]])
    dynamics.potential.parts[0].truncation = None
    assert torch.equal(torch.autograd.grad(loss, sigma)[0], expected)


@pytest.mark.slow
def test_a_minimum_keeps_what_it_has_read():
    sigma = parameter(1.0)
    pair = adjsim.LennardJones(1.0, sigma)
    found = adjsim.minimize(pair, torch.tensor([[0.0, 0, 0], [1.2, 0, 0]], dtype=torch.float64))
    sigma.data.fill_(1.3)
    pair.exclusions = torch.tensor([[0, 1]])
    (found[0] - found[1]).norm().backward()
    # The distance is 2^(1/6) sigma.
    assert float(sigma.grad) == pytest.approx(2 ** (1 / 6), rel=1e-9)


def test_other_threads_see_the_module_as_it_is():
    sigma = parameter(1.0)
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(1.0, sigma))
    position = 1.2 * square()[0]
    begin = dynamics.init(position, momentum=torch.zeros_like(position))
    (expected,) = torch.autograd.grad(dynamics.potential(position), sigma)
    wrong, done = [], threading.Event()

    def watch():
        while not done.is_set():
            (slope,) = torch.autograd.grad(dynamics.potential(position), sigma)
            same = next(dynamics.parameters()) is sigma and sigma.requires_grad
            if not same or not torch.equal(slope, expected):
                wrong.append(slope)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for _ in range(3):
            run = adjsim.simulate(
                dynamics, begin, [0.0, 0.5], solver=adjsim.VelocityVerlet(0.01),
                adjoint=ReversibleAdjoint(),
            )  # fmt: skip
            run.final.position.sum().backward()
    finally:
        done.set()
        thread.join()
    assert not wrong


def negative(module, name):
    getattr(module, name).data.fill_(-1.0)


BROKEN = {
    "kT": (lambda: adjsim.Langevin(adjsim.Harmonic()), "kT", "kT must be positive"),
    "mass": (lambda: adjsim.Langevin(adjsim.Harmonic()), "mass", "mass must be positive"),
    "friction": (lambda: adjsim.Langevin(adjsim.Harmonic()), "friction", "friction must be pos"),
    "tau": (lambda: adjsim.NoseHooverChain(adjsim.Harmonic()), "tau", "tau must be positive"),
}


@pytest.mark.parametrize(("make", "name", "message"), BROKEN.values(), ids=BROKEN)
def test_numbers_that_training_has_broken_are_named(make, name, message):
    dynamics = make()
    position, momentum = square()
    begin = start(dynamics, position, momentum)
    negative(dynamics, name)
    with pytest.raises(ValueError, match=message):
        adjsim.simulate(
            dynamics, begin, [0.0, 0.1],
            solver=adjsim.Splitting("NBABN" if name == "tau" else "BAOAB", 0.05), generator=0,
        )  # fmt: skip


def test_conditions_of_several_numbers_are_checked_again():
    wca = adjsim.WCA(1.0, parameter(1.0), cutoff=1.3)
    wca.sigma.data.fill_(1.45)
    with pytest.raises(ValueError, match="WCA ends at"):
        wca(positions())
    signal = adjsim.potentials.PiecewiseLinear([0.0, 1.0, 2.0], [0.0, 1.0, 0.0])
    driven = adjsim.potentials.Actuated(adjsim.Harmonic(1.0), center=signal)
    signal.times.copy_(torch.tensor([0.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match="increasing"):
        driven(0.5, positions())


def body(**options):
    plane = adjsim.PlaneContact([0.0, 0.0, 1.0], 0.0, 50.0, 0.1)
    return adjsim.Mechanics(
        adjsim.potentials.Gravity(1.0, 1.0), contact=plane, smoothing=0.1, **options
    )


def slide(dynamics):
    position = torch.tensor([[0.0, 0.0, -0.02], [1.0, 0.0, -0.02]], dtype=torch.float64)
    momentum = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.5, 0.0]], dtype=torch.float64)
    begin = dynamics.init(position, momentum)
    solver = adjsim.Splitting(dynamics.scheme, 0.01)
    return adjsim.simulate(dynamics, begin, [0.0, 0.5], solver=solver).final.momentum


CHANGES = {
    "friction": (lambda d: d.friction.fill_(0.4), {"friction": 0.4}),
    "damping": (lambda d: d.damping_rate.fill_(2.0), {"damping": 2.0}),
    "parameter": (lambda d: setattr(d, "damping_rate", parameter(2.0)), {"damping": 2.0}),
}


@pytest.mark.parametrize(("change", "options"), CHANGES.values(), ids=CHANGES)
def test_the_terms_of_a_mechanics_follow_its_numbers(change, options):
    changed, expected = body(), body(**options)
    slide(changed)
    with torch.no_grad():
        change(changed)
    assert changed.scheme == expected.scheme
    assert torch.equal(slide(changed), slide(expected))


def test_the_parts_of_a_mechanics_may_be_replaced():
    changed, q = body(), positions()
    state = changed.init(q)
    changed.contact = adjsim.PlaneContact([0.0, 0.0, 1.0], 5.0, 50.0, 0.1)
    changed.body = adjsim.Harmonic(2.0)
    expected = adjsim.Mechanics(
        adjsim.Harmonic(2.0), contact=adjsim.PlaneContact([0.0, 0.0, 1.0], 5.0, 50.0, 0.1)
    )
    assert torch.equal(changed.drift(0.0, state).momentum, expected.drift(0.0, state).momentum)


EVERY = {
    **{f"potential {name}": make for name, make in POTENTIALS.items()},
    **{
        f"dynamics {name}": (lambda make=make: make(adjsim.Harmonic(parameter(1.3))))
        for name, make in (DYNAMICS | STOCHASTIC | THERMOSTATS).items()
    },
    "Mechanics": lambda: body(friction=0.3, damping=0.1),
    "Ewald": lambda: ewald(adjsim.Ewald, BOX),
    "mesh": lambda: ewald(adjsim.ParticleMeshEwald, BOX),
    "ODE": lambda: adjsim.ODE(nn.Bilinear(1, 2, 2).double()),
    "SDE": lambda: adjsim.SDE(nn.Bilinear(1, 2, 2).double(), nn.Bilinear(1, 2, 2).double()),
}


@pytest.mark.parametrize("name", ["ODE", "SDE"])
@pytest.mark.parametrize("copied", WAYS.values(), ids=WAYS)
def test_a_copy_of_a_field_runs_itself(name, copied):
    field = EVERY[name]()
    twin = copied(field)
    y = twin.init(torch.ones(2, dtype=torch.float64))
    with torch.no_grad():
        for x in field.parameters():
            x.fill_(torch.nan)
    t = torch.zeros(1, dtype=torch.float64)
    assert bool(torch.isfinite(twin.drift(t, y).y).all())
    assert bool(torch.isfinite(twin.diffusion(t, y).y).all())


def test_an_average_of_weights_runs_itself():
    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = parameter(2.0)

        def forward(self, t, y):
            return -self.rate * y

    ode = adjsim.ODE(Decay())
    average = torch.optim.swa_utils.AveragedModel(ode)
    with torch.no_grad():
        ode.fun.rate.fill_(3.0)
    begin = ode.init(torch.ones(1, dtype=torch.float64))
    end = [
        adjsim.simulate(x, begin, [0.0, 1.0], solver=adjsim.RungeKutta("rk4", 0.01)).final.y.item()
        for x in (ode, average.module)
    ]
    # The error of the method is 0.01^4 times a number of order one.
    assert end == pytest.approx([torch.exp(torch.tensor(-x)).item() for x in (3.0, 2.0)], rel=1e-6)


class Reader(nn.Module):
    """A module that reaches itself and a part in every way that a copy follows."""

    def __init__(self):
        super().__init__()
        self.k = parameter(2.0)
        self.inner = adjsim.Harmonic(parameter(1.0))
        self.closure = lambda q: self.k * q.square().sum((-1, -2))
        self.method = self.own
        self.listed = [self.inner]
        self.table = {"inner": (self.inner,)}

    def own(self, q):
        return self.k * q.sum((-1, -2))

    def forward(self, position):
        energy = self.closure(position) + self.method(position)
        return energy + self.listed[0](position) + self.table["inner"][0](position)


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=NAMES)
def test_copies_follow_closures_methods_and_containers(adjoint):
    def gradient(change):
        module = Reader()
        dynamics = adjsim.Hamiltonian(module)
        position, momentum = square()
        run = adjsim.simulate(
            dynamics, dynamics.init(position, momentum), [0.0, 0.2],
            solver=adjsim.VelocityVerlet(0.02), adjoint=adjoint,
        )  # fmt: skip
        if change:
            with torch.no_grad():
                for x in module.parameters():
                    x.mul_(3.0)
        return torch.autograd.grad((run.final.position**2).sum(), list(module.parameters()))

    for found, expected in zip(gradient(True), gradient(False), strict=True):
        assert torch.equal(found, expected)


class Cached(nn.Module):
    """A module with a derived table, of which evaluations are counted."""

    def __init__(self):
        super().__init__()
        self.register_buffer("x", torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.power, self.made = 2, []

    @derived("x", "power")
    def table(self):
        self.made.append(None)
        return self.x**self.power


def test_derived_values_are_made_where_a_source_differs():
    module = Cached()
    expected = [1.0, 4.0]
    for _ in range(3):
        assert module.table.tolist() == Reading(module).bound().table.tolist() == expected
    assert len(module.made) == 1
    module.x.data.mul_(2.0)  # No version counts this.
    assert module.table.tolist() == [4.0, 16.0]
    module.power = 1
    assert module.table.tolist() == [2.0, 4.0]
    twin = Reading(module).bound()
    module.x.zero_()
    assert twin.table.tolist() == [2.0, 4.0]
    assert copy.deepcopy(module).table.tolist() == module.table.tolist() == [0.0, 0.0]


class Lengthless(tuple):
    """A container without a length, as the irreps of e3nn are."""

    def __len__(self):
        raise NotImplementedError


def test_a_container_without_a_length_is_read():
    potential = adjsim.Harmonic(nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    potential.kinds = Lengthless([potential.k])
    reading = Reading(potential)
    (copied,) = iter(reading.bound(reading.leaves()).kinds)
    assert copied is not potential.k
