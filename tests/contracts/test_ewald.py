"""Ewald's sum and particle-mesh Ewald against constants, OpenMM, torch-pme and each other."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ase import Atoms
from numpy.polynomial.legendre import leggauss
from torch import nn
from torch.autograd import forward_ad

import adjsim
from adjsim.io.ase import ASECalculator
from adjsim.potentials.base import force, force_vjp
from adjsim.potentials.charges.ewald import Ewald, ParticleMeshEwald
from adjsim.potentials.charges.ewald.dispersion import LennardJonesMesh
from adjsim.potentials.charges.ewald.excluded import boys, gammas
from adjsim.potentials.products import derivative
from tests.problems import parameter, slow_but
from tests.suites import PotentialContract

LENGTHS = [6.0, 5.5, 6.3]
TILTED = [[6.0, 0.0, 0.0], [1.0, 5.5, 0.0], [-0.8, 1.2, 6.3]]
EXCLUDED = [[0, 1], [2, 1], [7, 3]]
ATOMS = 12
# The constant of OpenMM's units: kJ/mol, nm, elementary charges.
OPENMM = 138.93545764438198


def box_of(tilted: bool) -> torch.Tensor:
    return torch.tensor(TILTED) if tilted else torch.diag(torch.tensor(LENGTHS))


def problem(
    tilted: bool = False, *, atoms: int = ATOMS, neutral: bool = False
) -> tuple[torch.Tensor, torch.Tensor, nn.Parameter]:
    """Draw a cell, positions with the excluded pairs close, and charges."""
    generator = torch.Generator().manual_seed(3)
    draw = torch.rand(atoms, 3, generator=generator, dtype=torch.float64)
    cell = box_of(tilted).double()
    position = draw @ cell
    position[1] = position[0] + torch.tensor([0.3, -0.2, 0.1])
    position[2] = position[1] + torch.tensor([0.1, 0.4, 0.2])
    position[7] = position[3] + torch.tensor([-0.2, 0.1, 0.3])
    charge = torch.randn(atoms, generator=generator, dtype=torch.float64)
    charge = charge - charge.mean() if neutral else charge
    return cell, position, nn.Parameter(charge)


def ewald(tilted: bool = False, **options) -> Ewald:
    cell, _, charge = problem(tilted)
    options = {"cutoff": 2.6, "exclusions": EXCLUDED, "constant": 1.3, "kmax": 5, **options}
    return Ewald(charge, box=cell if tilted else LENGTHS, **options)


def mesh(tilted: bool = False, **options) -> ParticleMeshEwald:
    cell, _, charge = problem(tilted)
    options = {
        "cutoff": 2.6, "exclusions": EXCLUDED, "constant": 1.3, "grid": (12, 11, 14), **options
    }  # fmt: skip
    return ParticleMeshEwald(charge, box=cell if tilted else LENGTHS, **options)


def dispersion(tilted: bool = False, **options) -> LennardJonesMesh:
    cell, _, _ = problem(tilted)
    options = {"cutoff": 2.6, "exclusions": EXCLUDED, "grid": (12, 11, 14), **options}
    return LennardJonesMesh(
        torch.arange(ATOMS) % 3,
        parameter([1.1, 0.4, 0.7]),
        parameter([0.5, 0.6, 0.45]),
        box=cell if tilted else LENGTHS,
        **options,
    )


POTENTIALS = {
    "ewald": (lambda: ewald(), False),
    "ewald, tilted": (lambda: ewald(True), True),
    "mesh": (lambda: mesh(), False),
    "mesh, tilted, even order": (lambda: mesh(True, order=6), True),
    "mesh, no exclusions": (lambda: mesh(exclusions=None), False),
}


@pytest.mark.parametrize(
    ("potential", "position"),
    [
        pytest.param(
            make(),
            problem(tilted)[1],
            id=name,
            marks=pytest.mark.slow if name == "mesh, no exclusions" else (),
        )
        for name, (make, tilted) in POTENTIALS.items()
    ],
)
class TestEwald(PotentialContract):
    pass


@pytest.mark.parametrize(
    "potential",
    [
        pytest.param(dispersion(), marks=pytest.mark.slow),
        pytest.param(dispersion(True, order=6), marks=pytest.mark.marathon),
    ],
)
@pytest.mark.parametrize("position", [problem(True)[1]])
class TestDispersion(PotentialContract):
    pass


def test_the_dispersion_is_that_of_all_images():
    """Sums over images, whose rest falls like the third power of the number of boxes."""
    _, position, _ = problem()
    options = {"exclusions": None, "order": 8}
    energies = [dispersion(alpha=a, grid=64, cutoff=2.74, **options) for a in (1.9, 2.1)]
    charge = energies[0].charges().detach()
    found = []
    for potential in energies:
        # Without the energy in real space, of which the share of Gaussians is added.
        d = position[:, None] - position
        d = d - torch.tensor(LENGTHS) * torch.round(d / torch.tensor(LENGTHS))
        s = (d**2).sum(-1)[*torch.triu_indices(ATOMS, ATOMS, 1)]
        y = potential.alpha**2 * s
        decay = torch.exp(-y) * (1 + y + y * y / 2)
        products = (charge[:, None] * charge)[*torch.triu_indices(ATOMS, ATOMS, 1)]
        near = -(products * decay / s**3)[s < 2.74**2].sum()
        found.append(float((near + potential.beyond(position)).detach()))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    sums = []
    for n in (4, 8):
        shifts = torch.cartesian_prod(*[torch.arange(-n, n + 1.0)] * 3) * torch.tensor(LENGTHS)
        s = ((position[:, None, None] - position[:, None] + shifts) ** 2).sum(-1)
        weight = charge[:, None, None] * charge[:, None] / torch.where(s > 0, s, math.inf) ** 3
        sums.append(-0.5 * float(weight.sum()))
    # Both sums have a rest, in a ratio of the cubes of the numbers of boxes, 9 and 17.
    ratio = (9 / 17) ** 3
    limit = (sums[1] - ratio * sums[0]) / (1 - ratio)
    assert found[1] == pytest.approx(limit, rel=1e-6)


def test_integrals_of_excluded_dispersion():
    x, weight = (torch.from_numpy(a) for a in leggauss(40))
    t = (x + 1) / 2
    y = torch.tensor([0.0, 1e-8, 0.3, 0.999999, 1.0, 1.5, 6.0, 20.0])
    for n, value in zip((2, 3, 4), gammas(y), strict=True):
        expected = (weight / 2 * t**n * torch.exp(-y[:, None] * t)).sum(-1)
        torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)


SUMS = [ewald, mesh]


def crystal(points: list[list[float]], charges: list[float], side: float, cells: int):
    """Repeat a cubic cell, whose points are in units of its side."""
    steps = torch.arange(cells, dtype=torch.float64)
    shifts = torch.cartesian_prod(steps, steps, steps)
    position = (shifts[:, None] + torch.tensor(points, dtype=torch.float64)).reshape(-1, 3)
    return side * position, torch.tensor(charges, dtype=torch.float64).repeat(len(shifts))


FACES = [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]
SALTS = {
    # Of the distance of the nearest neighbours: Borwein et al., J. Math. Phys. 26, 2999 (1985);
    # Sakamoto, J. Chem. Phys. 28, 164 (1958).
    "NaCl": (
        FACES + [[x + 0.5, y, z] for x, y, z in FACES], [1.0] * 4 + [-1.0] * 4, 0.5,
        1.747564594633182,
    ),
    "CsCl": ([[0.0] * 3, [0.5] * 3], [1.0, -1.0], math.sqrt(0.75), 1.762674773070988),
}  # fmt: skip


@pytest.mark.parametrize("salt", list(SALTS))
@pytest.mark.parametrize(
    ("make", "options"),
    [(Ewald, {"kmax": 13}), (ParticleMeshEwald, {"grid": 40, "order": 10})],
    ids=["ewald", "mesh"],
)
def test_madelung(salt, make, options):
    points, charges, nearest, madelung = SALTS[salt]
    position, charge = crystal(points, charges, 2.6, 2)
    # Shifted off the points of the mesh. With this alpha erfc is 1e-14 at the cutoff.
    potential = make(charge, box=[5.2] * 3, cutoff=2.6, alpha=5.5 / 2.6, **options)
    energy = 2.6 * float(potential(position + 0.123)) / (len(charge) / 2)
    # The Gaussian of the first wave left out is exp(-(pi 14 / (2 5.5))^2) = 1e-7 of the largest,
    # times a sum that vanishes for most waves of a crystal; the mesh interpolates to 1e-8.
    assert -energy * nearest == pytest.approx(madelung, rel=1e-7)


@pytest.mark.parametrize("tilted", [False, True])
@pytest.mark.parametrize("neutral", [True, False], ids=["neutral", "charged"])
def test_energy_does_not_depend_on_the_splitting(tilted, neutral):
    cell, position, charge = problem(tilted, neutral=neutral)
    options = {"box": cell, "cutoff": 2.6, "exclusions": EXCLUDED}
    energies = [
        float(make(charge, alpha=alpha, **options, **more)(position).detach())
        for alpha in (1.7, 1.9)
        for make, more in ((Ewald, {"kmax": 17}), (ParticleMeshEwald, {"grid": 50, "order": 8}))
    ]
    # erfc(1.7 2.6) = 4e-10 of a pair at the cutoff, and exp(-(pi 18 / (1.9 6.3))^2) = 2e-10 of
    # the waves, are left out; the mesh interpolates to 1e-7.
    assert energies[2] == pytest.approx(energies[0], rel=1e-8)
    assert energies[1] == pytest.approx(energies[0], rel=1e-6)
    assert energies[3] == pytest.approx(energies[0], rel=1e-6)


@pytest.mark.parametrize("make", [Ewald, ParticleMeshEwald])
@pytest.mark.parametrize("tolerance", [5e-4, 1e-5])
def test_the_tolerance_bounds_the_error_of_forces(make, tolerance):
    _, position, charge = problem(neutral=True)
    options = {"box": LENGTHS, "cutoff": 2.6}
    exact = Ewald(charge, alpha=2.0, kmax=14, **options).force(position)
    found = make(charge, tolerance=tolerance, **options).force(position)
    # The formulas are estimates for the root mean square error, so the bound has a factor.
    error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert float(error.detach()) < 3 * tolerance


def openmm_state(method, position, charge, cell, cutoff, exclusions, tolerance=5e-4, mesh=None):
    """Evaluate the energy and force on OpenMM's Reference platform, and its mesh."""
    openmm = pytest.importorskip("openmm")
    system, nonbonded = openmm.System(), openmm.NonbondedForce()
    for q in charge.tolist():
        system.addParticle(1.0)
        nonbonded.addParticle(q, 1.0, 0.0)
    for i, j in exclusions:
        nonbonded.addException(i, j, 0.0, 1.0, 0.0)
    nonbonded.setNonbondedMethod(getattr(openmm.NonbondedForce, method))
    nonbonded.setCutoffDistance(cutoff)
    nonbonded.setEwaldErrorTolerance(tolerance)
    nonbonded.setExceptionsUsePeriodicBoundaryConditions(True)
    if mesh is not None:
        nonbonded.setPMEParameters(*mesh)
    system.setDefaultPeriodicBoxVectors(*cell.tolist())
    system.addForce(nonbonded)
    context = openmm.Context(
        system, openmm.VerletIntegrator(0.001), openmm.Platform.getPlatformByName("Reference")
    )
    context.setPositions(position.tolist())
    state = context.getState(getEnergy=True, getForces=True)
    size = nonbonded.getPMEParametersInContext(context) if method == "PME" else None
    return state.getPotentialEnergy()._value, torch.tensor(state.getForces(True)._value), size


@pytest.mark.parametrize("neutral", [True, False], ids=["neutral", "charged"])
@pytest.mark.parametrize("tolerance", [5e-4, 1e-5])
def test_ewald_equals_openmm(neutral, tolerance):
    cell, position, charge = problem(neutral=neutral)
    energy, forces, _ = openmm_state(
        "Ewald", position, charge, cell, 2.6, EXCLUDED, tolerance=tolerance
    )
    potential = Ewald(
        charge, box=LENGTHS, cutoff=2.6, tolerance=tolerance, exclusions=EXCLUDED, constant=OPENMM
    )
    # The same numbers of waves are chosen, so the two differ by rounding alone.
    assert float(potential(position).detach()) == pytest.approx(energy, rel=1e-11)
    torch.testing.assert_close(potential.force(position).detach(), forces, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tilted", [False, True])
@pytest.mark.parametrize("size", [None, (1.4, 20, 21, 17), (1.1, 12, 12, 12)])
def test_mesh_equals_openmm(tilted, size):
    cell, position, charge = problem(tilted)
    energy, forces, used = openmm_state("PME", position, charge, cell, 2.6, EXCLUDED, mesh=size)
    options = {"box": cell, "cutoff": 2.6, "exclusions": EXCLUDED, "constant": OPENMM}
    potential = ParticleMeshEwald(charge, alpha=used[0], grid=used[1:], **options)
    assert float(potential(position).detach()) == pytest.approx(energy, rel=1e-11)
    torch.testing.assert_close(potential.force(position).detach(), forces, rtol=1e-9, atol=1e-9)
    chosen = ParticleMeshEwald(charge, **options)
    if size is None and not tilted:
        assert (chosen.alpha, *chosen.grid) == pytest.approx(tuple(used))
    # Of a mesh with the default tolerance 5e-4.
    assert float(chosen(position).detach()) == pytest.approx(energy, rel=5e-3)


def test_against_torch_pme():
    torchpme = pytest.importorskip("torchpme")
    cell, position, charge = problem(True, neutral=True)
    alpha, cutoff = 1.5, 2.6
    d = position[:, None] - position
    shifts = torch.cartesian_prod(*[torch.arange(-2.0, 3.0)] * 3) @ cell
    r = (d[:, :, None] + shifts).norm(dim=-1)
    i, j, s = torch.nonzero((r < cutoff) & (r > 0), as_tuple=True)
    half = (i < j) | ((i == j) & (s > 62))
    i, j, s = i[half], j[half], s[half]
    smooth = torchpme.CoulombPotential(smearing=1 / (math.sqrt(2) * alpha))
    calculators = {
        # Its waves end at k = 24, where exp(-k^2 / 4 alpha^2) is 1e-28.
        1e-8: torchpme.EwaldCalculator(smooth, lr_wavelength=2 * math.pi / 24),
        # Its mesh interpolates by polynomials of degree 6.
        1e-4: torchpme.PMECalculator(smooth, mesh_spacing=0.1, interpolation_nodes=7),
    }
    options = {"box": cell, "cutoff": cutoff, "alpha": alpha}
    mine = {
        1e-8: Ewald(charge, kmax=14, **options),
        1e-4: ParticleMeshEwald(charge, grid=64, order=7, **options),
    }
    for tolerance, calculator in calculators.items():
        found = calculator.double()(
            charge.detach()[:, None], cell, position,
            neighbor_indices=torch.stack([i, j], 1), neighbor_distances=r[i, j, s],
        )  # fmt: skip
        theirs = float((found * charge.detach()[:, None]).sum())
        assert theirs == pytest.approx(float(mine[tolerance](position).detach()), rel=tolerance)


@pytest.mark.parametrize("make", SUMS)
def test_gradient_of_charges_against_differences(make):
    potential, (_, position, charge) = make(), problem()
    v = torch.randn(ATOMS)
    (found,) = torch.autograd.grad(potential(position), potential.charge)
    h = 1e-5
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            potential.charge.copy_(charge + sign * h * v)
            values.append(float(potential(position)))
    # The energy is quadratic in the charges, so differences have rounding errors alone.
    assert float(found @ v) == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-8)


@pytest.mark.parametrize("make", SUMS)
@pytest.mark.parametrize("tilted", [False, True])
def test_virial_is_minus_the_derivative_with_respect_to_strain(make, tilted):
    cell, position, charge = problem(tilted)
    potential, h = make(tilted), 1e-5
    size = {"kmax": 5} if make is ewald else {"grid": (12, 11, 14)}

    def strained(strain):
        with torch.no_grad():
            return type(potential)(
                charge, box=cell @ strain, cutoff=2.6, alpha=potential.alpha, exclusions=EXCLUDED,
                constant=1.3, **size,
            )(position @ strain)  # fmt: skip

    found = potential.virial(position).detach()
    for a, b in ((0, 0), (1, 1), (0, 2), (2, 1)):
        step = torch.zeros(3, 3)
        step[a, b] = h
        slope = (strained(torch.eye(3) + step) - strained(torch.eye(3) - step)) / (2 * h)
        # Differences have an error of h^2 times the third derivative.
        assert float(found[a, b]) == pytest.approx(-float(slope), rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("make", SUMS)
@pytest.mark.parametrize("tilted", [False, True])
def test_pressure_and_cells_of_ase_see_the_box(make, tilted):
    cell, position, _ = problem(tilted)
    potential = make(tilted)
    dynamics = adjsim.Hamiltonian(potential)
    state = dynamics.init(position, torch.zeros_like(position))
    volume = float(torch.linalg.det(cell if cell.ndim == 2 else torch.diag(cell)))
    expected = float(potential.virial(position).diagonal().sum().detach()) / (3 * volume)
    assert float(adjsim.pressure(dynamics, state).detach()) == pytest.approx(expected, rel=1e-12)
    rows = (cell if cell.ndim == 2 else torch.diag(cell)).numpy()
    atoms = Atoms(f"Ar{ATOMS}", position.numpy(), cell=rows, pbc=True)
    atoms.calc = ASECalculator(potential)
    assert atoms.get_potential_energy() == pytest.approx(
        float(potential(position).detach()), rel=1e-12
    )
    other = Atoms(f"Ar{ATOMS}", position.numpy(), cell=1.5 * rows, pbc=True)
    other.calc = ASECalculator(potential)
    with pytest.raises(ValueError, match="cell of the atoms"):
        other.get_potential_energy()


@pytest.mark.parametrize("make", SUMS)
def test_batches_are_systems(make):
    potential, (_, position, _) = make(), problem()
    batch = position + 0.1 * torch.randn(2, 3, ATOMS, 3)
    assert potential(batch).shape == (2, 3)
    assert potential.virial(batch).shape == (2, 3, 3, 3)
    v = torch.randn_like(batch)
    forces, pullback = force_vjp(potential, batch, [potential.charge])
    along, rest = pullback(v)
    total = torch.zeros(ATOMS)
    for k in ((0, 0), (1, 2)):
        torch.testing.assert_close(force(potential, batch[k]), forces[k], rtol=1e-12, atol=1e-12)
    for k in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        _, product = force_vjp(potential, batch[k[0], k[1]], [potential.charge])
        there, more = product(v[k[0], k[1]])
        torch.testing.assert_close(there, along[k[0], k[1]], rtol=1e-12, atol=1e-12)
        total = total + more.gradient([potential.charge])[0]
    torch.testing.assert_close(rest.gradient([potential.charge])[0], total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", SUMS)
def test_positions_may_leave_the_box(make):
    potential, (cell, position, _) = make(True), problem(True)
    turns = torch.randint(-3, 4, (ATOMS, 3)).double()
    moved = position + turns @ cell
    there, here = (float(potential(x).detach()) for x in (moved, position))
    assert there == pytest.approx(here, rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("make", SUMS)
def test_an_excluded_pair_alone_has_the_energy_of_its_images(make):
    """Without the excluded pair, two charges act on each other's images alone."""
    charge = nn.Parameter(torch.tensor([1.0, -1.0]))
    options = {"box": [8.0] * 3, "cutoff": 2.6, "alpha": 1.9}
    options |= {"kmax": 22} if make is ewald else {"grid": 48, "order": 8}
    kind = Ewald if make is ewald else ParticleMeshEwald
    position = torch.tensor([[1.0, 2.0, 3.0], [1.7, 2.4, 3.3]])
    r = float((position[0] - position[1]).norm())
    with_pair = float(kind(charge, **options)(position).detach())
    without = float(kind(charge, exclusions=[[1, 0]], **options)(position).detach())
    # The waves leave out exp(-(pi 23 / (1.9 8))^2) = 2e-10; the mesh interpolates to 1e-7.
    assert without - with_pair == pytest.approx(1 / r, rel=1e-6)


@pytest.mark.parametrize("make", SUMS)
def test_excluded_atoms_may_be_at_one_place(make):
    potential, (_, position, _) = make(), problem()
    near, there = position.clone(), position.clone()
    there[1] = there[0]
    near[1] = near[0] + 1e-7
    value, pullback = force_vjp(potential, there, [potential.charge])
    along, _ = pullback(torch.randn_like(there))
    assert bool(torch.isfinite(along).all())
    # The force is smooth: it changes by the distance times its derivative.
    torch.testing.assert_close(force(potential, near).detach(), value, rtol=1e-5, atol=1e-5)


def test_functions_of_boys():
    x = torch.tensor([0.0, 1e-12, 0.3, 0.999999, 1.0, 1.000001, 4.0, 40.0])
    t, w = (torch.as_tensor(a) for a in leggauss(60))
    t = 0.5 * (t + 1)
    for n, found in enumerate(boys(x)):
        expected = (0.5 * w * t ** (2 * n) * torch.exp(-x[:, None] * t * t)).sum(-1)
        # Upward recursion from F_0 loses about a digit at x = 1.
        torch.testing.assert_close(found, expected, rtol=3e-14, atol=0)
    y = x.requires_grad_()
    (slope,) = torch.autograd.grad(boys(y)[1].sum(), y)
    torch.testing.assert_close(slope, -boys(x)[2], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("make", SUMS)
def test_derivatives_of_any_order(make):
    potential, (_, position, _) = make(), problem()
    q = position.clone().requires_grad_()
    v = torch.randn_like(q)

    def product(x):
        (found,) = torch.autograd.grad(force(potential, x), x, v, create_graph=True)
        return found

    (third,) = torch.autograd.grad((product(q) * v).sum(), q)
    h = 1e-5
    w = torch.randn_like(q)
    values = [
        float((product((position + sign * h * w).requires_grad_()) * v).sum().detach())
        for sign in (1, -1)
    ]
    # The third derivative of the spline of order 5 is continuous, its fourth is not: an error of h.
    assert float((third * w).sum()) == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-3)
    torch.testing.assert_close(
        torch.func.grad(lambda x: potential(x))(position).detach(),
        derivative(potential, position).detach(),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("make", SUMS)
def test_backward_passes_of_rows_and_in_forward_mode(make):
    """They are linear in the cotangent, so the derivative along w is the pass of w."""
    potential, (_, position, _) = make(), problem()
    q = position.clone().requires_grad_()
    found, wanted = force(potential, q), [q, *potential.parameters()]
    rows = torch.randn(2, 3, *found.shape, generator=torch.Generator().manual_seed(1)).double()

    def pull(row):
        return torch.autograd.grad(found, wanted, row, retain_graph=True)

    def pull_hidden(rows):
        return torch.autograd.grad(found, wanted, rows, is_grads_batched=True, retain_graph=True)

    v, w = rows[0, :2]
    with forward_ad.dual_level():
        dual = [forward_ad.unpack_dual(x).tangent for x in pull(forward_ad.make_dual(v, w))]
    for moved in (dual, torch.func.jvp(pull, (v,), (w,))[1]):
        for x, y in zip(moved, pull(w), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    # Hidden by both: torch.vmap over the first axis, and is_grads_batched over the second.
    for x, y in zip(torch.vmap(pull_hidden)(rows), pull(rows[1, 2]), strict=True):
        torch.testing.assert_close(x[1, 2], y, rtol=1e-12, atol=1e-12)


def trajectory(kind, adjoint, exact=False, steps=20, **options):
    """Run molten salt, and differentiate with respect to charges and a repulsion."""
    steps_of = torch.arange(2.0)
    position = 2.4 * torch.cartesian_prod(steps_of, steps_of, steps_of)
    generator = torch.Generator().manual_seed(1)
    position = position + 0.1 * torch.randn(8, 3, generator=generator, dtype=torch.float64)
    charge = nn.Parameter(0.5 * (1 - 2.0 * (torch.arange(8) % 2)))
    size = {"kmax": 3} if kind is Ewald else {"grid": 8}
    salt = kind(charge, box=[5.2] * 3, cutoff=2.6, exclusions=[[0, 3]], **size)
    potential = salt + adjsim.SoftSphere(parameter(0.2), 2.0, 8.0, cutoff=2.6, box=[5.2] * 3)
    dynamics = adjsim.Langevin(potential, 1.0, 0.3, 1.0)
    ts = torch.tensor([0.0, steps * 0.005])
    run = adjsim.simulate(
        dynamics, dynamics.init(position, torch.zeros(8, 3)), ts,
        solver=adjsim.Splitting("BAOAB", 0.005, exact=exact), adjoint=adjoint, generator=2,
        **options,
    )  # fmt: skip
    (run.position[-1] ** 3).sum().backward()
    assert charge.grad is not None
    return run, charge.grad


@pytest.mark.parametrize(
    ("exact", "kind"),
    slow_but(
        lambda exact, kind: exact == (kind is ParticleMeshEwald),
        itertools.product((False, True), (Ewald, ParticleMeshEwald)),
    ),
)
def test_adjoints_agree(kind, exact):
    _, expected = trajectory(kind, adjsim.DirectAdjoint(), exact)
    _, stored = trajectory(kind, adjsim.CheckpointAdjoint(), exact)
    run, found = trajectory(kind, adjsim.ReversibleAdjoint(), exact)
    scale = float(expected.abs().max())
    torch.testing.assert_close(stored, expected, rtol=1e-12, atol=1e-12 * scale)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * scale)
    if exact:
        assert run.stats["reconstruction_error"] == 0


@pytest.mark.slow
def test_a_compiled_run_has_the_same_bits():
    """Torch evaluates the mesh, with its Fourier transforms."""
    run, expected = trajectory(ParticleMeshEwald, adjsim.ReversibleAdjoint(), True, steps=5)
    compiled, found = trajectory(
        ParticleMeshEwald, adjsim.ReversibleAdjoint(), True, steps=5, compile=True
    )
    assert "mesh_force" in compiled.stats["compiled_forward"]
    assert torch.equal(compiled.position, run.position)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("make", SUMS)
def test_charges_are_one_parameter(make):
    potential, (_, position, _) = make(), problem()
    assert [name for name, _ in potential.named_parameters()] == ["charge"]
    doubled = nn.Parameter(2 * potential.charge.detach())
    before = float(potential(position).detach())
    swapped = torch.func.functional_call(potential, {"charge": doubled}, (position,))
    assert float(swapped.detach()) == pytest.approx(4 * before, rel=1e-12)
    potential.charge = doubled
    # The energy is quadratic in the charges, and no part keeps the former ones.
    assert float(potential(position).detach()) == pytest.approx(4 * before, rel=1e-12)


BAD = [
    (lambda: Ewald([1.0, -1.0], box=None, cutoff=1.0), "Ewald needs a box"),
    (lambda: ParticleMeshEwald([1.0], box=[3.0] * 3, cutoff=None), "needs a cutoff"),
    (lambda: Ewald([1.0], box=[3.0] * 3, cutoff=1.6), "above half the smallest"),
    (lambda: Ewald([1.0], box=[3.0] * 3, cutoff=0.0), "cutoff must be positive"),
    (lambda: Ewald([1.0], box=[3.0] * 3, cutoff=1.0, tolerance=0.5), r"between 0 and 0.5; got 0.5"),
    (lambda: Ewald([1.0], box=[3.0] * 3, cutoff=1.0, tolerance=0.0), "between 0 and 0.5"),
    (lambda: Ewald([1.0], box=[3.0] * 3, cutoff=1.0, alpha=-1.0), "alpha must be positive"),
    (lambda: Ewald([1.0], box=[3.0] * 2, cutoff=1.0), "for three dimensions; box has 2"),
    (lambda: Ewald([[1.0]], box=[3.0] * 3, cutoff=1.0), r"charge must be \(atoms,\)"),
    (lambda: Ewald([1.0], box=[3.0] * 3, cutoff=1.0, kmax=[3, 3]), "kmax must be"),
    (lambda: ParticleMeshEwald([1.0], box=[3.0] * 3, cutoff=1.0, grid=4), "of at least 5"),
    (lambda: ParticleMeshEwald([1.0], box=[3.0] * 3, cutoff=1.0, order=3), "from 4 to 10"),
    (lambda: ewald()(torch.zeros(3, 3)), "charge is for 12 atoms"),
    (lambda: mesh().force(torch.zeros(12, 2)), "in three dimensions"),
    (lambda: ewald(exclusions=[[0, 40]]), "name atom 40, and the potential is for 12 atoms"),
]  # fmt: skip


def test_charges_have_no_species():
    for kind in (Ewald, ParticleMeshEwald):
        with pytest.raises(TypeError, match="takes no species"):
            kind([1.0, -1.0], box=[3.0] * 3, cutoff=1.0, species=[0, 1])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "message"), BAD, ids=[m for _, m in BAD])
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_operators_of_a_mesh_return_the_strides_that_they_declare():
    """Compilers may lay out positions by columns, and rely on the strides of results."""
    potential, (_, position, charge) = mesh(), problem()
    position, charge = position.T.contiguous().T, charge.detach()
    sums = potential.reciprocal(position)
    sizes = sums.to_mesh, list(sums.shape), sums.order
    force, product = torch.ops.adjsim.mesh_force, torch.ops.adjsim.mesh_product
    given = position, charge, sums.influence(), *sizes
    _, _, *kept = force(*given)
    for operator, args in (
        (force, given),
        (product, (position, charge, *kept, torch.ones_like(position), sums.influence(), *sizes)),
    ):
        torch.library.opcheck(operator.default, args, test_utils="test_faketensor")


class OfForces(nn.Module):
    """An energy that is made of forces, so that its force is made of their derivatives."""

    def __init__(self, potential):
        super().__init__()
        self.potential = potential

    def forward(self, position):
        weight = torch.sin(3 * position.detach() + 1)
        return (self.potential.force(position) * weight).sum((-1, -2))


@pytest.mark.marathon
def test_compiled_energies_of_forces():
    potential, position = OfForces(mesh()), problem()[1].detach()

    def end(compile):
        q = position.clone().requires_grad_()
        dynamics = adjsim.Hamiltonian(potential)
        run = adjsim.simulate(
            dynamics, dynamics.init(q, torch.zeros_like(q)), [0.0, 0.02],
            solver=adjsim.VelocityVerlet(0.01), compile=compile,
        )  # fmt: skip
        return torch.autograd.grad(run.final.position.square().sum(), q)[0]

    torch.testing.assert_close(end(True), end(False), rtol=1e-10, atol=1e-12)
