"""Every potential keeps the contract, and says the numbers that are known of it."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import adjsim
from adjsim.io.systems import cluster
from tests.problems import POTENTIALS, square
from tests.suites import PotentialContract

NIST = Path(__file__).parents[1] / "data" / "nist_lj_config4.csv"


@pytest.mark.parametrize(
    "potential", [build() for build in POTENTIALS.values()], ids=list(POTENTIALS)
)
@pytest.mark.parametrize("position", [square()[0]], ids=["square"])
class TestPotentials(PotentialContract):
    pass


class Soft(adjsim.potentials.PairPotential):
    """A pair potential that gives nothing but its energy: slope and curvature follow."""

    def pair_energy(self, s):
        return torch.exp(-s)


@pytest.mark.parametrize("potential", [Soft(), Soft(cutoff=1.5)], ids=["all", "cutoff"])
@pytest.mark.parametrize("position", [square()[0]], ids=["square"])
class TestDerivedPair(PotentialContract):
    pass


def minimum(potential, start):
    def energy(x):
        q = torch.tensor(x.reshape(start.shape))
        return float(potential(q)), -adjsim.force(potential, q).numpy().ravel()

    found = minimize(energy, start.ravel(), jac=True, method="BFGS", options={"gtol": 1e-10})
    return found.x, found.fun


@pytest.mark.parametrize(
    ("point", "energy"),
    [
        ((-0.5582236346, 1.4417258418), -146.6995172100),
        ((0.6234994049, 0.0280377585), -108.1667241169),
        ((-0.0500108230, 0.4666941049), -80.7678181297),
    ],
)
def test_muller_brown_minima(point, energy):
    x, fun = minimum(adjsim.MullerBrown(), np.array([point]) + 0.02)
    np.testing.assert_allclose(x, point, atol=1e-8)
    np.testing.assert_allclose(fun, energy, atol=1e-9)


@pytest.mark.parametrize(
    ("point", "energy"),
    [
        ((-0.8220015587, 0.6243128028), -40.6648435087),
        ((0.2124865820, 0.2929883251), -72.2489401123),
    ],
)
def test_muller_brown_saddles(point, energy):
    q = torch.tensor([point])
    potential = adjsim.MullerBrown()
    assert (
        float(adjsim.force(potential, q).norm()) < 1e-6
    )  # the point is given to 1e-10, the curvature is about 1e3
    torch.testing.assert_close(float(potential(q)), energy, rtol=0, atol=1e-9)
    hessian = torch.autograd.functional.hessian(lambda x: potential(x), q).reshape(2, 2)
    assert torch.linalg.det(hessian) < 0


def test_lennard_jones_pair_minimum():
    potential = adjsim.LennardJones(epsilon=1.7, sigma=1.3)
    q = torch.tensor([[0.0, 0, 0], [2 ** (1 / 6) * 1.3, 0, 0]])
    torch.testing.assert_close(float(potential(q)), -1.7, rtol=1e-14, atol=0)
    assert float(adjsim.force(potential, q).abs().max()) < 1e-13


def test_lennard_jones_cluster():
    """The shipped 13-atom cluster is the known minimum."""
    system = cluster()
    torch.testing.assert_close(
        system.potential(system.position).item(), -44.326801, rtol=0, atol=5e-7
    )
    assert float(adjsim.force(system.potential, system.position).abs().max()) < 1e-11


def test_nist_configuration():
    with NIST.open() as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    q = torch.tensor([[float(x) for x in row] for row in rows[1:]])
    box = torch.full((3,), 8.0)
    truncated = adjsim.LennardJones(cutoff=3.0, box=box)
    pairs = adjsim.pair_distances(q, box)
    near = pairs[pairs < 3.0]
    shift = 4 * (3.0**-12 - 3.0**-6)
    energy = float(truncated(q)) + shift * len(near)
    assert energy == pytest.approx(-16.79032, abs=5e-6)
    virial = float((24 * (near**-6 - 2 * near**-12)).sum())  # sum of r dU/dr over pairs
    assert abs(virial) == pytest.approx(46.249, abs=5e-4)
    # The same number from the force field: sum over pairs of r dU/dr is the derivative of the
    # energy along a dilation.
    dilation = derivative_along_dilation(truncated, q, box)
    assert dilation == pytest.approx(virial, rel=1e-9)


def derivative_along_dilation(potential, q, box):
    scale = torch.ones((), requires_grad=True)
    d = adjsim.pair_distances(q, box) * scale
    s = (d**2)[d < potential.cutoff]
    (slope,) = torch.autograd.grad(potential.pair_energy(s).sum(), scale)
    return float(slope)


def test_long_range_correction_of_nist():
    """8/3 pi N rho (1/3 rc^-9 - rc^-3), the tail of a uniform fluid, as NIST gives it for this
    configuration.
    """
    n, volume, cutoff = 30, 8.0**3, 3.0
    tail = 8 / 3 * np.pi * n * n / volume * (cutoff**-9 / 3 - cutoff**-3)
    assert tail == pytest.approx(-0.54517, abs=5e-6)


@pytest.mark.slow
def test_masked_pairs_stay_finite():
    """Self pairs, coincident atoms beyond reach of the mask, and pairs past the cutoff never make
    NaN.
    """
    potential = adjsim.LennardJones(
        torch.nn.Parameter(torch.tensor(1.0)),
        torch.nn.Parameter(torch.tensor(1.0)),
        cutoff=2.0,
        box=torch.full((2,), 9.0),
    )
    q = torch.tensor([[0.0, 0.0], [1.1, 0.0], [4.4, 4.4]], requires_grad=True)
    energy = potential(q)
    grads = torch.autograd.grad(energy, (q, *potential.parameters()), create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in grads), (q, *potential.parameters()))
    assert all(torch.isfinite(g).all() for g in (*grads, *second))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_do_not_overflow(dtype):
    """SI units: sigma of 3.4e-10 m and epsilon of 1.65e-21 J leave self pairs finite."""
    potential = adjsim.LennardJones(
        torch.nn.Parameter(torch.tensor(1.65e-21)), torch.nn.Parameter(torch.tensor(3.4e-10))
    )
    q = torch.tensor([[0.0, 0, 0], [3.8e-10, 0, 0]], dtype=dtype)
    push = adjsim.force(potential, q)
    assert torch.isfinite(push).all()
    assert push.abs().max() > 0


def test_transforms_see_a_tilted_cell():
    """A reduced cell is made in a transform too, whose tensors have no storage."""
    rows = torch.tensor([[3.6, 0.0, 0.0], [0.5, 3.6, 0.0], [0.0, 0.3, 3.6]], dtype=torch.float64)
    pairs = adjsim.LennardJones(cutoff=1.5, box=rows)
    q = torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * 3) * 1.1 + 0.2
    # Only the order of sums differs.
    torch.testing.assert_close(torch.func.grad(pairs)(q), -pairs.force(q), rtol=0, atol=1e-12)


def test_nearest_image_of_a_tilted_cell():
    """Without a cutoff each pair counts once at its nearest image, found here by brute force."""
    box = torch.tensor([[4.0, 0.0, 0.0], [1.9, 3.5, 0.0], [1.5, 1.2, 3.2]])
    q = torch.rand(6, 3) @ box
    images = torch.cartesian_prod(*[torch.arange(-2.0, 3.0)] * 3) @ box
    d = (q[:, None] - q[None])[:, :, None] + images
    nearest = d.norm(dim=-1).amin(-1)
    i, j = torch.triu_indices(6, 6, offset=1)
    torch.testing.assert_close(adjsim.pair_distances(q, box), nearest[i, j], rtol=1e-12, atol=1e-12)


def test_energy_is_continuous_at_the_cutoff():
    potential = adjsim.LennardJones(cutoff=2.5)
    inside = potential(torch.tensor([[0.0, 0, 0], [2.5 - 1e-9, 0, 0]]))
    assert abs(float(inside)) < 1e-9


@pytest.mark.parametrize(
    ("box", "cutoff", "says"),
    [
        (
            torch.tensor([4.0, 4.0, 3.0]),
            1.6,
            "half the smallest perpendicular width of the box, 1.5",
        ),
        (torch.tensor([[4.0, 0.0], [3.9, 1.0]]), 0.6, "half the smallest"),
        (torch.tensor([4.0, -1.0]), None, "positive lengths"),
        (torch.zeros(2, 3), None, "shape"),
        (torch.tensor([4.0, 4.0], requires_grad=True), None, "require grad"),
    ],
)
def test_boxes_that_are_refused(box, cutoff, says):
    with pytest.raises(ValueError, match=says):
        adjsim.LennardJones(cutoff=cutoff, box=box)


def test_parameters_that_are_refused():
    with pytest.raises(ValueError, match="sigma must be positive; got -1"):
        adjsim.LennardJones(sigma=-1.0)
    with pytest.raises(ValueError, match="k is NaN"):
        adjsim.Harmonic(k=float("nan"))
    with pytest.raises(ValueError, match="cutoff must be positive"):
        adjsim.LennardJones(cutoff=0.0)


def test_a_float_is_a_buffer_and_a_parameter_stays_one():
    potential = adjsim.LennardJones(1.0, torch.nn.Parameter(torch.tensor(1.0)))
    assert [name for name, _ in potential.named_parameters()] == ["sigma"]
    assert potential.epsilon.dtype == torch.float64
    assert not potential.epsilon.requires_grad
