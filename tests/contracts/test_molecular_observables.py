"""Observables of molecules, against plain formulas, and their gradients against differences."""

from __future__ import annotations

import itertools
import math
from functools import partial

import ase
import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from scipy.special import i0
from torch.autograd import gradcheck as every_entry, gradgradcheck as every_second
from torch.fx.experimental.proxy_tensor import make_fx

import adjsim
from tests.problems import slow_but

# Along random directions, which takes a tenth of the time of all entries.
gradcheck, gradgradcheck = (
    partial(every_entry, fast_mode=True),
    partial(every_second, fast_mode=True),
)
PAIRS = [[0, 3], [1, 4], [5, 2]]
TORSIONS = [[0, 1, 2, 3], [2, 3, 4, 5]]
EDGES = torch.linspace(0.0, 4.0, 6, dtype=torch.float64)
TURNS = torch.linspace(-3.1, 3.1, 6, dtype=torch.float64)
GROUPS = [0, 0, 1, 1, 2, -1]
BOX = [5.1, 5.3, 5.6]
TILTED = [[5.2, 0.0, 0.0], [0.7, 5.3, 0.0], [-0.4, 0.6, 5.4]]
MASSES = [1.0, 2.5, 0.4, 1.3, 0.7, 3.0]
CHARGES = [0.4, -0.3, 0.2, -0.5, 0.1, 0.1]


def molecule(*batch, atoms=6, dim=3, seed=0):
    """A random walk, of which no three atoms are near a line."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, atoms, dim, generator=generator).cumsum(-2)


def turn(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(3, 3, generator=generator))[0]


def proper(seed=1):
    rotation = turn(seed)
    return rotation * torch.linalg.det(rotation)


def masses():
    return torch.tensor(MASSES)


OTHER = molecule(seed=2).double().tolist()


def bonds(q, box=None):
    return adjsim.hydrogen_bonds(
        q,
        [[0, 1], [3, 2]],
        [0, 4, 5],
        distance=2.4,
        width=0.5,
        angle=0.9,
        angular_width=0.3,
        box=box,
    )


OBSERVABLES = {
    "rmsd": lambda q: adjsim.rmsd(q, OTHER, weights=MASSES),
    "rmsd in place": lambda q: adjsim.rmsd(q, OTHER, align=False),
    "squared deviation": lambda q: adjsim.mean_squared_deviation(q, OTHER, weights=MASSES),
    "squared deviation in place": lambda q: adjsim.mean_squared_deviation(q, OTHER, align=False),
    "aligned": lambda q: adjsim.aligned(q, OTHER),
    "distance rmsd": lambda q: adjsim.distance_rmsd(q, OTHER),
    "distance rmsd of pairs": lambda q: adjsim.distance_rmsd(q, OTHER, PAIRS, box=BOX),
    "ends": adjsim.end_to_end_distance,
    "dihedrals": lambda q: adjsim.dihedrals(q, TORSIONS),
    "dihedrals in a box": lambda q: adjsim.dihedrals(q, TORSIONS, TILTED),
    "dihedral distribution": lambda q: adjsim.dihedral_distribution(
        adjsim.dihedrals(q, TORSIONS), [-3.0, 0.4, 2.0], width=0.6
    ),
    "ramachandran": lambda q: adjsim.ramachandran(
        adjsim.dihedrals(q, TORSIONS), adjsim.dihedrals(q, TORSIONS[::-1]), [-2.0, 0.9], width=0.7
    ),
    "contacts": lambda q: adjsim.contacts(q, PAIRS, 2.0, width=0.4, box=BOX),
    "native contacts": lambda q: adjsim.native_contacts(q, OTHER, PAIRS, width=0.4, tolerance=1.2),
    "hydrogen bonds": bonds,
    "hydrogen bonds in a box": lambda q: bonds(q, TILTED),
    "principal moments": lambda q: adjsim.principal_moments(q, MASSES),
    "gyration tensor": adjsim.gyration_tensor,
    "straightness": lambda q: adjsim.straightness(q, MASSES),
    "dipole": lambda q: adjsim.dipole(q, CHARGES),
    "residues": lambda q: adjsim.residue_distances(q, GROUPS, mass=MASSES),
    "residues in a box": lambda q: adjsim.residue_distances(0.5 * q, GROUPS, box=BOX),
    "closest": lambda q: adjsim.closest_distances(q, GROUPS, width=0.3),
    "closest in a box": lambda q: adjsim.closest_distances(q, GROUPS, width=0.3, box=TILTED),
}


@pytest.mark.parametrize("name", OBSERVABLES)
def test_gradients_batches_and_single_precision(name):
    observable, q = OBSERVABLES[name], molecule(2)
    value = observable(q)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(value.shape, generator=generator)
    direction = torch.randn(q.shape, generator=generator)
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad((observable(leaf) * weight).sum(), leaf)
    h = 1e-5
    up, down = ((observable(q + s * h * direction) * weight).sum() for s in (1, -1))
    # The truncation is h^2/6 times a third derivative of some thousand.
    slope = (grad * direction).sum()
    torch.testing.assert_close(slope, (up - down) / (2 * h), rtol=1e-6, atol=1e-7)
    for i in range(2):
        torch.testing.assert_close(observable(q[i]), value[i], rtol=1e-12, atol=1e-13)
    mapped = torch.func.vmap(observable)(q)
    torch.testing.assert_close(mapped, value, rtol=1e-12, atol=1e-13)
    single = observable(q.float())
    assert single.dtype == torch.float32
    # Rounding errors of 1e-7 in positions of size 3, divided by widths of 0.3 and distances of 0.5.
    torch.testing.assert_close(single.double(), value, rtol=1e-4, atol=1e-4)


# The nearest images of tilted boxes are long recordings.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.marathon if "in a box" in name else pytest.mark.slow)
        for name in OBSERVABLES
    ],
)
def test_recorded_for_compilation(name):
    """Value and gradient, recorded at one position, are those at another one."""
    observable = OBSERVABLES[name]

    def both(q):
        leaf = q.detach().requires_grad_()
        value = observable(leaf)
        return value, torch.autograd.grad((value * value).sum(), leaf)[0]

    recorded, q = make_fx(both)(molecule(seed=3)), molecule()
    for found, known in zip(recorded(q), both(q), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-11, atol=1e-11)


# --- superposition ---


def scipy_rmsd(x, y, w):
    x, y, w = x.numpy(), y.numpy(), w.numpy() / w.numpy().sum()
    x, y = x - w @ x, y - w @ y
    return Rotation.align_vectors(y, x, weights=w)[1] / math.sqrt(w.sum()), (x, y, w)


@pytest.mark.parametrize("seed", range(4))
def test_rmsd_and_alignment_are_those_of_scipy(seed):
    q, y, w = molecule(seed=seed), molecule(seed=seed + 10), masses()
    if seed % 2:
        y = y * torch.tensor([1.0, 1.0, -1.0])
    known, (x, centred, share) = scipy_rmsd(q, y, w)
    assert float(adjsim.rmsd(q, y, weights=w)) == pytest.approx(known, rel=1e-12)
    rotation = Rotation.align_vectors(centred, x, weights=share)[0]
    expected = torch.as_tensor(rotation.apply(x)) + (w @ y) / w.sum()
    found = adjsim.aligned(q, y, weights=w)
    # SciPy finds the rotation to the root of this precision in its own sum.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    moved = adjsim.rmsd(found, y, weights=w, align=False)
    assert float(moved) == pytest.approx(known, rel=1e-12)
    plain = ((q - y) ** 2).sum(-1).mean().sqrt()
    assert float(adjsim.rmsd(q, y, align=False)) == pytest.approx(float(plain), rel=1e-14)


def test_rmsd_in_two_dimensions_and_one():
    q, y = molecule(dim=2), molecule(dim=2, seed=3)
    angles = torch.linspace(0, 2 * math.pi, 100_001)
    x, z = q - q.mean(0), y - y.mean(0)
    c, s = angles.cos(), angles.sin()
    along, across = (x * z).sum(), (x[:, 0] * z[:, 1] - x[:, 1] * z[:, 0]).sum()
    best = ((x**2).sum() + (z**2).sum() - 2 * (c * along + s * across).max()) / 6
    # The largest of 1e5 angles misses the maximum by the square of 3e-5.
    assert float(adjsim.rmsd(q, y)) == pytest.approx(math.sqrt(float(best)), rel=1e-8)
    # Proper rotations of a line are none.
    line = q[:, :1]
    expected = ((line - line.mean(0)) - (z[:, :1] - z[:, :1].mean(0))).square().mean().sqrt()
    assert float(adjsim.rmsd(line, y[:, :1])) == pytest.approx(float(expected), rel=1e-13)
    mirrored = adjsim.rmsd(line, -line)
    assert float(mirrored) == pytest.approx(2 * float((line - line.mean(0)).square().mean().sqrt()))
    for dim in (1, 2, 4):
        leaf = molecule(dim=dim).requires_grad_()
        other = molecule(dim=dim, seed=3)
        assert gradcheck(lambda q, y=other: adjsim.rmsd(q, y), leaf, rtol=1e-6, atol=1e-8)
        assert gradcheck(lambda q, y=other: adjsim.aligned(q, y), leaf, rtol=1e-6, atol=1e-8)


SUPERPOSITIONS = {
    "rmsd": lambda q, y, w: adjsim.rmsd(q, y, weights=w),
    "aligned": lambda q, y, w: adjsim.aligned(q, y, weights=w)[:2],
}


def superposed():
    """A position, a reference and weights."""
    return molecule(atoms=4), molecule(atoms=4, seed=2), masses()[:4]


@pytest.mark.parametrize("name", SUPERPOSITIONS)
def test_first_and_second_derivatives_of_a_superposition(name):
    inputs = [x.requires_grad_() for x in superposed()]
    assert gradcheck(SUPERPOSITIONS[name], inputs, rtol=1e-6, atol=1e-8)
    assert gradgradcheck(SUPERPOSITIONS[name], inputs, rtol=1e-6, atol=1e-7)


# The first use of forward mode takes seconds.
@pytest.mark.slow
@pytest.mark.parametrize("name", SUPERPOSITIONS)
@pytest.mark.parametrize("shape", ["random", "linear"])
def test_forward_mode_is_as_backward(name, shape):
    q, y, w = superposed()
    inputs = (q, y, w) if shape == "random" else (SHAPES["linear"](q), SHAPES["linear"](y), w)
    tangents = (molecule(atoms=4, seed=5), molecule(atoms=4, seed=6), masses()[2:])
    value, forward = torch.func.jvp(SUPERPOSITIONS[name], inputs, tangents)
    leaves = [x.clone().requires_grad_() for x in inputs]
    grads = torch.autograd.grad(SUPERPOSITIONS[name](*leaves).sum(), leaves)
    known = sum((g * v).sum() for g, v in zip(grads, tangents, strict=True))
    assert value.shape == forward.shape
    torch.testing.assert_close(forward.sum(), known, rtol=1e-12, atol=1e-13)


SHAPES = {
    "planar": lambda q: q * torch.tensor([1.0, 1.0, 0.0]),
    "linear": lambda q: q * torch.tensor([1.0, 0.0, 0.0]),
    "octahedron": lambda q: torch.cat([torch.eye(3), -torch.eye(3)]),
    "one place": lambda q: torch.zeros_like(q),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("other", SHAPES)
def test_the_gradient_of_degenerate_rotations(shape, other):
    """Everywhere finite; right but for the kinks, where it is the mean of the two sides."""
    q, y = SHAPES[shape](molecule()), 1.3 * SHAPES[other](molecule(seed=4))
    leaf = q.clone().requires_grad_()
    value = adjsim.rmsd(leaf, y)
    number = float(value.detach())
    (grad,) = torch.autograd.grad(value, leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), leaf, allow_unused=True)
    assert second is None or bool(second.isfinite().all())
    turned = adjsim.aligned(leaf, y)
    (slope,) = torch.autograd.grad(turned.square().sum() + turned.sum(), leaf)
    assert bool(slope.isfinite().all())
    found = float(adjsim.rmsd(turned.detach(), y, align=False))
    assert found == pytest.approx(number, abs=1e-14)
    if number == 0:
        assert torch.equal(grad, torch.zeros_like(grad))
        return
    if (shape, other) == ("one place", "octahedron"):
        return  # The two sides of this kink have different slopes in every rotation.
    h, direction = 1e-5, molecule(seed=5)
    up, down = (adjsim.rmsd(q + s * h * direction, y) for s in (1, -1))
    expected = float((up - down) / (2 * h))
    # The truncation is h^2 = 1e-10 times a third derivative of some hundred. At a kink it is h.
    kink = shape == "one place" or (shape == "linear" and other in ("planar", "octahedron"))
    precision = 10 * h if kink else 1e-6
    assert float((grad.detach() * direction).sum()) == pytest.approx(
        expected, rel=precision, abs=precision
    )


def test_symmetric_molecules_and_their_own_mirror_image():
    """Equal singular values, distorted: of an octahedron, and of a mirrored random one."""
    octahedron = SHAPES["octahedron"](None)
    for y in (octahedron, 2 * octahedron, molecule() * torch.tensor([1.0, 1.0, -1.0])):
        q = (octahedron @ proper() + 0.3 * molecule(seed=6)).requires_grad_()
        assert gradcheck(lambda q, y=y: adjsim.rmsd(q, y), q, rtol=1e-6, atol=1e-8)


def test_rmsd_of_a_turned_molecule_is_zero_without_a_gradient():
    q = molecule()
    moved = (q @ proper() + 40.0).requires_grad_()
    value = adjsim.rmsd(moved, q)
    assert float(value.detach()) == 0
    assert torch.equal(torch.autograd.grad(value, moved)[0], torch.zeros_like(q))
    in_place = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(adjsim.rmsd(in_place, q, align=False), in_place)
    assert torch.equal(grad, torch.zeros_like(q))
    # A displacement of 1e-9 is no rounding error.
    moved = q.clone()
    moved[0, 0] += 1e-9
    assert float(adjsim.rmsd(moved, q)) > 1e-10
    assert float(adjsim.distance_rmsd(q, q)) == 0
    single = (q @ proper() + 4.0).float()
    assert float(adjsim.rmsd(single, q.float())) < 1e-5


RIGID = [
    "rmsd", "distance rmsd", "ends", "dihedrals", "contacts open", "native contacts",
    "hydrogen bonds", "principal moments", "straightness", "residues", "closest",
]  # fmt: skip
CHIRAL = ["rmsd", "dihedrals"]


@pytest.mark.parametrize("name", RIGID)
def test_rigid_motion_and_reflection(name):
    """Nothing depends on a rigid motion; what tells hands apart depends on a reflection."""
    observable = {
        **OBSERVABLES,
        "contacts open": lambda q: adjsim.contacts(q, PAIRS, 2.0, width=0.4),
    }[name]
    q = molecule()
    value = observable(q)
    torch.testing.assert_close(observable(q @ proper() + 3.0), value, rtol=1e-11, atol=1e-12)
    mirrored = observable(q * torch.tensor([1.0, -1.0, 1.0]))
    if name == "dihedrals":
        torch.testing.assert_close(mirrored, -value, rtol=1e-12, atol=0)
    elif name in CHIRAL:
        assert float((mirrored - value).abs().max()) > 0.01
    else:
        torch.testing.assert_close(mirrored, value, rtol=1e-11, atol=1e-12)


def test_a_system_that_is_not_a_number_leaves_the_others():
    q = molecule(3)
    q[1, 2, 0] = math.nan
    for name in ("rmsd", "aligned", "principal moments", "straightness", "dihedrals", "closest"):
        found = OBSERVABLES[name](q).reshape(3, -1)
        alone = OBSERVABLES[name](q[[0, 2]])
        assert found.isnan().any(-1).tolist() == [False, True, False], name
        torch.testing.assert_close(found[[0, 2]].flatten(), alone.flatten(), rtol=1e-12, atol=0)


# --- flexibility ---


def vibrating(frames=9, *batch, atoms=6, size=0.2):
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(frames, *batch, atoms, 3, generator=generator)
    return molecule(*batch, atoms=atoms) + size * noise


def numpy_flexibility(frames, w):
    w = w.numpy() / w.numpy().sum()
    x = frames.numpy() - np.einsum("a,tad->td", w, frames.numpy())[:, None]
    mean = x[-1]
    for _ in range(60):
        turned = [Rotation.align_vectors(mean, f, weights=w)[0].apply(f) for f in x]
        mean = np.mean(turned, 0)
    return np.sqrt(((turned - mean) ** 2).sum(-1).mean(0))


def test_flexibility_is_that_of_repeated_alignment():
    """The start of the repetitions, and rigid motions of each frame, make no difference."""
    frames = vibrating(9, 2)
    found = adjsim.flexibility(frames, masses())
    for i in range(2):
        known = torch.as_tensor(numpy_flexibility(frames[:, i], masses()))
        torch.testing.assert_close(found[i], known, rtol=1e-10, atol=0)
        alone = adjsim.flexibility(frames[:, i], masses())
        torch.testing.assert_close(alone, found[i], rtol=1e-10, atol=0)
    moved = torch.stack([f @ proper(s) + s for s, f in enumerate(frames[:, 0])])
    torch.testing.assert_close(adjsim.flexibility(moved, masses()), found[0], rtol=1e-10, atol=0)
    single = adjsim.flexibility(frames.float(), masses())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), found, rtol=1e-4, atol=0)


def test_the_gradient_of_flexibility():
    frames = vibrating(4, atoms=4).requires_grad_()
    # Alignments converge to 4e-14; the step of 1e-6 makes 1e-7 of it.
    assert gradcheck(adjsim.flexibility, frames, rtol=1e-6, atol=1e-7)
    rigid = torch.stack([molecule() @ proper(s) for s in range(3)]).requires_grad_()
    value = adjsim.flexibility(rigid)
    assert torch.equal(value, torch.zeros(6))
    (grad,) = torch.autograd.grad(value.sum(), rigid)
    assert torch.equal(grad, torch.zeros_like(rigid))
    linear = torch.zeros(3, 4, 3)
    linear[..., 0] = vibrating(3, atoms=4)[..., 0]
    linear.requires_grad_()
    (grad,) = torch.autograd.grad(adjsim.flexibility(linear).sum(), linear)
    assert bool(grad.isfinite().all())


# --- conformations ---


def test_dihedrals_are_those_of_ase():
    q = molecule(atoms=9, seed=8)
    index = [[i, i + 1, i + 2, i + 3] for i in range(6)]
    atoms = ase.Atoms("C9", positions=q.numpy())
    known = torch.tensor([math.radians(atoms.get_dihedral(*row)) for row in index])
    found = adjsim.dihedrals(q, index)
    apart = torch.remainder(found - known + math.pi, 2 * math.pi) - math.pi
    torch.testing.assert_close(apart, torch.zeros(6), rtol=0, atol=1e-12)
    wrapped = torch.remainder(q, torch.tensor(BOX) + 4)
    box = (torch.tensor(BOX) + 4).tolist()
    torch.testing.assert_close(adjsim.dihedrals(wrapped, index, box), found, rtol=1e-12, atol=1e-12)


def test_the_sign_of_a_dihedral():
    """Seen along the bond from j to k, that from k turns clockwise to reach that of j: 60."""
    q = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.5], [0.0, 0.0, 1.5]])
    for degrees in (60, -60, 120, 0, 179, 180):
        angle = math.radians(degrees)
        # Looking along +z, with y upwards, x points to the left, so clockwise is towards -x.
        q[3, :2] = torch.tensor([-math.sin(angle), math.cos(angle)])
        found = float(adjsim.dihedrals(q, [[0, 1, 2, 3]]))
        assert math.cos(found - angle) == pytest.approx(1.0, abs=1e-14)
        assert math.sin(found - angle) == pytest.approx(0.0, abs=1e-14)


@pytest.mark.parametrize("shape", ["cis", "trans", "line", "bend", "one place"])
def test_special_dihedrals_have_finite_gradients(shape):
    q = {
        "cis": [[0.0, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0]],
        "trans": [[0.0, 1, 0], [0, 0, 0], [1, 0, 0], [1, -1, 0]],
        "line": [[0.1, 0.1, 0.1], [0.3, 0.3, 0.3], [0.7, 0.7, 0.7], [1.1, 1.1, 1.1]],
        "bend": [[0.1, 0.1, 0.1], [0.3, 0.3, 0.3], [0.7, 0.7, 0.7], [1.0, 2.0, 0.0]],
        "one place": [[1.0, 1, 1]] * 4,
    }[shape]
    leaf = torch.tensor(q, requires_grad=True)
    value = adjsim.dihedrals(leaf, [[0, 1, 2, 3]])
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    assert bool(grad.isfinite().all())
    if shape in ("cis", "trans"):
        assert abs(float(value.detach())) == pytest.approx({"cis": 0.0, "trans": math.pi}[shape])
        # The end atoms move out of the plane at a distance of one from the axis.
        assert float(grad[3, 2].abs()) == pytest.approx(1.0, rel=1e-12)
    else:
        assert float(value.detach()) == 0
        assert torch.equal(grad, torch.zeros_like(grad))


def test_the_smooth_distribution_of_angles():
    """Against SciPy's kernel, normalised, without a jump at pi, and convolved."""
    angles = torch.tensor([[0.3, 3.1, -2.0], [-3.1, 1.0, 9.0]])
    at = torch.linspace(-math.pi, math.pi, 401)
    for width in (0.02, 0.5, 3.0):
        p = adjsim.dihedral_distribution(angles, at, width=width)
        # The trapezoidal rule of a smooth periodic function is exact, if it resolves the kernel.
        torch.testing.assert_close(
            torch.trapezoid(p, at), torch.ones(2), rtol=1e-12 if width > 0.1 else 1e-6, atol=0
        )
        torch.testing.assert_close(p[:, 0], p[:, -1], rtol=1e-10, atol=1e-12)
    k = 1 / 0.5**2
    x = np.cos(at.numpy()[:, None] - angles[1].numpy())
    known = (np.exp(k * x) / (2 * math.pi * i0(k))).mean(1)
    found = adjsim.dihedral_distribution(angles[1], at, width=0.5)
    torch.testing.assert_close(found, torch.as_tensor(known), rtol=1e-12, atol=1e-14)
    # Beyond exponents of 700 the kernel itself overflows.
    assert bool(adjsim.dihedral_distribution(angles, at, width=1e-3).isfinite().all())


def measured(state):
    """Distances of six atoms and their dihedral angles, in bins."""
    q = state.position
    r = adjsim.pair_distances(q)
    angle = adjsim.histogram(adjsim.dihedrals(q, TORSIONS), TURNS, period=2 * math.pi)
    return torch.cat([adjsim.histogram(r, EDGES), angle], -2)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_average_of_a_histogram_is_that_of_stored_frames(compiled):
    generator = torch.Generator().manual_seed(2)
    dynamics = adjsim.Langevin(adjsim.Harmonic(1.0), kT=0.5, friction=1.0)
    start = dynamics.init(torch.randn(2, 6, 3, generator=generator), generator=generator)
    run = partial(adjsim.simulate, dynamics, start, solver=adjsim.BAOAB(0.2), generator=3)
    mean = run([0.0, 4.8], record=adjsim.TimeAverage(measured, every=2), compile=compiled)
    q = run([0.4 * k for k in range(13)]).position[1:]
    values = [adjsim.pair_distances(q), adjsim.dihedrals(q, TORSIONS)]
    known = [
        [[np.histogram(x[:, i, n], edges)[0] / 12 for n in range(x.shape[-1])] for i in range(2)]
        for x, edges in zip(values, (EDGES, TURNS), strict=True)
    ]
    expected = torch.from_numpy(np.concatenate([np.array(x) for x in known], 1))
    torch.testing.assert_close(mean.record, expected, rtol=1e-13, atol=1e-15)
    assert 0.1 < float(expected.max()) < 1


def test_a_smooth_histogram():
    x = torch.tensor([0.3, 1.1, 2.9, -3.0]).requires_grad_()
    edges = torch.linspace(-math.pi, math.pi, 7)
    # A narrow kernel has the histogram, and any kernel has all of a value in a period.
    torch.testing.assert_close(
        adjsim.histogram(x, edges, width=1e-4), adjsim.histogram(x, edges), rtol=0, atol=1e-12
    )
    turn = {"width": 0.4, "period": 2 * math.pi}
    found = adjsim.histogram(x, edges, **turn)
    torch.testing.assert_close(found.sum(-1), torch.ones(4), rtol=1e-12, atol=0)
    moved = adjsim.histogram(x + 4 * math.pi, edges, **turn)
    torch.testing.assert_close(found, moved, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(partial(adjsim.histogram, edges=edges, **turn), (x,))
    noise = torch.randn(100_000, generator=torch.Generator().manual_seed(4))
    counts = adjsim.histogram(x.detach().unsqueeze(-1) + 0.4 * noise, edges, period=2 * math.pi)
    torch.testing.assert_close(counts.mean(-2), found.detach(), rtol=0, atol=5e-3)
    # The last bin holds its upper edge, and a period its first.
    ends = adjsim.histogram([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])
    torch.testing.assert_close(ends, torch.tensor([[1.0, 0], [0, 1], [0, 1]]))


def test_the_histogram_of_angles():
    generator = torch.Generator().manual_seed(9)
    angles = 2 * math.pi * torch.rand(7, 400, generator=generator) - math.pi
    known, _ = np.histogram(angles.numpy(), 18, (-math.pi, math.pi), density=True)
    for turns in (0, 1, -3):
        found = adjsim.dihedral_histogram(angles + 2 * math.pi * turns, 18)
        torch.testing.assert_close(found, torch.as_tensor(known), rtol=1e-13, atol=0)
    ends = adjsim.dihedral_histogram([math.pi, -math.pi, 0.0, 0.1], 2)
    torch.testing.assert_close(ends, torch.full((2,), 1 / (2 * math.pi)), rtol=1e-14, atol=0)
    # The smooth distribution is the histogram where the kernel is narrow.
    at = torch.linspace(-math.pi, math.pi, 18 * 40 + 1)
    smooth = adjsim.dihedral_distribution(angles.flatten(), at, width=0.01)
    means = (smooth[:-1] + smooth[1:]).reshape(18, 40).mean(1) / 2
    # Of some 150 angles in a bin, the kernel takes one or two across a limit.
    torch.testing.assert_close(means, torch.as_tensor(known), rtol=0.05, atol=0)


def test_the_map_of_two_angles():
    phi, psi = torch.tensor([[0.3, 3.1, -2.0]]), torch.tensor([[1.0, -3.1, 0.5]])
    at = torch.linspace(-math.pi, math.pi, 101)
    p = adjsim.ramachandran(phi, psi, at, width=0.4)
    assert p.shape == (1, 101, 101)
    assert float(torch.trapezoid(torch.trapezoid(p, at), at)) == pytest.approx(1.0, abs=1e-12)
    # The marginals are the distributions of each angle.
    for axis, angles in ((-1, phi), (-2, psi)):
        found = torch.trapezoid(p, at, dim=axis)
        known = adjsim.dihedral_distribution(angles, at, width=0.4)
        torch.testing.assert_close(found, known, rtol=1e-11, atol=1e-13)
    # phi comes first: the pair (0.3, 1.0).
    near = adjsim.ramachandran(phi[:, :1], psi[:, :1], [0.3, 1.0], width=0.1)
    assert int(near.argmax()) == 1


# --- contacts ---


def plain_distance(q, i, j, box=None):
    d = q[i] - q[j]
    if box is not None:
        d = d - np.array(box) * np.round(d / np.array(box))
    return float(np.linalg.norm(d))


def logistic(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("box", [None, BOX], ids=["open", "box"])
def test_contacts_and_bonds_by_hand(box):
    q, y = molecule(), molecule(seed=2)
    far = [plain_distance(q.numpy(), i, j, box) for i, j in PAIRS]
    native = [plain_distance(y.numpy(), i, j, box) for i, j in PAIRS]
    known = sum(logistic((2.0 - r) / 0.4) for r in far)
    found = adjsim.contacts(q, PAIRS, 2.0, width=0.4, box=box)
    assert float(found) == pytest.approx(known, rel=1e-13)
    several = adjsim.contacts(q, PAIRS, [1.0, 2.0, 2.4], width=0.4, box=box)
    known = sum(logistic((d - r) / 0.4) for d, r in zip((1.0, 2.0, 2.4), far, strict=True))
    assert float(several) == pytest.approx(known, rel=1e-13)
    known = sum(logistic((0.7 * b - a) / 0.3) for a, b in zip(far, native, strict=True)) / 3
    found = adjsim.native_contacts(q, y, PAIRS, width=0.3, tolerance=0.7, box=box)
    assert float(found) == pytest.approx(known, rel=1e-13)
    known = math.sqrt(sum((a - b) ** 2 for a, b in zip(far, native, strict=True)) / 3)
    found = adjsim.distance_rmsd(q, y, PAIRS, box=box)
    assert float(found) == pytest.approx(known, rel=1e-13)
    all_of_them = [
        plain_distance(q.numpy(), i, j) - plain_distance(y.numpy(), i, j)
        for i, j in itertools.combinations(range(6), 2)
    ]
    found = adjsim.distance_rmsd(q, y)
    assert float(found) == pytest.approx(np.sqrt(np.mean(np.square(all_of_them))), rel=1e-13)
    total, positions = 0.0, q.numpy()
    for (d, h), a in itertools.product([(0, 1), (3, 2)], [0, 4, 5]):
        if a == d:
            continue
        to, along = positions[a] - positions[d], positions[h] - positions[d]
        if box is not None:
            to, along = (v - np.array(box) * np.round(v / np.array(box)) for v in (to, along))
        r, cosine = np.linalg.norm(to), to @ along / np.linalg.norm(to) / np.linalg.norm(along)
        steep = (cosine - math.cos(0.9)) / (0.3 * math.sin(0.9))
        total += logistic((2.4 - r) / 0.5) * logistic(steep)
    assert float(bonds(q, box)) == pytest.approx(total, rel=1e-12)


def test_two_waters_have_one_hydrogen_bond():
    """Counted by narrow limits; none if the acceptor is too far or the hydrogen points away."""
    water = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])

    def count(q):
        donors = [[0, 1], [0, 2], [3, 4], [3, 5]]
        return float(adjsim.hydrogen_bonds(q, donors, [0, 3], distance=3.5, width=1e-3))

    for shift, number in ((2.9, 1), (3.6, 0)):
        pair = torch.cat([water, water + torch.tensor([shift, 0.0, 0.0])])
        assert count(pair) == pytest.approx(number, abs=0.01)
    away = water * torch.tensor([-1.0, 1.0, 1.0])
    pair = torch.cat([away, away * torch.tensor([-1.0, -1.0, 1.0]) + torch.tensor([2.9, 0.0, 0.0])])
    assert count(pair) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("box", [None, BOX], ids=["open", "box"])
def test_distances_of_groups_by_hand(box):
    q = 0.4 * molecule()
    if box is not None:
        q = torch.remainder(q, torch.tensor(box))
    x, m = q.numpy(), masses().numpy()
    members = [[0, 1], [2, 3], [4]]

    def centre(atoms):
        parts = [x[i] - x[atoms[0]] for i in atoms]
        if box is not None:
            parts = [d - np.array(box) * np.round(d / np.array(box)) for d in parts]
        return x[atoms[0]] + sum(m[i] * d for i, d in zip(atoms, parts, strict=True)) / sum(
            m[i] for i in atoms
        )

    centres = np.array([centre(atoms) for atoms in members])
    found = adjsim.residue_distances(q, GROUPS, mass=masses(), box=box)
    smooth = adjsim.closest_distances(q, GROUPS, width=0.3, box=box)
    narrow = adjsim.closest_distances(q, GROUPS, width=1e-4, box=box)
    for a, b in itertools.product(range(3), repeat=2):
        known = 0.0 if a == b else plain_distance(centres, a, b, box)
        assert float(found[a, b]) == pytest.approx(known, rel=1e-12)
        pairs = [plain_distance(x, i, j, box) for i in members[a] for j in members[b]]
        known = -0.3 * math.log(sum(math.exp(-r / 0.3) for r in pairs)) if a != b else 0.0
        assert float(smooth[a, b]) == pytest.approx(known, rel=1e-12)
        # The bound of the docstring, for at most four pairs.
        least = min(pairs) if a != b else 0.0
        assert least - 1e-4 * math.log(4) - 1e-12 <= float(narrow[a, b]) <= least + 1e-12


# --- moments ---


def test_moments_are_those_of_ase():
    q, m = molecule(), masses()
    atoms = ase.Atoms("C6", positions=q.numpy(), masses=m.numpy())
    found = adjsim.principal_moments(q, m)
    torch.testing.assert_close(
        found, torch.as_tensor(atoms.get_moments_of_inertia()), rtol=1e-12, atol=0
    )
    tensor = adjsim.gyration_tensor(q, m)
    known = np.cov(q.numpy().T, aweights=m.numpy(), ddof=0)
    torch.testing.assert_close(tensor, torch.as_tensor(known), rtol=1e-12, atol=1e-13)
    a, b, c = torch.linalg.eigvalsh(tensor)
    kappa = 1 - 3 * (a * b + b * c + c * a) / (a + b + c) ** 2
    torch.testing.assert_close(adjsim.straightness(q, m), kappa, rtol=1e-12, atol=0)
    size = adjsim.gyration_tensor(q).trace().sqrt()
    torch.testing.assert_close(size, adjsim.radius_of_gyration(q), rtol=1e-13, atol=0)
    torch.testing.assert_close(
        adjsim.principal_moments(q, 2.0), 2 * adjsim.principal_moments(q), rtol=1e-12, atol=0
    )


def test_moments_that_coincide():
    """Symmetric functions of them have the right gradient, and straightness a second one."""
    octahedron = SHAPES["octahedron"](None).requires_grad_()
    line = (torch.arange(5.0)[:, None] * torch.tensor([1.0, 2.0, -1.0])).requires_grad_()
    ring = torch.arange(6.0) * math.pi / 3
    ring = torch.stack([ring.cos(), ring.sin(), 0 * ring], -1).requires_grad_()
    for q, value in ((octahedron, 0.0), (line, 1.0), (ring, 0.25)):
        assert float(adjsim.straightness(q.detach())) == pytest.approx(value, abs=1e-14)
        assert gradcheck(adjsim.straightness, q, rtol=1e-6, atol=1e-8)
        assert gradgradcheck(adjsim.straightness, q, rtol=1e-6, atol=1e-7)
        assert gradcheck(
            lambda q: adjsim.principal_moments(q).square().sum(), q, rtol=1e-6, atol=1e-8
        )
    flat = molecule(dim=2).requires_grad_()
    assert gradcheck(adjsim.straightness, flat, rtol=1e-6, atol=1e-8)
    point = torch.zeros(3, 3, requires_grad=True)
    value = adjsim.straightness(point + 0.1)
    assert float(value.detach()) == 0
    assert torch.equal(torch.autograd.grad(value, point)[0], torch.zeros(3, 3))


def test_dipole_and_density():
    q, c = molecule(2), torch.tensor(CHARGES, requires_grad=True)
    atoms = ase.Atoms("C6", positions=q[0].numpy())
    known = torch.as_tensor(np.array(CHARGES) @ atoms.positions)
    torch.testing.assert_close(adjsim.dipole(q, c)[0], known, rtol=1e-13, atol=1e-13)
    assert gradcheck(lambda c: adjsim.dipole(q, c), c)
    assert float(adjsim.density(masses(), BOX)) == pytest.approx(8.9 / math.prod(BOX), rel=1e-14)
    tilted = adjsim.density(masses(), TILTED)
    assert float(tilted) == pytest.approx(8.9 / abs(np.linalg.det(TILTED)), rel=1e-14)
    # 216 molecules of water in a box of 18.643 angstrom have 0.997 g/cm^3.
    water = adjsim.density([15.999, 1.008, 1.008] * 216, [18.643] * 3)
    assert float(water) * 1.66053907 == pytest.approx(0.997, abs=5e-4)


def test_the_dielectric_constant_of_free_dipoles():
    """Independent dipoles: epsilon = 1 + 4 pi k N mu^2 / (3 V kT), to the error of replicas."""
    generator = torch.Generator().manual_seed(11)
    unit = torch.randn(2000, 12, 20, 3, generator=generator)
    total = (0.3 * unit / unit.norm(dim=-1, keepdim=True)).sum(-2) + torch.tensor([0.5, 0.0, -2.0])
    found = adjsim.dielectric_constant(total, 700.0, 0.025, 14.39964548)
    known = 1 + 4 * math.pi * 14.39964548 * 20 * 0.3**2 / (3 * 700.0 * 0.025)
    mean = adjsim.mean_with_error(found.reshape(1, -1))
    assert mean.stderr < 0.01 * known
    # Five standard errors of twelve replicas have a chance of 4e-4.
    assert abs(mean.value - known) < 5 * mean.stderr
    x = total[:5, :2].clone().requires_grad_()
    kT = torch.tensor([0.02, 0.03], requires_grad=True)
    assert gradcheck(
        lambda x, kT: adjsim.dielectric_constant(x, 700.0, kT, 14.4), (x, kT), rtol=1e-6, atol=1e-8
    )
    y = x.detach().numpy()
    spread = y.var(0, ddof=1).sum(-1)
    expected = 1 + 4 * math.pi * 14.4 * spread / (3 * 700.0 * np.array([0.02, 0.03]))
    torch.testing.assert_close(
        adjsim.dielectric_constant(x, 700.0, kT, 14.4), torch.as_tensor(expected),
        rtol=1e-12, atol=0,
    )  # fmt: skip


# --- in simulations ---

RUNS = {
    "rmsd": lambda q: adjsim.rmsd(q, OTHER, weights=MASSES),
    "conformation": lambda q: adjsim.dihedral_distribution(
        adjsim.dihedrals(q, TORSIONS), [0.0, 2.0], width=0.5
    ),
    "contacts": lambda q: (
        adjsim.contacts(q, PAIRS, 2.0, width=0.4, box=BOX)
        + adjsim.closest_distances(q, GROUPS, width=0.3).sum()
    ),
    "bonds": lambda q: bonds(q, BOX),
    "moments": lambda q: adjsim.straightness(q, MASSES) + adjsim.residue_distances(q, GROUPS).sum(),
}


def run(name, adjoint, *, average, compiled=False):
    q = molecule().requires_grad_()
    k = torch.nn.Parameter(torch.tensor(0.7))
    function = RUNS[name]

    def observable(state):
        return function(state.position)

    trajectory = adjsim.simulate(
        adjsim.Hamiltonian(adjsim.Harmonic(k), 1.3),
        adjsim.PhaseState(q, torch.zeros_like(q)),
        [0.0, 0.1, 0.2],
        solver=adjsim.VelocityVerlet(0.05),
        record=adjsim.TimeAverage(observable, burn_in=0.05) if average else observable,
        adjoint=adjoint,
        compile=compiled,
    )
    record = trajectory.record
    return record.detach(), *torch.autograd.grad(record.square().sum(), (q, k))


@pytest.mark.parametrize("average", [False, True], ids=["record", "average"])
@pytest.mark.parametrize("name", RUNS)
def test_gradients_through_a_run(name, average):
    direct = run(name, adjsim.DirectAdjoint(), average=average)
    reversible = run(name, adjsim.ReversibleAdjoint(), average=average)
    for found, known in zip(reversible, direct, strict=True):
        torch.testing.assert_close(found, known, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    slow_but(lambda name: False, RUNS, marathon=lambda name: name != "rmsd"),
)
def test_compiled_averages(name):
    eager = run(name, adjsim.ReversibleAdjoint(), average=True)
    compiled = run(name, adjsim.ReversibleAdjoint(), average=True, compiled=True)
    for found, known in zip(compiled, eager, strict=True):
        torch.testing.assert_close(found, known, rtol=1e-11, atol=1e-11)


class Restraint(torch.nn.Module):
    """An energy made of an observable, whose force is a first derivative."""

    def __init__(self, reference, squared):
        super().__init__()
        self.reference, self.squared = torch.nn.Parameter(reference), squared

    def forward(self, position):
        if self.squared:
            return adjsim.mean_squared_deviation(position, self.reference) / 2
        return adjsim.rmsd(position, self.reference) ** 2 / 2


@pytest.mark.parametrize("squared", [False, True], ids=["rmsd", "squared deviation"])
def test_a_deviation_as_an_energy(squared):
    """The gradient through its dynamics needs second derivatives; against differences.

    The square has them at the reference itself too, where the run starts.
    """
    start = molecule()
    reference = start if squared else molecule(seed=2)
    direction, momentum = molecule(seed=3), 0.5 * molecule(seed=4)

    def end(shift, adjoint):
        trajectory = adjsim.simulate(
            adjsim.Hamiltonian(Restraint(reference, squared)),
            adjsim.PhaseState(start + shift * direction, momentum),
            [0.0, 1.0],
            solver=adjsim.VelocityVerlet(0.1),
            adjoint=adjoint,
        )
        return adjsim.straightness(trajectory.final.position)

    h = 1e-5
    up, down = (end(s * h, adjsim.DirectAdjoint()).detach() for s in (1, -1))
    for adjoint in (adjsim.DirectAdjoint(), adjsim.ReversibleAdjoint()):
        shift = torch.tensor(0.0, requires_grad=True)
        (grad,) = torch.autograd.grad(end(shift, adjoint), shift)
        assert float(grad) == pytest.approx(float(up - down) / (2 * h), rel=1e-6, abs=1e-9)


def test_the_curvature_at_the_reference():
    """That of the squared deviation is zero along rotations and translations alone."""
    q = molecule()
    found = torch.func.hessian(lambda x: adjsim.mean_squared_deviation(x, q))(q).reshape(18, 18)
    values = torch.linalg.eigvalsh(found)
    torch.testing.assert_close(values[:6], torch.zeros(6), rtol=0, atol=1e-12)
    torch.testing.assert_close(values[6:], torch.full((12,), 2 / 6), rtol=1e-12, atol=0)


# --- errors ---


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda q: adjsim.rmsd(q, q[0, :5]), r"reference must be \(6, 3\) or .* got shape \(5, 3"),
        (lambda q: adjsim.rmsd(q[0], q), r"reference must be"),
        (lambda q: adjsim.rmsd(q, q[0], weights=[0.0] * 6), "weights must .* not all zero"),
        (lambda q: adjsim.rmsd(q, q[0], weights=[-1.0] + [1.0] * 5), "zero or positive"),
        (lambda q: adjsim.rmsd(q, q[0], weights=[1.0] * 5), r"weights must be .* \(6,\)"),
        (lambda q: adjsim.rmsd(q[0, 0].tolist(), q[0]), r"\(\*batch, atoms, dim\)"),
        (lambda q: adjsim.aligned(q, q[:, :4]), "reference must be"),
        (lambda q: adjsim.aligned(q, q, weights=[1.0, 1.0] + [0.0] * 4), "at least 3 atoms"),
        (lambda q: adjsim.flexibility(q, [0.0] * 5 + [1.0]), "at least 3 atoms"),
        (lambda q: adjsim.distance_rmsd(q, q, [[0, 6]]), r"pairs\[0\] names atom 6, and"),
        (lambda q: adjsim.distance_rmsd(q, q, [[0, -1]]), r"pairs\[0\] names atom -1"),
        (lambda q: adjsim.distance_rmsd(q, q, [[2, 2]]), r"pairs\[0\] names an atom twice"),
        (lambda q: adjsim.distance_rmsd(q, q, [0, 1]), r"pairs must be \(n, 2\)"),
        (lambda q: adjsim.distance_rmsd(q, q, [[0.5, 1.0]]), "pairs must be integers"),
        (lambda q: adjsim.distance_rmsd(q[:, :1], q[:, :1]), "atoms >= 2"),
        (lambda q: adjsim.flexibility(q / 0), "position has NaN or infinite"),
        (lambda q: adjsim.flexibility(q[:1]), "at least two frames"),
        (lambda q: adjsim.flexibility(q[0]), r"position must be \(time, \*batch, atoms, dim\)"),
        (lambda q: adjsim.flexibility(q, [0.0] * 6), "not all zero"),
        (lambda q: adjsim.end_to_end_distance(q, 0, 6), "last must be the index of one of 6 atoms"),
        (lambda q: adjsim.end_to_end_distance(q, 0, -6), "the same atom, 0 of 6"),
        (lambda q: adjsim.dihedrals(q, [[0, 1, 2]]), r"index must be \(n, 4\)"),
        (lambda q: adjsim.dihedrals(q, [[0, 1, 2, 9]]), r"index\[0\] names atom 9"),
        (lambda q: adjsim.dihedrals(q[..., :2], TORSIONS), "3 dimensions"),
        (lambda q: adjsim.dihedral_distribution(q, [0.0], width=0.0), "width must be positive"),
        (lambda q: adjsim.dihedral_distribution(q, [0.0], width=10.0), "at most pi"),
        (lambda q: adjsim.dihedral_distribution(q[..., :0], [0.0], width=1.0), "at least one"),
        (lambda q: adjsim.dihedral_distribution(q, [[0.0]], width=1.0), "at must be"),
        (lambda q: adjsim.dihedral_histogram([], 3), "needs an angle"),
        (lambda q: adjsim.dihedral_histogram([math.nan], 3), "angles has NaN"),
        (lambda q: adjsim.dihedral_histogram([1.0], 0), "bins must be at least 1"),
        (lambda q: adjsim.histogram(q, [1.0, 1.0]), "edges must be at least two increasing"),
        (lambda q: adjsim.histogram(q, [0.0, 4.0], period=3.0), "span 4, which is more than"),
        (lambda q: adjsim.histogram(q, [0.0, 4.0], width=0.0), "width must be positive"),
        (lambda q: adjsim.histogram(q, [0.0, 4.0], width=1.0, period=4.5), "a fifth of the period"),
        (lambda q: adjsim.histogram(q.float(), [1e3, 1e3 + 1e-5]), "two increasing numbers"),
        (lambda q: adjsim.ramachandran(q, q[:1], [0.0], width=0.1), "must have one shape"),
        (lambda q: adjsim.contacts(q, PAIRS, [1.0, 2.0], width=0.1), r"one number or \(3,\)"),
        (lambda q: adjsim.contacts(q, PAIRS, 0.0, width=0.1), "distance must be positive"),
        (lambda q: adjsim.contacts(q, PAIRS, 1.0, width=-0.1), "width must be positive"),
        (lambda q: adjsim.contacts(q, PAIRS, 2.6, width=0.1, box=BOX), "half the smallest"),
        (
            lambda q: torch.func.vmap(
                lambda x: adjsim.contacts(x, PAIRS, 2.6, width=1, box=BOX), randomness="error"
            )(q),
            "half the smallest",
        ),
        (
            lambda q: adjsim.native_contacts(q, q[0], PAIRS, width=0.1, tolerance=0.0),
            "tolerance must be positive",
        ),
        (
            lambda q: adjsim.hydrogen_bonds(q, [[0, 1]], [7], distance=2.0, width=0.1),
            "names atom 7, and atoms are counted from 0 to 5",
        ),
        (
            lambda q: adjsim.hydrogen_bonds(q, [[0, 1]], [4, 4], distance=2.0, width=0.1),
            "acceptors names an atom twice",
        ),
        (
            lambda q: adjsim.hydrogen_bonds(q, [[0, 1]], [4], distance=2.0, width=0.1, angle=30.0),
            "angle must be between 0 and pi",
        ),
        (lambda q: adjsim.residue_distances(q, [0] * 5), r"groups must be \(6,\)"),
        (lambda q: adjsim.residue_distances(q, [0, 0, 0, 2, 2, 2]), "group 1 has no atoms"),
        (lambda q: adjsim.residue_distances(q, [-2, 0, 0, 0, 0, 0]), "counted from 0"),
        (
            lambda q: adjsim.residue_distances(q, [0, 0, 0, 1, 1, 1], mass=[0.0] * 3 + [1.0] * 3),
            "group 0 has no mass",
        ),
        (lambda q: adjsim.principal_moments(q[..., :2]), "3 dimensions"),
        (lambda q: adjsim.straightness(q[..., :1]), "dim >= 2"),
        (lambda q: adjsim.straightness(q, [1.0, 2.0]), r"mass must be one number or \(6,\)"),
        (lambda q: adjsim.dipole(q, [1.0, -1.0]), r"charge must be \(6,\)"),
        (lambda q: adjsim.density(np.array(18.0), BOX), r"must be \(atoms,\)"),
        (lambda q: adjsim.dielectric_constant(q[:1, 0], 1.0, 1.0), "at least two frames"),
        (lambda q: adjsim.dielectric_constant(q[..., :2], 1.0, 1.0), r"\(time, \*batch, 3\)"),
        (lambda q: adjsim.dielectric_constant(q, -1.0, 1.0), "volume must be positive"),
        (lambda q: adjsim.dielectric_constant(q, 1.0, 0.0), "kT must be positive"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call(molecule(2))
