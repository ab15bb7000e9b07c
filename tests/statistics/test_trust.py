"""What estimators must not do in silence: overflow, miss what an observable reads, or rest on a
handful of replicas.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import adjsim
from adjsim import Final, Girsanov, Reweighting, ScoreFunction, Simulation, TimeAverage
from adjsim.dynamics import Canonical, MassiveDynamics
from adjsim.dynamics.thermostats.langevin import OrnsteinUhlenbeck
from tests.problems import parameter


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def squared(state):
    return state.position[:, 0, 0] ** 2


class Offset(nn.Module):
    """A harmonic well above a constant."""

    def __init__(self):
        super().__init__()
        self.k, self.offset = parameter(1.0), parameter(0.0)

    def forward(self, position):
        return 0.5 * self.k * (position**2).sum((-1, -2)) + self.offset


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_reweighting_does_not_see_a_constant_in_the_energy(offset):
    """exp(-1000) is zero, and its inverse infinite."""
    dynamics = adjsim.OverdampedLangevin(Offset(), 1.0, 1.0)
    simulation = Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.ones(n, 1, 1)),
        [0.0, 2.0],
        adjsim.EulerMaruyama(0.1),
    )
    estimator, observable = Reweighting(), TimeAverage(squared)
    estimator(simulation, observable, replicas=32, chunks=4, generator=seeded())
    with torch.no_grad():
        dynamics.potential.k += 0.1
    before = estimator(simulation, observable, replicas=32, chunks=4, generator=seeded())
    with torch.no_grad():
        dynamics.potential.offset += offset
    after = estimator(simulation, observable, replicas=32, chunks=4, generator=seeded())
    assert not after.diagnostics["sampled"]
    # Energies of 1,000 are rounded to 1e-13.
    torch.testing.assert_close(after.value, before.value, rtol=1e-11, atol=0)
    torch.testing.assert_close(
        after.grad["potential.k"], before.grad["potential.k"], rtol=1e-10, atol=0
    )
    torch.testing.assert_close(
        after.grad_stderr["potential.k"], before.grad_stderr["potential.k"], rtol=1e-10, atol=0
    )
    assert abs(float(after.grad["potential.offset"])) < 1e-12


@pytest.mark.parametrize("change", ["length", "mass"])
def test_frames_are_not_served_on_other_constraints(change):
    """No weight takes a frame to another length, and masses change the measure on constraints."""
    rod = adjsim.DistanceConstraints([[0, 1]], [1.0])
    inner = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), torch.tensor([1.0, 2.0]), 1.0, 1.0)
    dynamics = adjsim.Constrained(inner, rod)
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)

    def starts(n, generator):
        return dynamics.init((ends * rod.length).expand(n, 2, 1).clone(), generator=generator)

    def length(state):
        return state.position.diff(dim=-2).abs().flatten(-2).mean(-1)

    simulation = Simulation(dynamics, starts, [0.0, 2.0], adjsim.BAOAB(0.1))
    estimator, observable = Reweighting(every=0.5), TimeAverage(length)
    estimator(simulation, observable, replicas=4, chunks=2, generator=1)
    if change == "length":
        rod.length.mul_(1.3)
    else:
        dynamics.mass.mul_(torch.tensor([1.0, 1.001]))
    with pytest.raises(RuntimeError, match="a box or a constraint has changed"):
        estimator.surrogate(observable)
    found = estimator(simulation, observable, replicas=4, chunks=2, generator=1)
    assert found.diagnostics["sampled"]
    assert float(found.value) == pytest.approx(1.3 if change == "length" else 1.0)
    again = estimator(simulation, observable, replicas=4, chunks=2, generator=1)
    assert not again.diagnostics["sampled"]


@pytest.mark.slow
def test_the_test_for_bath_variables_does_not_repeat_the_observable_on_all_frames():
    """An observable may take most of the time of an estimate, so frames are observed once."""
    dynamics = adjsim.LangevinPiston(
        adjsim.LennardJones(parameter(1.0), cutoff=1.4, box=[3.3] * 3), 1.0, 1.0, 1.0, 1.0
    )
    position = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 3) * 1.1
    seen = []

    def volume(state):
        seen.append(len(state.position))
        return dynamics.volume(state)

    simulation = Simulation(
        dynamics,
        lambda n, generator: dynamics.init(position.expand(n, 27, 3), generator=generator),
        [0.0, 0.4],
        solver=adjsim.Splitting(dynamics.scheme, 0.004),
    )
    Reweighting(every=0.004)(simulation, TimeAverage(volume), replicas=2, chunks=2, generator=1)
    # 100 frames of two replicas, and some states at which the observable is tried.
    assert 200 <= sum(seen) < 300


STATIONARY = [ScoreFunction(), Reweighting(every=0.1)]


class Own(MassiveDynamics):
    """A thermostat of one's own, which has the terms and the kT of Langevin dynamics."""

    def __init__(self):
        super().__init__(adjsim.Harmonic(parameter(1.0)), 1.3)
        self.kT, self.friction = parameter(0.8), parameter(1.0)

    @property
    def terms(self):
        return {**self.motion, "O": OrnsteinUhlenbeck(self.masses, self.kT, self.friction)}

    def init(self, position, momentum=None, generator=None):
        return adjsim.PhaseState(position, momentum)


class Declared(Own):
    def stationary_density(self):
        return Canonical(self)


@pytest.mark.parametrize("estimator", STATIONARY, ids=["score", "reweighting"])
def test_a_density_is_declared_never_inferred_from_kT(estimator):
    def estimate(dynamics):
        def initial(n, generator):
            return dynamics.init(torch.ones(n, 1, 1), torch.zeros(n, 1, 1))

        simulation = Simulation(dynamics, initial, [0.0, 1.0], adjsim.BAOAB(0.1))
        return estimator(simulation, TimeAverage(squared), replicas=16, generator=seeded())

    with pytest.raises(TypeError, match=r"Own has no stationary density.*return .*Canonical\(self"):
        estimate(Own())
    well = adjsim.Harmonic(parameter(1.0))
    known = estimate(adjsim.Langevin(well, 1.3, parameter(0.8), parameter(1.0)))
    found = estimate(Declared())
    assert found.grad.keys() == known.grad.keys()
    assert all(torch.equal(grad, known.grad[name]) for name, grad in found.grad.items())
    assert float(found.grad["kT"]) != 0


# Variables of a bath.


def well_with_memory(kT, rates=(1.0, 3.0)):
    """At equilibrium from the start; another mass and kT than one, and an atom that is pinned."""
    mass = torch.tensor([1.4, float("inf")])
    dynamics = adjsim.GeneralizedLangevin(adjsim.Harmonic(1.0), mass, kT, rates, [0.5] * len(rates))

    def initial(n, generator):
        position = math.sqrt(kT.detach()) * torch.randn(n, 2, 1, generator=generator)
        return dynamics.init(position, generator=generator)

    return Simulation(dynamics, initial, [0.0, 1.0], adjsim.Splitting("BAGAB", 0.1))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", STATIONARY, ids=["score", "reweighting"])
def test_memory_has_a_temperature(estimator):
    """<z^2> = m kT, read directly, and behind detach()."""
    for look in (lambda s: s.memory[:, 1, 0, 0] ** 2, lambda s: s.memory.detach()[:, 1, 0, 0] ** 2):
        estimate = estimator(
            well_with_memory(parameter(0.8)), TimeAverage(look), replicas=4096, generator=seeded()
        )
        assert abs(float(estimate.grad["kT"]) - 1.4) < 4 * float(estimate.grad_stderr["kT"])
        assert float(estimate.grad_stderr["kT"]) < 0.1


def chained(kT, tau, generator, n):
    """A harmonic well with a chain, at equilibrium: b_j has the variance Q_j kT, Q_1 = dof kT
    tau^2.
    """
    dynamics = adjsim.NoseHooverChain(adjsim.Harmonic(1.0), 1.0, kT, tau)
    state = dynamics.init(
        math.sqrt(kT.detach()) * torch.randn(n, 2, 1, generator=generator), generator=generator
    )
    Q = torch.tensor([2.0, 1.0, 1.0]).reshape(3, 1, 1) * kT.detach() * tau.detach() ** 2
    b = (Q * kT.detach()).sqrt() * torch.randn(state.bath_momentum.shape, generator=generator)
    return dynamics, state._replace(bath_momentum=b)


@pytest.mark.parametrize(
    "estimator",
    [pytest.param(STATIONARY[0], marks=pytest.mark.slow), STATIONARY[1]],
    ids=["score", "reweighting"],
)
def test_chain_momenta_have_a_temperature_and_a_relaxation_time(estimator):
    """<b_1^2> = dof kT^2 tau^2."""
    kT, tau = parameter(0.8), parameter(0.6)
    dynamics, _ = chained(kT, tau, seeded(), 1)

    def initial(n, generator):
        return chained(kT, tau, generator, n)[1]

    simulation = Simulation(dynamics, initial, [0.0, 0.2], adjsim.Splitting("NBABN", 0.02))
    estimate = estimator(
        simulation,
        TimeAverage(lambda s: s.bath_momentum[:, 0, 0, 0] ** 2),
        replicas=8192,
        chunks=8,
        generator=seeded(),
    )
    for name, exact in {"kT": 4 * 0.8 * 0.36, "tau": 4 * 0.64 * 0.6}.items():
        assert abs(float(estimate.grad[name]) - exact) < 4 * float(estimate.grad_stderr[name])
        assert float(estimate.grad_stderr[name]) < 0.1 * exact
    unread = estimator(simulation, TimeAverage(squared), replicas=64, generator=seeded())
    assert float(unread.grad["tau"]) == 0.0
    with pytest.raises(ValueError, match="reads bath_position, which has no stationary density"):
        estimator(
            simulation,
            TimeAverage(lambda s: s.bath_position[:, 0, 0, 0]),
            replicas=64,
            generator=seeded(),
        )


@pytest.mark.marathon
def test_terms_of_a_bath_that_is_not_read_are_left_out():
    """They would add their own variance to the derivative by kT: here of eight variables beside a
    momentum.
    """
    simulation = dataclasses.replace(well_with_memory(parameter(0.8), [1.0] * 8), ts=[0.0, 0.2])
    observables = [
        TimeAverage(squared),
        TimeAverage(lambda s: squared(s) + 1e-9 * s.memory[:, 0, 0, 0]),
    ]
    found = [
        ScoreFunction()(simulation, look, replicas=4096, chunks=64, generator=seeded())
        for look in observables
    ]
    left_out, included = (float(estimate.grad_stderr["kT"]) for estimate in found)
    # 64 chunks know an error to 9 %, and of the same runs a ratio better.
    assert included > 1.15 * left_out


@pytest.mark.slow
def test_a_bath_that_is_read_at_the_ends_alone_is_found():
    """The observable reads the memory beyond 5 only, where no run starts but every run goes."""
    dynamics = adjsim.GeneralizedLangevin(
        adjsim.Harmonic(1.0, 9.0), 1.0, parameter(0.8), (2.0,), (3.0,)
    )
    simulation = Simulation(
        dynamics,
        lambda n, generator: dynamics.init(torch.zeros(n, 1, 1), generator=generator),
        [0.0, 20.0],
        adjsim.Splitting("BAGAB", 0.2),
    )
    observable = TimeAverage(
        lambda s: torch.where(s.position[:, 0, 0] > 5, s.memory[:, 0, 0, 0] ** 2, 0.0), burn_in=16.0
    )
    estimate = ScoreFunction()(simulation, observable, replicas=2048, chunks=8, generator=seeded())
    assert abs(float(estimate.grad["kT"]) - 1.0) < 4 * float(estimate.grad_stderr["kT"])
    assert float(estimate.grad_stderr["kT"]) < 0.1


# Girsanov.


def underdamped(scheme="BAOAB"):
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)))

    def initial(n, generator):
        return dynamics.init(-torch.ones(n, 1, 1), generator=generator)

    return Simulation(dynamics, initial, torch.linspace(0.0, 4.0, 5), adjsim.Splitting(scheme, 0.1))


def to_the_right(state):
    """The momentum, but on the right of 0.2 only, where no start is."""
    return torch.where(state.position[:, 0, 0] > 0.2, state.momentum[:, 0, 0].detach(), 0.0)


HIDDEN = {
    "detached": Final(lambda s: s.momentum.detach()[:, 0, 0] ** 2),
    "compared": Final(lambda s: (s.momentum[:, 0, 0] > 3.0).double()),
    "elsewhere": Final(to_the_right),
    "elsewhere, average": TimeAverage(to_the_right),
    "differences": lambda run: (run.momentum[-1] - run.momentum[-2]).detach()[:, 0, 0],
    "slope alone": lambda run: (run.momentum - run.momentum.detach())[-1, :, 0, 0],
}


@pytest.mark.parametrize("observable", HIDDEN.values(), ids=HIDDEN.keys())
def test_momenta_are_found_by_their_effect(observable):
    with pytest.raises(ValueError, match="the observable depends on momenta"):
        Girsanov()(underdamped(), observable, replicas=64, chunks=2, generator=seeded())


@pytest.mark.parametrize(
    "observable", [Final(squared), TimeAverage(squared), lambda run: run.position[-1, :, 0, 0] ** 2]
)
def test_positions_are_not_taken_for_momenta(observable):
    Girsanov()(underdamped(), observable, replicas=8, chunks=2, generator=seeded())


def test_momenta_have_a_path_density_under_obabo():
    Girsanov()(underdamped("OBABO"), HIDDEN["detached"], replicas=8, chunks=2, generator=seeded())


@pytest.mark.parametrize(
    ("edge", "count", "says"),
    [(0.0, 1007, None), (2.6, 10, "of 2048 replicas make up"), (9.0, 0, "same in all")],
)
def test_an_event_that_few_replicas_saw_is_said(edge, count, says):
    dynamics = adjsim.OverdampedLangevin(adjsim.Harmonic(parameter(1.0)), 1.0, 1.0)
    simulation = Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.zeros(n, 1, 1)),
        [0.0, 2.0],
        adjsim.EulerMaruyama(0.05),
    )
    beyond = Final(lambda s: (s.position[:, 0, 0] > edge).double())
    estimate = Girsanov()(simulation, beyond, replicas=2048, generator=seeded())
    assert round(float(estimate.value) * 2048) == count
    if says is None:
        # A ninth of the replicas for a product of independent Gaussians.
        assert estimate.diagnostics["contributing"] > 100
        assert not estimate.warnings
    else:
        assert estimate.diagnostics["contributing"] <= count
        assert any(says in reason for reason in estimate.warnings)
