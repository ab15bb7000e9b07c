"""Transport coefficients and response functions, against processes with exact answers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import adjsim

REPLICAS = 12
# Chance of five standard errors of a mean of twelve replicas (Student's t): 4e-4.
ERRORS = 5.0


def agrees(values, known, precision):
    """The mean over replicas is the known number, to its error, which is small enough to say so."""
    mean = adjsim.mean_with_error(values.reshape(1, -1))
    assert mean.stderr < precision * abs(known)
    assert abs(mean.value - known) < ERRORS * mean.stderr


@pytest.fixture(scope="module")
def brownian():
    """Positions and velocities of ``dv = -g v dt + sqrt(2 g kT/m) dW``, sampled exactly."""
    frames, atoms, dt, rate, variance = 3000, 20, 0.1, 0.8, 1.5 / 2.0
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(frames, 2, REPLICAS, atoms, 3, generator=generator, dtype=torch.float64)
    decay = math.exp(-rate * dt)
    # The covariance of velocity and displacement after dt, of a particle at rest.
    vv = variance * (1 - decay**2)
    xv = variance / rate * (1 - decay) ** 2
    xx = variance / rate**2 * (2 * rate * dt - 3 + 4 * decay - decay**2)
    along, rest = xv / vv**0.5, (xx - xv**2 / vv) ** 0.5
    v, x = variance**0.5 * noise[0, 0], torch.zeros_like(noise[0, 0])
    path = [(x, v)]
    for first, second in noise[1:]:
        x = x + v * (1 - decay) / rate + along * first + rest * second
        v = decay * v + vv**0.5 * first
        path.append((x, v))
    position, velocity = (torch.stack(part) for part in zip(*path, strict=True))
    return position, velocity, dt * torch.arange(frames, dtype=torch.float64), rate, variance


@pytest.mark.slow
def test_diffusion_of_an_ornstein_uhlenbeck_velocity(brownian):
    """D = kT/(m g), less the part of the slope that the window is too early for."""
    position, velocity, times, rate, variance = brownian
    limit = variance / rate
    found = adjsim.diffusion_coefficient(position, times, start=4.0, stop=10.0)
    lag = times[40:101]
    msd = 6 * limit * (lag - (1 - torch.exp(-rate * lag)) / rate)
    centred = lag - lag.mean()
    known = float((centred * msd).sum() / (centred**2).sum()) / 6
    assert known == pytest.approx(limit, rel=0.02)
    agrees(found, known, 0.03)
    # The trapezoidal rule takes exp(-g t) for a sum: g dt / 2 coth(g dt / 2) of the integral.
    green_kubo = torch.trapezoid(adjsim.velocity_autocorrelation(velocity, 100), dx=0.1, dim=0)
    agrees(green_kubo, limit * 0.04 / math.tanh(0.04), 0.03)
    agrees(adjsim.velocity_autocorrelation(velocity, 1)[0], variance, 0.02)


def test_displacements_and_correlations_over_all_origins():
    """Against the double sum over origins and lags."""
    q = 100 + torch.randn(9, 2, 4, 3, generator=torch.Generator().manual_seed(0)).cumsum(0)
    for lags in (1, 5, 9):
        moved = [((q[k:] - q[: 9 - k]) ** 2).sum(-1).mean((0, -1)) for k in range(lags)]
        products = [(q[k:] * q[: 9 - k]).mean((0, -1, -2)) for k in range(lags)]
        # Positions of size 100 and displacements of size 1 leave twelve digits.
        torch.testing.assert_close(
            adjsim.mean_squared_displacement(q, lags), torch.stack(moved), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(
            adjsim.velocity_autocorrelation(q, lags), torch.stack(products), rtol=1e-12, atol=0
        )
    straight = torch.arange(6.0).reshape(6, 1, 1) * torch.tensor([3.0, 4.0])
    found = adjsim.mean_squared_displacement(straight, 4)
    torch.testing.assert_close(found, 25.0 * torch.arange(4.0) ** 2, rtol=1e-12, atol=1e-12)
    single = adjsim.diffusion_coefficient(q.float(), torch.arange(9.0), start=1, stop=4)
    assert single.dtype == torch.float32
    torch.testing.assert_close(
        single.double(),
        adjsim.diffusion_coefficient(q, torch.arange(9.0), start=1, stop=4),
        rtol=1e-4,  # Positions of size 100 in float32 have errors of 4e-6.
        atol=0,
    )


@pytest.mark.parametrize("dim", [2, 3])
def test_viscosity_is_the_sum_over_components(dim):
    """Against the mean over the independent components; neither trace nor torque contributes."""
    generator = torch.Generator().manual_seed(1)
    stress = torch.randn(12, 2, dim, dim, generator=generator)
    stress = stress + stress.transpose(-1, -2)
    times, volume, kT = 0.3 * torch.arange(12.0) + 1, 7.0, 1.7
    found = adjsim.viscosity(stress, times, volume, kT, stop=1.5)
    parts = [stress[..., a, b] for a, b in itertools.combinations(range(dim), 2)]
    parts.append((stress[..., 0, 0] - stress[..., 1, 1]) / 2)
    if dim == 3:
        parts.append((stress.diagonal(dim1=-2, dim2=-1).sum(-1) - 3 * stress[..., 2, 2]) / 12**0.5)
    products = torch.stack(
        [sum((x[k:] * x[: 12 - k]).mean(0) for x in parts) / len(parts) for k in range(6)]
    )
    known = volume / kT * torch.cumulative_trapezoid(products, dx=0.3, dim=0)
    torch.testing.assert_close(found[1:], known, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0], torch.zeros(2))
    turn = torch.randn(dim, dim, generator=generator)
    other = stress + 5 * torch.eye(dim) + (turn - turn.T)
    torch.testing.assert_close(
        adjsim.viscosity(other, times, volume, kT, stop=1.5), found, rtol=1e-11, atol=1e-11
    )


def test_viscosity_of_an_exponential_correlation():
    """Independent components that decay as exp(-t): the trapezoidal sum of a geometric series."""
    frames, dt, spread = 3000, 0.2, 0.5
    generator = torch.Generator().manual_seed(2)
    noise = spread * torch.randn(frames, REPLICAS, 5, generator=generator)
    decay, parts = math.exp(-dt), [noise[0]]
    for x in noise[1:]:
        parts.append(decay * parts[-1] + (1 - decay**2) ** 0.5 * x)
    xy, xz, yz, first, second = torch.stack(parts).unbind(-1)
    rows = [
        [first + second / 3**0.5, xy, xz],
        [xy, -first + second / 3**0.5, yz],
        [xz, yz, -2 * second / 3**0.5],
    ]
    stress = torch.stack([torch.stack(row, -1) for row in rows], -2)
    found = adjsim.viscosity(stress, dt * torch.arange(frames), 4.0, 1.6, stop=5.0)
    assert found.shape == (26, REPLICAS)
    for lag in (5, 25):
        ends = (1 + decay**lag) / 2
        known = 4.0 / 1.6 * spread**2 * dt * (ends + sum(decay**k for k in range(1, lag)))
        agrees(found[lag], known, 0.03)
        # The error in the docstring, to its own error of twelve replicas: 2 sqrt(t/T/5).
        if lag == 25:
            expected = 2 * math.sqrt(5.0 / (frames * dt) / 5) * known
            assert float(found[lag].std()) == pytest.approx(expected, rel=0.6)


def test_heat_capacity_of_a_harmonic_crystal():
    """dof/2 from the springs and dof/2 from the momenta, whatever the masses and springs."""
    atoms, kT = 6, 0.7
    ring = 2 * torch.eye(atoms) - torch.eye(atoms).roll(1, 0) - torch.eye(atoms).roll(-1, 0)
    stiffness, modes = torch.linalg.eigh(ring)
    dof = 3 * (atoms - 1)
    normal = torch.randn(4000, REPLICAS, atoms - 1, 3, generator=torch.Generator().manual_seed(3))
    q = modes[:, 1:] @ (normal * (kT / stiffness[1:, None]) ** 0.5)
    energy = 0.5 * (q * (ring @ q)).sum((-1, -2))
    agrees(adjsim.heat_capacity(energy, kT, dof=dof), float(dof), 0.02)
    total = energy + 0.5 * kT * torch.randn(4000, REPLICAS, dof).square().sum(-1)
    agrees(adjsim.heat_capacity(total, kT, dof=0), float(dof), 0.02)


@pytest.mark.slow
def test_compressibility_of_hard_rods():
    """Tonks: P = density kT / (1 - density a), so chi = (1 - density a)^2 / (density kT)."""
    rods, length, rod, kT, frames = 100, 120.0, 0.5, 1.3, 1500
    gaps = torch.rand(frames * REPLICAS, rods, generator=torch.Generator().manual_seed(4))
    gaps = -gaps.log()
    gaps = gaps / gaps.sum(-1, keepdim=True) * (length - rods * rod)
    q = (gaps + rod).cumsum(-1).unsqueeze(-1)
    k = 2 * math.pi / length * torch.arange(1.0, 5.0)
    structure = adjsim.structure_factor(q, k.unsqueeze(-1)).reshape(frames, REPLICAS, 4).mean(0)
    density = rods / length
    found = adjsim.compressibility(structure, k, density, kT)
    agrees(found, (1 - density * rod) ** 2 / (density * kT), 0.03)


def test_the_line_through_the_structure_factor():
    k = torch.tensor([0.1, 0.2, 0.2, 0.4])
    structure = torch.stack([0.3 + 2 * k**2, torch.ones(4)])
    found = adjsim.compressibility(structure, k, 0.5, 2.0)
    torch.testing.assert_close(found, torch.tensor([0.3, 1.0]), rtol=1e-13, atol=0)


def test_a_narrow_range_of_wavenumbers_in_single_precision():
    """Squares of k between 100 and 101 cancel all but four digits of float32."""
    k = torch.linspace(10.0, 10.05, 5, dtype=torch.float32)
    structure = (0.3 + 2 * k**2).expand(3, 5)
    found = adjsim.compressibility(structure, k, 0.5, 2.0)
    assert found.dtype == torch.float32
    exact = adjsim.compressibility(structure.double(), k.double(), 0.5, 2.0)
    torch.testing.assert_close(found, exact.float(), rtol=1e-6, atol=0)


def test_a_temperature_for_each_system():
    """Results of a batch are those of its systems, each with its own kT."""
    kT, energy, stress, s = (
        torch.tensor([0.5, 1.7]), series(6, 2), series(6, 2, 3, 3), series(2, 3)
    )  # fmt: skip
    functions = [
        (lambda x, t: adjsim.heat_capacity(x, t, dof=4), energy, 1),
        (lambda x, t: adjsim.viscosity(x, TIMES, 3.0, t, stop=2.0), stress, 1),
        (lambda x, t: adjsim.compressibility(x, [0.1, 0.2, 0.3], 0.8, t), s, 0),
    ]
    for function, x, axis in functions:
        single = [function(x.select(axis, i), kT[i : i + 1]) for i in range(2)]
        torch.testing.assert_close(function(x, kT), torch.stack(single, -1), rtol=1e-13, atol=1e-13)


def test_small_numbers_by_hand():
    found = adjsim.heat_capacity([1.0, 3.0], 2.0, dof=3)
    assert float(found) == pytest.approx(2.0 / 4.0 + 1.5, rel=1e-14)
    # A line through c t^2 at even t has the slope c (first + last); the window includes its ends,
    # 3 and 7 tenths, which are no multiples of 0.1 in floating point.
    straight = torch.arange(10.0).reshape(10, 1, 1) * torch.tensor([0.3, 0.4])
    found = adjsim.diffusion_coefficient(straight, 0.1 * torch.arange(10.0), start=0.3, stop=0.7)
    assert float(found) == pytest.approx(25 * (0.3 + 0.7) / 4, rel=1e-11)


def series(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6)).requires_grad_()


TIMES = 0.5 * torch.arange(6.0)
GRADIENTS = {
    "displacement": (lambda q: adjsim.mean_squared_displacement(q, 4), [series(6, 2, 2, 3)]),
    "velocity": (lambda v: adjsim.velocity_autocorrelation(v, 4), [series(6, 2, 2, 3)]),
    "diffusion": (
        lambda q: adjsim.diffusion_coefficient(q, TIMES, start=0.5, stop=2.0),
        [series(6, 2, 2, 3)],
    ),
    "viscosity": (
        lambda p, kT: adjsim.viscosity(p, TIMES, 3.0, kT, stop=2.0),
        [series(6, 2, 3, 3), torch.tensor(1.3, requires_grad=True)],
    ),
    "heat capacity": (
        lambda u, kT: adjsim.heat_capacity(u, kT, dof=4),
        [series(6, 2), torch.tensor(1.3, requires_grad=True)],
    ),
    "compressibility": (
        lambda s, kT: adjsim.compressibility(s, [0.1, 0.2, 0.3], 0.8, kT),
        [series(2, 3), torch.tensor(1.3, requires_grad=True)],
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_against_central_differences(name):
    function, inputs = GRADIENTS[name]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    # Central differences of step 1e-6 have rounding errors of about 1e-9.
    assert gradcheck(function, doubles, rtol=1e-6, atol=1e-8)
    single = function(*[x.detach().float() for x in doubles])
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), function(*doubles), rtol=1e-4, atol=1e-5)


def diffuse(times=TIMES, start=0.5, stop=2.0):
    return adjsim.diffusion_coefficient(torch.zeros(6, 2, 3), times, start=start, stop=stop)


def shear(shape=(6, 3, 3), volume=1.0, kT=1.0, stop=2.0):
    return adjsim.viscosity(torch.zeros(shape), TIMES, volume, kT, stop=stop)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: diffuse(stop=3.0), "the length of the run; got 0.5 and 3"),
        (lambda: diffuse(start=2.0), "0 <= start < stop"),
        (lambda: diffuse(start=1.1, stop=1.9), "at least two lags"),
        (lambda: diffuse(times=TIMES**2), "even steps"),
        (lambda: diffuse(times=TIMES[:5]), r"times must be \(6,\)"),
        (lambda: adjsim.mean_squared_displacement(torch.zeros(6, 2, 3), 7), "lags must be between"),
        (lambda: shear((6, 3, 2)), "stress must be"),
        (lambda: shear((6, 1, 1)), "dim 2 or 3"),
        (lambda: shear(volume=0.0), "volume must be positive"),
        (lambda: shear(kT=-1.0), "kT must be positive"),
        (lambda: shear((6, 2, 3, 3), kT=[[1.0]] * 5), r"kT must be one number or \(2,\), one for"),
        (lambda: shear(kT=[1.0, 2.0]), r"kT must be one number; got shape \(2,\)"),
        (lambda: shear(stop=0.1), "stop must be between 0.5"),
        (lambda: shear(stop=9.0), "length of the run; got 9"),
        (lambda: adjsim.heat_capacity([1.0], 1.0, dof=3), "of at least two frames; got shape"),
        (
            lambda: adjsim.heat_capacity(np.array(1.0), 1.0, dof=3),
            r"energy must be \(time, \*batch\), of at",
        ),
        (
            lambda: adjsim.heat_capacity(torch.zeros(6, 3), [[1.0], [2.0]], dof=3),
            r"kT must be one number or \(3,\), one for each system; got shape \(2, 1\)",
        ),
        (lambda: adjsim.heat_capacity([1.0, 2.0], 0.0, dof=3), "kT must be positive"),
        (lambda: adjsim.heat_capacity([1.0, 2.0], 1.0, dof=-3), "dof must be zero or positive"),
        (lambda: adjsim.compressibility([1.0, 1.0], [0.0, 1.0], 1.0, 1.0), "must be positive"),
        (lambda: adjsim.compressibility([1.0, 1.0], [1.0, 1.0], 1.0, 1.0), "must differ"),
        (lambda: adjsim.compressibility([1.0, 1.0], [1.0], 1.0, 1.0), r"wavenumbers \(n,\)"),
        (lambda: adjsim.compressibility([1.0, 1.0], [1.0, 2.0], 0.0, 1.0), "density must be"),
        (
            lambda: adjsim.compressibility(
                torch.ones(2, 3), [1.0, 2.0, 3.0], 1.0, torch.ones(2, 1)
            ),
            r"kT must be one number or \(2,\), one for each system; got shape \(2, 1\)",
        ),
        (
            lambda: adjsim.diffusion_coefficient(TIMES, TIMES, start=0.5, stop=2.0),
            r"position must be \(time, \*batch, atoms, dim\); got shape \(6,\)",
        ),
        (lambda: adjsim.mean_squared_displacement(TIMES), r"position must be .* shape \(6,\)"),
        (lambda: adjsim.velocity_autocorrelation(TIMES, 2), r"velocity must be .* shape \(6,\)"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
