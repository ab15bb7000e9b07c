"""What thermostats do to the kinetic energy, what they sample, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import dblquad
from scipy.special import betainc, ive
from torch import nn

import adjsim
from adjsim import (
    CheckpointAdjoint,
    DirectAdjoint,
    ODESolver,
    ReconstructionError,
    ReversibleAdjoint,
    SDESolver,
    Splitting,
    TimeAverage,
)
from adjsim.observables import mean_with_error
from tests.problems import POTENTIALS, THERMOSTATS, parameter, square
from tests.suites import flow, unflow

FREE = adjsim.Harmonic(0.0)
WORD = {"andersen": "BABC"}
RESCALING = {
    "velocity-rescale": lambda potential, **options: adjsim.VelocityRescale(
        potential, 1.3, 0.7, **options
    ),
    "berendsen": lambda potential, **options: adjsim.Berendsen(potential, 1.3, 0.7, 0.5, **options),
    "bussi": lambda potential, **options: adjsim.Bussi(potential, 1.3, 0.7, 0.5, **options),
}


def word(name):
    return WORD.get(name, "BABR")


def twice_kinetic(dynamics, state):
    return 2 * dynamics.kinetic_energy(state)


def run(dynamics, start, ts, scheme="BABR", dt=0.01, **options):
    solver = Splitting(scheme, dt)
    return adjsim.simulate(dynamics, start, ts, solver=solver, **{"generator": 1, **options})


# The kinetic energy.


def test_velocity_rescale_sets_the_kinetic_energy_of_each_system():
    dynamics = THERMOSTATS["velocity-rescale"](POTENTIALS["lennard-jones"]())
    with torch.no_grad():
        made = run(dynamics, dynamics.init(*square((3,))), [0.0, 0.01, 0.5])
    assert made.momentum.shape == (3, 3, 4, 2)
    found = (made.momentum[1:] ** 2 / dynamics.masses(made.momentum)).sum((-1, -2))
    torch.testing.assert_close(found, torch.full((2, 3), 8 * 0.6), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", RESCALING)
def test_the_target_counts_the_given_degrees_of_freedom(name):
    """Over many tau the mean of T over systems is dof kT, without a force."""
    dynamics = RESCALING[name](FREE, dof=3)
    with torch.no_grad():
        made = run(dynamics, dynamics.init(*square((4000,))), [0.0, 10.0], dt=5.0)
    T = twice_kinetic(dynamics, made.final)
    if name == "bussi":
        assert abs(float(T.mean()) - 3 * 0.7) < 4 * float(T.std()) / math.sqrt(4000)
        assert float(T.var()) == pytest.approx(2 * 3 * 0.7**2, rel=0.2)
    else:
        torch.testing.assert_close(T, torch.full((4000,), 3 * 0.7), rtol=1e-7, atol=0)


def test_berendsen_decays_exactly_without_a_force():
    dynamics = adjsim.Berendsen(FREE, 1.4, 0.6, tau=0.5)
    start = dynamics.init(*square((3,)))
    with torch.no_grad():
        made = run(dynamics, start, [0.0, 0.1, 1.0], dt=0.05)
    target, before = 8 * 0.6, twice_kinetic(dynamics, start)
    for i, t in enumerate([0.0, 0.1, 1.0]):
        found = (made.momentum[i] ** 2 / 1.4).sum((-1, -2))
        expected = target + (before - target) * math.exp(-t / 0.5)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    turned = made.momentum[-1] / start.momentum
    torch.testing.assert_close(turned, turned[:, :1, :1].expand_as(turned), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("scheme", "order"), [("BABR", 1), ("RBABR", 2)])
def test_berendsen_converges_to_its_equations(scheme, order):
    dynamics = THERMOSTATS["berendsen"](POTENTIALS["double-well"]())
    start = dynamics.init(*square())
    with torch.no_grad():
        solver = ODESolver("dopri8", rtol=1e-11, atol=1e-11)
        exact = adjsim.simulate(dynamics, start, [0.0, 0.4], solver=solver).final
        errors = []
        for dt in (0.02, 0.01):
            made = run(dynamics, start, [0.0, 0.4], scheme, dt)
            assert made.stats["order"] == order
            errors.append(float((made.final.momentum - exact.momentum).norm()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.1)


def test_the_gradient_of_berendsen_by_backsolve_is_that_of_its_steps():
    found = []
    for solver, adjoint in (
        (ODESolver(rtol=1e-5, atol=1e-7), adjsim.BacksolveAdjoint()),
        (Splitting("RBABR", 0.01), ReversibleAdjoint()),
    ):
        dynamics = THERMOSTATS["berendsen"](POTENTIALS["double-well"]())
        start = dynamics.init(*square())
        made = adjsim.simulate(dynamics, start, [0.0, 0.4], solver=solver, adjoint=adjoint)
        loss = made.final.momentum.square().sum()
        found.append(torch.stack(torch.autograd.grad(loss, list(dynamics.parameters()))))
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


@pytest.mark.parametrize("dof", [None, 6])
def test_bussi_has_the_mean_and_variance_of_its_equation(dof):
    """One step from one momentum: T' has the mean ``c T + g^2 dof`` and the variance
    ``4 c T g^2 + 2 g^4 dof``. All momenta keep their direction.
    """
    kT, tau, dt, replicas = 0.7, 0.5, 0.4, 20_000
    dynamics = adjsim.Bussi(FREE, 1.3, kT, tau, dof=dof)
    p = torch.linspace(0.1, 0.5, 8).reshape(4, 2)
    start = dynamics.init(torch.zeros(replicas, 4, 2), p.expand(replicas, 4, 2))
    with torch.no_grad():
        final = run(dynamics, start, [0.0, dt], dt=dt).final
    count, T, c = 8 if dof is None else dof, float((p**2).sum() / 1.3), math.exp(-dt / tau)
    g2 = (1 - c) * kT
    after = twice_kinetic(dynamics, final)
    mean, variance = c * T + g2 * count, 4 * c * T * g2 + 2 * g2**2 * count
    assert abs(float(after.mean()) - mean) < 4 * math.sqrt(variance / replicas)
    # The relative error of a variance is at most sqrt(14/n) here: that of a square of a Gaussian.
    assert float(after.var()) == pytest.approx(variance, rel=4 * math.sqrt(14 / replicas))
    factor = final.momentum / p
    assert bool((factor > 0).all())
    torch.testing.assert_close(factor, factor[:, :1, :1].expand_as(factor), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dof", [1, 2, 5])
def test_the_probability_of_a_step_that_cannot_be_undone(dof):
    """At equilibrium it is half the regularised incomplete beta function, and the temperature
    stays. In one degree of freedom the momentum turns in such a step.
    """
    tau, dt, replicas = 0.5, 0.4, 20_000
    dynamics = adjsim.Bussi(FREE, 1.3, 0.7, tau)
    start = dynamics.init(torch.zeros(replicas, dof, 1), generator=5)
    noise = (torch.randn(replicas, dof, 1),)
    after = flow(dynamics, "R", start, dt, noise)
    before = unflow(dynamics, "R", after, dt, noise)
    # Near u = 0 the two origins differ by less than this in a share of 1e-6 of all steps.
    lost = (before.momentum - start.momentum).abs().amax((-1, -2)) > 1e-6
    share = 0.5 * betainc(dof / 2, 0.5, 1 - math.exp(-dt / tau))
    assert 0.01 < share < (dt / tau) ** (dof / 2)
    error = math.sqrt(share * (1 - share) / replicas)
    assert abs(float(lost.double().mean()) - share) < 4 * error
    turned = (after.momentum * start.momentum)[:, 0, 0] < 0
    assert torch.equal(turned, lost) if dof == 1 else not turned.any()
    for state in (start, after):
        T = twice_kinetic(dynamics, state)
        assert float(T.mean()) == pytest.approx(dof * 0.7, rel=4 * math.sqrt(2 / dof / replicas))


def test_pathwise_gradients_of_bussi_with_two_degrees_of_freedom():
    """One step takes the size of the momenta, in units of sqrt(m), to a Rice variable. The noise
    outweighs the momenta in a quarter of the steps.
    """
    mass, dt, p = 1.3, 0.05, torch.tensor([[0.12, 0.16]])
    T = float((p**2).sum()) / mass

    def exact(kT, tau):
        c = math.exp(-dt / tau)
        g2 = (1 - c) * kT
        y = c * T / (4 * g2)
        return math.sqrt(g2 * math.pi / 2) * ((1 + 2 * y) * ive(0, y) + 2 * y * ive(1, y))

    dynamics = adjsim.Bussi(FREE, mass, parameter(0.7), parameter(0.5))
    found = adjsim.Pathwise()(
        adjsim.Simulation(
            dynamics,
            lambda n, g: dynamics.init(torch.zeros(n, 1, 2), p.expand(n, 1, 2)),
            [0.0, dt],
            solver=Splitting("BABR", dt),
        ),
        adjsim.Final(lambda s: (s.momentum * p).sum((-1, -2)) / (p.norm() * mass**0.5)),
        replicas=40_000,
        generator=0,
    )
    h = 1e-5
    known = {
        "kT": (exact(0.7 + h, 0.5) - exact(0.7 - h, 0.5)) / (2 * h),
        "tau": (exact(0.7, 0.5 + h) - exact(0.7, 0.5 - h)) / (2 * h),
    }
    assert abs(float(found.value) - exact(0.7, 0.5)) < 4 * float(found.value_stderr)
    for name, grad in known.items():
        error = float(found.grad_stderr[name])
        assert error < 0.02 * abs(grad)
        assert abs(float(found.grad[name]) - grad) < 4 * error, name


def test_bussi_in_one_degree_of_freedom_is_langevin_with_half_the_rate():
    """A flow of the momentum p on the noise xi equals that of Ornstein and Uhlenbeck on the noise
    sign(p) xi, also where the momentum turns.
    """
    bussi = adjsim.Bussi(FREE, 1.3, 0.7, tau=0.5)
    langevin = adjsim.Langevin(FREE, 1.3, 0.7, friction=1.0)
    p, xi = torch.randn(2, 1000, 1, 1)
    start = bussi.init(torch.zeros_like(p), p)
    found = flow(bussi, "R", start, 0.4, (xi,)).momentum
    expected = flow(langevin, "O", start, 0.4, (p.sign() * xi,)).momentum
    assert ((found * p) < 0).any()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_bussi_keeps_a_total_momentum_of_zero():
    dynamics = adjsim.Bussi(POTENTIALS["lennard-jones"](), 1.4, 0.6, 0.1, dof=6)
    position, momentum = square()
    start = dynamics.init(position, momentum - momentum.mean(0))
    with torch.no_grad():
        final = run(dynamics, start, [0.0, 0.5]).final
    assert float(final.momentum.sum(0).abs().max()) < 1e-13
    assert float((final.momentum - start.momentum).abs().max()) > 0.1


@pytest.mark.parametrize("dt", [0.5, 0.1])
def test_andersen_collides_at_its_rate_whatever_the_step(dt):
    """Without a force an atom keeps its momentum until it collides: the share that never did is
    exp(-rate t), for each rate, and all components of an atom collide together.
    """
    rates, replicas, time = torch.tensor([0.4, 1.5]), 10_000, 1.0
    dynamics = adjsim.Andersen(FREE, [1.0, 2.0], 0.7, rates)
    start = dynamics.init(torch.zeros(replicas, 2, 2), generator=5)
    with torch.no_grad():
        final = run(dynamics, start, [0.0, time], "BABC", dt).final
    kept = final.momentum == start.momentum
    assert torch.equal(kept[..., 0], kept[..., 1])
    for atom, rate in enumerate(rates.tolist()):
        share, mass = math.exp(-rate * time), [1.0, 2.0][atom]
        assert abs(float(kept[:, atom, 0].double().mean()) - share) < 4 * math.sqrt(
            share * (1 - share) / replicas
        )
        drawn = final.momentum[:, atom][~kept[:, atom]]
        error = math.sqrt(2 / len(drawn))
        assert float((drawn**2).mean()) == pytest.approx(mass * 0.7, rel=4 * error)


# What they sample.


class Valley(nn.Module):
    """A curved valley in the plane, whose coordinates exchange energy."""

    def forward(self, position):
        x, y = position[..., 0, 0], position[..., 0, 1]
        return 0.5 * x**2 + 0.25 * x**4 + 0.5 * (y - 0.5 * x**2) ** 2


def sampled(dynamics, scheme, time=70.0, dt=0.1, replicas=1500):
    """T, T^2, x^2 and y every second, after twenty: systems that start alike move in phase until
    then.
    """

    def observe(state):
        T, q = twice_kinetic(dynamics, state), state.position
        return torch.stack([T, T**2, q[..., 0, 0] ** 2, q[..., 0, 1]], -1)

    start = dynamics.init(torch.ones(replicas, 1, 2), 0.1 * torch.ones(replicas, 1, 2))
    with torch.no_grad():
        made = run(dynamics, start, torch.arange(time + 1), scheme, dt, record=observe)
    return [mean_with_error(made.record[20:, :, i]) for i in range(4)]


def in_the_valley(kT):
    """The exact means, by quadrature."""

    def integral(function):
        def integrand(y, x):
            return function(x, y) * math.exp(
                -(0.5 * x**2 + 0.25 * x**4 + 0.5 * (y - 0.5 * x * x) ** 2) / kT
            )

        return dblquad(integrand, -5, 5, -5, 12, epsabs=1e-7, epsrel=1e-7)[0]

    norm_ = integral(lambda x, y: 1.0)
    return [integral(lambda x, y: x * x) / norm_, integral(lambda x, y: y) / norm_]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (lambda: adjsim.Bussi(Valley(), 1.3, 0.8, tau=0.5), "BABR"),
        (lambda: adjsim.Andersen(Valley(), 1.3, 0.8, rate=1.0), "BABC"),
    ],
)
def test_the_canonical_distribution(make, scheme):
    """<K> = dof kT/2 and var K = dof kT^2/2 with two degrees of freedom, and positions against
    quadrature.
    """
    kT, dof = 0.8, 2
    exact = [dof * kT, dof * (dof + 2) * kT**2, *in_the_valley(kT)]
    # Velocity Verlet samples positions with an error of (omega dt)^2/4; omega^2 is at most 3 here.
    bias = [0.0, 0.0, 0.0075 * exact[2], 0.0075 * exact[3]]
    for found, true, off in zip(sampled(make(), scheme), exact, bias, strict=True):
        assert found.stderr < 0.03 * true
        assert abs(found.value - true) < 4 * found.stderr + off, (found, true)


def test_berendsen_does_not_fluctuate_enough():
    kT, dof = 0.8, 2
    T, square_, *_ = sampled(adjsim.Berendsen(Valley(), 1.3, kT, tau=0.5), "BABR", time=30.0)
    assert T.value == pytest.approx(dof * kT, rel=0.3)
    assert square_.value - T.value**2 < 0.7 * 2 * dof * kT**2


@pytest.mark.slow
def test_velocity_rescale_samples_positions_at_a_higher_temperature():
    """kT dof/(dof - 1), which is 2 kT here, up to the share of orbits that are not ergodic."""
    dynamics = adjsim.VelocityRescale(Valley(), 1.3, 0.8)
    start = dynamics.init(1 + 0.3 * torch.randn(400, 1, 2), generator=3)
    with torch.no_grad():
        made = run(dynamics, start, torch.arange(121.0), dt=0.05)
    q = made.position[20:, :, 0]
    cold, hot = in_the_valley(0.8), in_the_valley(1.6)
    for values, low, high in zip((q[..., 0] ** 2, q[..., 1]), cold, hot, strict=True):
        found = mean_with_error(values)
        assert found.stderr < 0.02 * high
        assert found.value == pytest.approx(high, rel=0.1)
        assert found.value > 1.3 * low


@pytest.mark.marathon
@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (lambda U: adjsim.Bussi(U, 1.4, 0.2, 0.3, dof=12), "BABR"),
        (lambda U: adjsim.Bussi(U, 1.4, 0.2, 0.3, dof=12), "RBABR"),
        (lambda U: adjsim.Andersen(U, 1.4, 0.2, 1.0), "BABC"),
        (lambda U: adjsim.Andersen(U, 1.4, 0.2, 1.0), "CBABC"),
    ],
)
def test_the_kinetic_energy_of_bound_atoms(make, scheme):
    """<K> and var K of seven atoms in the plane; under Bussi the total momentum is zero and two
    degrees of freedom fewer move. The error of a single series is corrected for autocorrelation.
    """
    dynamics = make(adjsim.LennardJones(1.0, 1.0))
    angles = torch.arange(6) * (math.pi / 3)
    ring = 1.12 * torch.stack([angles.cos(), angles.sin()], -1)
    position = torch.cat([torch.zeros(1, 2), ring])
    start = dynamics.init(position, generator=3)
    dof = 14
    if isinstance(dynamics, adjsim.Bussi):
        start, dof = start._replace(momentum=start.momentum - start.momentum.mean(0)), 12
    with torch.no_grad():
        made = run(
            dynamics,
            start,
            torch.arange(5_001) * 0.1,
            scheme,
            record=lambda state: twice_kinetic(dynamics, state),
            compile=True,
        )
    T = made.record[100:]
    for values, exact in ((T, dof * 0.2), (T**2, dof * (dof + 2) * 0.04)):
        found = mean_with_error(values)
        assert found.stderr < 0.05 * exact
        assert abs(found.value - exact) < 4 * found.stderr, (found, exact)


# Gradients at rest, and where a step of Bussi cannot be undone.


@pytest.mark.parametrize("adjoint", [DirectAdjoint(), CheckpointAdjoint(), ReversibleAdjoint()])
@pytest.mark.parametrize("name", RESCALING)
def test_momenta_at_rest_stay_and_have_finite_gradients(name, adjoint):
    """One system of the batch is at rest where the force is zero. Its momenta have the derivative
    of free steps.
    """
    if name == "velocity-rescale" and isinstance(adjoint, ReversibleAdjoint):
        adjoint = CheckpointAdjoint(1)
    dynamics = RESCALING[name](adjsim.Harmonic(parameter(0.5)))
    dynamics.kT = parameter(0.7)
    p = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.3, 0.1], [0.2, -0.4]]], requires_grad=True)
    start = dynamics.init(torch.zeros(2, 2, 2), p)
    final = run(dynamics, start, [0.0, 0.05], adjoint=adjoint).final
    assert torch.equal(final.momentum[0], torch.zeros(2, 2))
    parameters = list(dynamics.parameters())
    for weight in (1.0, torch.tensor([1.0, 0.0])[:, None, None]):
        loss = (weight * final.momentum).sum() + (weight * final.position).sum()
        grads = torch.autograd.grad(loss, [p, *parameters], retain_graph=True)
        assert all(bool(torch.isfinite(g).all()) for g in grads)
    free = adjsim.Hamiltonian(adjsim.Harmonic(0.5), 1.3)
    q = torch.zeros(2, 2, 2)
    plain = run(free, free.init(q, p), [0.0, 0.05], "BAB").final
    (expected,) = torch.autograd.grad((plain.momentum + plain.position)[0].sum(), p)
    torch.testing.assert_close(grads[0], expected, rtol=1e-13, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["berendsen", "bussi"])
def test_reversal_follows_the_relaxation_time(name):
    """Errors grow as exp(t/tau) backward: over thirty tau they need the checkpoints that the
    adjoint chooses.
    """

    def gradients(adjoint):
        dynamics = RESCALING[name](POTENTIALS["double-well"]())
        dynamics.tau = parameter(0.1)
        made = run(dynamics, dynamics.init(*square()), [0.0, 3.0], dt=0.02, adjoint=adjoint)
        loss = made.final.position.square().sum()
        return torch.stack(torch.autograd.grad(loss, list(dynamics.parameters()))), made.stats

    mine, stats = gradients(ReversibleAdjoint())
    torch.testing.assert_close(mine, gradients(CheckpointAdjoint())[0], rtol=1e-9, atol=0)
    assert 0 < stats["reconstruction_error"] < 1e-10
    with pytest.raises(ReconstructionError, match="CheckpointAdjoint"):
        gradients(ReversibleAdjoint(checkpoint_every=10_000))


def test_a_step_that_cannot_be_undone_is_recomputed_and_its_reversal_is_refused():
    """With two degrees of freedom and tau = dt the noise outweighs the momenta in some steps. The
    inverse takes the other origin there, and the error is seen.
    """

    def gradients(adjoint, seed):
        dynamics = adjsim.Bussi(adjsim.Harmonic(parameter(1.3)), parameter(1.4), 0.6, 0.1)
        start = dynamics.init(torch.tensor([[1.0, 0.4]]), torch.tensor([[0.3, -0.2]]))
        made = run(dynamics, start, [0.0, 1.0], dt=0.1, adjoint=adjoint, generator=seed)
        loss = made.final.position.square().sum()
        return torch.stack(torch.autograd.grad(loss, list(dynamics.parameters())))

    refused = 0
    for seed in range(8):
        direct = gradients(DirectAdjoint(), seed)
        torch.testing.assert_close(gradients(CheckpointAdjoint(), seed), direct)
        try:
            found = gradients(ReversibleAdjoint(), seed)
        except ReconstructionError:
            refused += 1
        else:
            torch.testing.assert_close(found, direct, rtol=1e-9, atol=0)
    assert 0 < refused < 8


# Noise, shapes, dtypes, pinned atoms.


@pytest.mark.parametrize("name", ["bussi", "andersen"])
def test_noise_is_of_the_seed_the_step_and_the_replica(name):
    dynamics = THERMOSTATS[name](POTENTIALS["harmonic"]())
    (position, momentum), dt = square((5,)), 0.05
    many = dynamics.init(position, momentum)
    few = dynamics.init(position[:2], momentum[:2])
    with torch.no_grad():
        one = run(dynamics, many, [0.0, 0.5, 1.0], word(name), dt)
        two = run(dynamics, few, [0.0, 1.0], word(name), dt)
        other = run(dynamics, few, [0.0, 1.0], word(name), dt, generator=2)
    assert torch.equal(one.final.momentum[:2], two.final.momentum)
    assert not torch.equal(other.final.momentum, two.final.momentum)


@pytest.mark.parametrize("name", THERMOSTATS)
def test_pinned_atoms_and_single_precision(name):
    """An atom of infinite mass stays, and is not counted; float32 follows float64."""
    mass = torch.tensor([1.0, math.inf, 0.8, 2.0])
    make = {
        "velocity-rescale": lambda: adjsim.VelocityRescale(Valleys(), mass, 0.6),
        "berendsen": lambda: adjsim.Berendsen(Valleys(), mass, 0.6, 0.02),
        "bussi": lambda: adjsim.Bussi(Valleys(), mass, 0.6, 0.02),
        "andersen": lambda: adjsim.Andersen(Valleys(), mass, 0.6, 30.0),
    }[name]
    dynamics, (position, _) = make(), square((3,))
    ends = []
    for dtype in (torch.float64, torch.float32):
        q = position.to(dtype).requires_grad_()
        start = dynamics.init(q, generator=4)
        final = run(dynamics, start, [0.0, 0.2], word(name)).final
        assert final.momentum.dtype == dtype
        assert torch.equal(final.position[:, 1], q[:, 1])
        assert torch.equal(final.momentum[:, 1], torch.zeros(3, 2, dtype=dtype))
        (grad,) = torch.autograd.grad(final.momentum.sum(), q)
        assert bool(torch.isfinite(grad).all())
        ends.append(final.momentum.detach().double())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
    if name == "velocity-rescale":
        found = twice_kinetic(dynamics, final)
        torch.testing.assert_close(found, torch.full((3,), 6 * 0.6).to(found), rtol=1e-6, atol=0)
    if name == "bussi":
        assert float(dynamics.terms["R"].coefficients(0.1, start)["others"].sum()) == 5


class Valleys(nn.Module):
    """A valley for every atom."""

    def forward(self, position):
        return ((position - 1) ** 2 + 0.1 * position**4).sum((-1, -2))


# Refusals.


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "velocity-rescale",
            {"adjoint": ReversibleAdjoint()},
            TypeError,
            r"no inverse \(it loses the kinetic energy before the step\).*CheckpointAdjoint\(\)",
        ),
        (
            "andersen",
            {"adjoint": ReversibleAdjoint()},
            TypeError,
            r"no inverse \(it loses the momenta before collisions\).*CheckpointAdjoint\(\)",
        ),
        ("velocity-rescale", {"solver": ODESolver()}, TypeError, "no rate in continuous time"),
        ("bussi", {"solver": ODESolver()}, TypeError, "'R' of Bussi: it is one noise a system"),
        ("bussi", {"solver": SDESolver(dt=0.1)}, TypeError, "Use a splitting"),
        ("andersen", {"solver": SDESolver(dt=0.1)}, TypeError, "its collisions are jumps"),
        ("andersen", {"solver": ODESolver()}, TypeError, "its collisions are jumps"),
        *(
            (name, {"solver": Splitting("BAB" + letter, 0.1, exact=True)}, TypeError, message)
            for name, letter, message in (
                ("velocity-rescale", "R", r"'R' of VelocityRescale.*with CheckpointAdjoint\(\)"),
                ("berendsen", "R", r"with ReversibleAdjoint\(\) or CheckpointAdjoint\(\)"),
                ("bussi", "R", r"with ReversibleAdjoint\(\) or CheckpointAdjoint\(\)"),
                ("andersen", "C", r"'C' of Andersen.*with CheckpointAdjoint\(\)"),
            )
        ),
        ("berendsen", {"solver": Splitting("BABC", 0.1)}, ValueError, "has no term 'C'"),
    ],
)
def test_refusals(name, options, error, message):
    dynamics = THERMOSTATS[name](POTENTIALS["harmonic"]())
    options = {"solver": Splitting(word(name), 0.1), **options}
    with pytest.raises(error, match=message) as raised:
        adjsim.simulate(dynamics, dynamics.init(*square()), [0.0, 0.1], **options)
    assert "\n" not in str(raised.value)


def test_numbers_that_are_refused():
    for make, message in (
        (lambda: adjsim.Berendsen(FREE, tau=0.0), "tau must be positive"),
        (lambda: adjsim.VelocityRescale(FREE, kT=-1.0), "kT must be positive"),
        (lambda: adjsim.VelocityRescale(FREE, dof=0), "dof must be positive"),
        (lambda: adjsim.Andersen(FREE, rate=0.0), "rate must be positive"),
        (
            lambda: adjsim.Andersen(FREE, rate=torch.ones(2, 2)),
            "rate must be one number",
        ),
        (lambda: adjsim.Andersen(FREE, rate=[1.0, 2.0]).init(*square()), "rate has 2 entries"),
        (lambda: adjsim.Bussi(FREE, dof=-2), "dof must be positive; got -2"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        *((make, "BABR") for make in RESCALING.values()),
        (lambda potential, dof: adjsim.NoseHooverChain(potential, dof=dof), "NBABN"),
    ],
)
def test_no_system_has_more_degrees_of_freedom_than_coordinates(make, scheme):
    """Fewer are taken, and with a fitting start the run refuses them too."""
    assert make(FREE, dof=1).init(*square()).position.shape == (4, 2)
    says = r"dof is 9, more than atoms x dim = 8 of one system: give at most 8, or None\.$"
    with pytest.raises(ValueError, match=says):
        make(FREE, dof=9).init(*square((3,)))
    start = make(FREE, dof=8).init(*square((3,)))
    with pytest.raises(ValueError, match=says):
        run(make(FREE, dof=9), start, [0.0, 0.1], scheme)


@pytest.mark.parametrize("name", ["velocity-rescale", "berendsen"])
def test_only_canonical_thermostats_have_a_density(name):
    assert RESCALING[name](adjsim.Harmonic()).stationary_density() is None
    bussi = RESCALING["bussi"](adjsim.Harmonic())
    state = bussi.init(*square())
    langevin = adjsim.Langevin(adjsim.Harmonic(), 1.3, 0.7)
    found, expected = (x.stationary_density().reduced_energy(state) for x in (bussi, langevin))
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_the_rate_of_collisions_has_no_pathwise_gradient():
    """It is refused where a path would be differentiated, and estimators that need no path take
    it.
    """
    dynamics = adjsim.Andersen(adjsim.Harmonic(), rate=parameter(2.0))
    start = dynamics.init(*square((8,)))
    for adjoint in (DirectAdjoint(), CheckpointAdjoint()):
        with pytest.raises(ValueError, match=r"'rate' requires grad.*ScoreFunction.*Finite"):
            run(dynamics, start, [0.0, 0.1], "BABC", adjoint=adjoint)
    simulation = adjsim.Simulation(
        dynamics,
        lambda n, g: dynamics.init(torch.ones(n, 1, 1), generator=g),
        [0.0, 1.0],
        solver=Splitting("BABC", 0.1),
    )
    observable = TimeAverage(lambda state: state.position.square().sum((-1, -2)))
    options = {"replicas": 32, "generator": 0}
    for estimator in (adjsim.Pathwise(), adjsim.ForwardSensitivity()):
        with pytest.raises(ValueError, match="'rate' requires grad"):
            estimator(simulation, observable, **options)
    difference = adjsim.FiniteDifference(h=0.5)(simulation, observable, **options)
    assert 0 < abs(float(difference.grad["rate"])) < math.inf
    score = adjsim.ScoreFunction()(simulation, observable, **options)
    assert float(score.grad["rate"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", THERMOSTATS)
def test_compiled_runs_without_a_gradient(name):
    dynamics = THERMOSTATS[name](POTENTIALS["lennard-jones"]())
    start = dynamics.init(*square((3,)))
    with torch.no_grad():
        one, two = (
            run(dynamics, start, [0.0, 0.1, 0.4], word(name), compile=compiled)
            for compiled in (True, False)
        )
    assert one.stats["compiled_forward"] == "C++"
    torch.testing.assert_close(one.momentum, two.momentum, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_compiled_gradient_from_a_start_that_no_step_reaches():
    """A compiled backward loop also evaluates the step before its first, which has no inverse here:
    the kinetic energy of the start, zero, is below that of any state after a thermostat.
    """
    found = []
    for compile in (False, True):
        dynamics = adjsim.Berendsen(
            adjsim.LennardJones(parameter(1.0)), kT=parameter(0.3), tau=parameter(0.01)
        )
        position, momentum = square()
        end = adjsim.simulate(
            dynamics,
            dynamics.init(position, 0 * momentum),
            [0.0, 0.01, 0.05],
            solver=adjsim.Splitting("RBABR", 0.005),
            adjoint=adjsim.ReversibleAdjoint(tol=0.1, checkpoint_every=1),
            compile=compile,
        )
        found.append(torch.autograd.grad((end.position**2).sum(), list(dynamics.parameters())))
    # The same steps, in another order of sums.
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=0)
    assert all(bool(g != 0) for g in found[0])
