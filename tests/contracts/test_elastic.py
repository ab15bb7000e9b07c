"""Elastic solids against exact answers, automatic differentiation, differences and reversal."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim import meshes
from adjsim.core.rounding import Rounding
from adjsim.meshes import Mesh
from adjsim.potentials import CorotatedLinear, NeoHookean, StVenantKirchhoff
from adjsim.potentials.base import force_vjp
from adjsim.potentials.products import derivative
from adjsim.potentials.solids.matrices import Matrix, rotation
from tests.bonded import close
from tests.problems import parameter, slow_but
from tests.suites import PotentialContract

MATERIALS = {
    "neo-hookean": NeoHookean,
    "st-venant": StVenantKirchhoff,
    "corotated": CorotatedLinear,
}
SOLID = meshes.box([1.0, 1.2, 0.8], [1, 2, 1])
MESHES = {"solid": SOLID, "plane": meshes.sheet([1.0, 1.2], [2, 2], dim=2)}
CASES = list(itertools.product(MATERIALS, MESHES))


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def moved(mesh: Mesh, by: float = 0.1, seed: int = 0) -> Tensor:
    return mesh.vertices + by * random(*mesh.vertices.shape, seed=seed)


def field(mesh: Mesh, low: float, high: float, *columns: int) -> nn.Parameter:
    """Numbers of each element, none equal to another."""
    count = torch.Size((len(mesh.elements), *columns))
    return nn.Parameter(
        torch.linspace(low, high, count.numel(), dtype=torch.float64).reshape(count)
    )


def body(name: str, mesh: Mesh = SOLID) -> nn.Module:
    """A material with numbers of each element and a stretched rest shape."""
    stretch = field(mesh, 0.9, 1.2, mesh.dim)
    return MATERIALS[name](mesh, field(mesh, 8.0, 12.0), parameter(0.3), rest_stretch=stretch)


@pytest.mark.parametrize(("name", "shape"), slow_but(lambda name, shape: shape == "solid", CASES))
class TestElastic(PotentialContract):
    @pytest.fixture
    def potential(self, name, shape):
        return body(name, MESHES[shape])

    @pytest.fixture
    def position(self, shape):
        return moved(MESHES[shape], 0.05)


# Closed forms.


@pytest.mark.parametrize("stretched", [False, True])
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_closed_forms_equal_automatic_differentiation(name, shape, stretched):
    mesh = MESHES[shape]
    potential = body(name, mesh)
    if not stretched:
        potential = MATERIALS[name](mesh, parameter(10.0), field(mesh, 0.1, 0.4))
    parameters = list(potential.parameters())
    # Elements of the second system are inverted.
    q = torch.stack([moved(mesh, 0.05), moved(mesh, 0.5, seed=1)]).requires_grad_()
    assert bool((torch.linalg.det(potential.deformation(q))[1] < 0).any())
    v = random(*q.shape, seed=2)
    through = -derivative(potential, q)
    expected = torch.autograd.grad(through, (q, *parameters), v)
    value, pullback = force_vjp(potential, q.detach(), parameters)
    along, rest = pullback(v)
    close(value, through, 1e-12)
    close(along, expected[0], 1e-12)
    for mine, theirs in zip(rest.gradient(parameters), expected[1:], strict=True):
        close(mine, theirs, 1e-12)
    differentiable = adjsim.force(potential, q)
    close(differentiable, value, 1e-15)
    again = torch.autograd.grad(differentiable, (q, *parameters), v)
    for mine, theirs in zip(again, expected, strict=True):
        close(mine, theirs, 1e-12)


@pytest.mark.parametrize("name", MATERIALS)
def test_products_against_central_differences(name):
    potential, q, v = body(name), moved(SOLID), random(12, 3, seed=3)
    parameters = list(potential.parameters())
    _, pullback = force_vjp(potential, q, parameters)
    along, rest = pullback(v)
    h = 1e-5
    difference = (adjsim.force(potential, q + h * v) - adjsim.force(potential, q - h * v)) / (2 * h)
    # The product is symmetric. Truncation h^2 and rounding 1e-16 / h are below 1e-9.
    close(along, difference, 1e-7)
    for p, grad in zip(parameters, rest.gradient(parameters), strict=True):
        direction, ends = random(*p.shape, seed=4) if p.ndim else torch.ones(()), []
        with torch.no_grad():
            for sign in (1, -1):
                p += sign * h * direction
                ends.append(float((adjsim.force(potential, q) * v).sum()))
                p -= sign * h * direction
        slope = (ends[0] - ends[1]) / (2 * h)
        assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", MATERIALS)
def test_forward_mode_vmap_and_second_derivatives(name):
    potential, q, v = body(name), moved(SOLID), random(12, 3, seed=3)
    _, rate = torch.func.jvp(lambda x: adjsim.force(potential, x), (q,), (v,))
    along, _ = force_vjp(potential, q, [])[1](v)
    close(rate, along, 1e-12)
    batch = torch.stack([q, q + 0.1 * v])
    found = torch.func.vmap(torch.func.grad(lambda x: potential(x)))(batch)
    close(-found, adjsim.force(potential, batch), 1e-12)
    # The derivative of the product along v, by automatic differentiation twice and by differences.
    here = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(
        (adjsim.force(potential, here) * v).sum(), here, create_graph=True
    )
    (second,) = torch.autograd.grad((first * v).sum(), here)
    h = 1e-4
    ends = [force_vjp(potential, q + sign * h * v, [])[1](v)[0] for sign in (1, -1)]
    # Truncation h^2 times a fourth derivative of order one.
    close(second, (ends[0] - ends[1]) / (2 * h), 1e-5)


# Exact answers.


@pytest.mark.parametrize("name", MATERIALS)
def test_patch_test(name):
    """A linear displacement of an irregular mesh has no force inside, and the energy V psi."""
    grid = meshes.box([1.0, 1.0, 1.0], [3, 3, 3])
    inside = ((grid.vertices > 0.01) & (grid.vertices < 0.99)).all(-1)
    shaken = grid.vertices + 0.05 * inside.unsqueeze(-1) * random(64, 3)
    mesh = Mesh(shaken, grid.tetrahedra)
    potential = MATERIALS[name](mesh, 1e5, 0.3)
    f = torch.tensor([[1.1, 0.2, -0.1], [0.05, 0.9, 0.15], [-0.2, 0.1, 1.2]], dtype=torch.float64)
    force = adjsim.force(potential, mesh.vertices @ f.T + 3.0)
    assert int(inside.sum()) == 8
    assert float(force[inside].abs().max()) < 1e-11 * float(force.abs().max())
    assert float(potential(mesh.vertices @ f.T)) == pytest.approx(
        float(density(name, f)), rel=1e-12
    )


def density(name: str, f: Tensor) -> Tensor:
    """psi of E = 1e5 and nu = 0.3, by determinants and singular vectors."""
    mu, lam = 1e5 / 2.6, 1e5 * 0.3 / (1.3 * 0.4)
    j, one = torch.linalg.det(f), torch.eye(3, dtype=torch.float64)
    if name == "neo-hookean":
        return mu / 2 * ((f * f).sum() - 3) - mu * (j - 1) + (lam + mu) / 2 * (j - 1) ** 2
    strain = (f.T @ f - one) / 2
    if name == "corotated":
        u, _, vh = torch.linalg.svd(f)
        r = u @ vh
        assert float(torch.linalg.det(r)) > 0
        return mu * ((f - r) ** 2).sum() + lam / 2 * ((r * f).sum() - 3) ** 2
    return mu * (strain**2).sum() + lam / 2 * strain.trace() ** 2


@pytest.mark.parametrize("s", [0.3, 0.8, 1.2, 3.0])
def test_uniaxial_stress(s):
    """The sides are free of force at the lateral stretch t, and the ends have the force P."""
    modulus, nu = 1e5, 0.3
    mu, lam = modulus / (2 * (1 + nu)), modulus * nu / ((1 + nu) * (1 - 2 * nu))
    square = 1 / s + mu * (s - 1) / (s * s * (lam + mu))
    stress = mu * (s - square / s)
    if s == 1.2:
        assert stress == pytest.approx(17663.8176638, rel=1e-11)
    mesh = meshes.box([2.0, 1.0, 0.5], [3, 2, 2])
    position = mesh.vertices * torch.tensor([s, square**0.5, square**0.5], dtype=torch.float64)
    force = adjsim.force(NeoHookean(mesh, modulus, nu), position)
    end = mesh.vertices[:, 0] == 2
    # The area at rest is 0.5. The force of the body is opposite to the pull on it.
    assert -float(force[end, 0].sum()) == pytest.approx(0.5 * stress, rel=1e-12)
    others = force.clone()
    others[end | (mesh.vertices[:, 0] == 0), 0] = 0
    assert float(others.abs().max()) < 1e-11 * abs(stress)


@pytest.mark.parametrize("name", MATERIALS)
def test_small_strains_have_the_moduli_of_lame(name):
    potential = MATERIALS[name](SOLID, 1e5, 0.3)
    mu, lam = 1e5 / 2.6, 1e5 * 0.3 / (1.3 * 0.4)
    rotated = torch.linalg.qr(random(3, 3)).Q
    rotated = rotated * torch.linalg.det(rotated)
    strain = 1e-4 * (lambda x: x + x.T)(random(3, 3, seed=5))
    position = SOLID.vertices @ (rotated @ (torch.eye(3, dtype=torch.float64) + strain)).T
    expected = mu * (strain**2).sum() + lam / 2 * strain.trace() ** 2
    # The next order of the strain.
    assert float(potential(position)) == pytest.approx(0.96 * float(expected), rel=2e-3)
    assert float(adjsim.force(potential, SOLID.vertices).abs().max()) < 1e-10


def test_a_stretched_rest_shape_is_at_rest():
    """Its energy is that of a mesh which is made in this shape."""
    s = torch.tensor([1.3, 0.8, 1.1], dtype=torch.float64)
    mesh = Mesh(SOLID.vertices * s, SOLID.tetrahedra)
    stretched, made = NeoHookean(SOLID, 10.0, 0.3, rest_stretch=s), NeoHookean(mesh, 10.0, 0.3)
    assert float(adjsim.force(stretched, mesh.vertices).abs().max()) < 1e-13
    q = moved(mesh)
    torch.testing.assert_close(stretched(q), made(q), rtol=1e-12, atol=0)
    close(adjsim.force(stretched, q), adjsim.force(made, q), 1e-12)


def test_plane_strain_is_a_solid_that_does_not_stretch_across():
    """A square of the plane and a cube have one energy if the third stretch is one."""
    plane, cube = MESHES["plane"], meshes.box([1.0, 1.2, 1.0], [2, 2, 1])
    f = torch.tensor([[1.2, 0.1], [-0.2, 0.8]], dtype=torch.float64)
    whole = torch.eye(3, dtype=torch.float64)
    whole[:2, :2] = f
    for name in ("neo-hookean", "st-venant", "corotated"):
        flat, solid = (MATERIALS[name](mesh, 10.0, 0.3) for mesh in (plane, cube))
        energy = solid(cube.vertices @ whole.T)
        torch.testing.assert_close(flat(plane.vertices @ f.T), energy, rtol=1e-12, atol=0)


def test_virials_against_strain():
    potential, q, h = body("neo-hookean"), moved(SOLID), 1e-5
    found = potential.virial(torch.stack([q, q]))
    for a, b in itertools.product(range(3), repeat=2):
        change = torch.eye(3, dtype=torch.float64)
        change[a, b] += h
        back = 2 * torch.eye(3, dtype=torch.float64) - change
        slope = -(potential(q @ change.T) - potential(q @ back.T)) / (2 * h)
        assert float(found[1, a, b].detach()) == pytest.approx(
            float(slope.detach()), rel=1e-6, abs=1e-6
        )


# Inverted, flat and thin elements.

TETRAHEDRON = Mesh([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0, 1, 2, 3]])
DEGENERATE = {
    "mirrored": torch.diag(torch.tensor([1.0, 1.0, -1.0])),
    "mirrored, other": torch.diag(torch.tensor([-0.7, 1.0, 0.7])),
    "point": torch.zeros(3, 3),
    "rank one": torch.outer(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.3, 0.1, 1.0])),
    "rank two": torch.diag(torch.tensor([1.0, 1.0, 0.0])),
    "reflected": -torch.eye(3),
    "equal": 1.3 * torch.eye(3),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_elements_are_finite(case, dtype):
    for name in MATERIALS:
        potential = MATERIALS[name](TETRAHEDRON, parameter(10.0), parameter(0.3))
        parameters = list(potential.parameters())
        q = (TETRAHEDRON.vertices @ DEGENERATE[case].double().T).to(dtype)
        value, pullback = force_vjp(potential, q, parameters)
        along, rest = pullback(random(4, 3).to(dtype))
        here = q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(potential(here), here, create_graph=True)
        second = torch.autograd.grad(slope.sum(), (here, *parameters), allow_unused=True)
        for x in (value, along, slope, *rest.gradient(parameters), *second):
            assert bool(torch.isfinite(x).all()), name
        # The largest modulus times rounding errors of a few dozen operations.
        torch.testing.assert_close(-slope, value, rtol=0, atol=1e3 * torch.finfo(dtype).eps)


def test_inverted_elements_return():
    """The force of a mirrored element leads back, for the two materials that promise it."""
    q = TETRAHEDRON.vertices.clone()
    q[3, 2] = -0.3
    for name in ("neo-hookean", "corotated"):
        assert float(adjsim.force(MATERIALS[name](TETRAHEDRON, 10.0, 0.3), q)[3, 2]) > 0.1, name


@pytest.mark.parametrize("gap", [0.5, 1e-2, 1e-3])
def test_rotations_against_singular_vectors(gap):
    """R is next to F where two signed singular values are almost opposite."""
    turns = [torch.linalg.qr(random(1000, 3, 3, seed=seed)).Q for seed in (1, 2)]
    u, v = (x * torch.linalg.det(x)[:, None, None] for x in turns)
    s = torch.tensor([1.0, 0.5, -0.5 + gap], dtype=torch.float64)
    f = u @ torch.diag(s) @ v.mT
    rows = [row.unbind(0) for row in f.permute(1, 2, 0).unbind(0)]
    with torch.no_grad():
        r = torch.stack([torch.stack(row) for row in rotation(Matrix(rows))]).permute(2, 0, 1)
    # The distance to a singular F is the gap, by which rounding errors are divided.
    torch.testing.assert_close(r, u @ v.mT, rtol=0, atol=1e-14 / gap)
    one = torch.eye(3, dtype=torch.float64).expand(1000, 3, 3)
    torch.testing.assert_close(r.mT @ r, one, rtol=0, atol=1e-14)


# Runs.

FREE = meshes.box([1.0, 0.5, 0.5], [2, 1, 1])
STEP = 0.005


def start(mesh: Mesh, mass: Tensor) -> tuple[Tensor, Tensor]:
    """A body that is deformed, moves, turns and rings."""
    x = moved(mesh, 0.03)
    velocity = 0.3 * random(*x.shape, seed=6) + torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64)
    return x, mass.detach().unsqueeze(-1) * velocity


def dynamics(potential: nn.Module, mesh: Mesh = FREE) -> adjsim.Hamiltonian:
    return adjsim.Hamiltonian(potential, mesh.lumped_mass(2.0))


def rolled(made, steps, dt=STEP, adjoint=None, *, exact=False, compile=False):
    position, momentum = start(FREE, FREE.lumped_mass(2.0))
    return adjsim.simulate(
        made,
        made.init(position, momentum),
        [0.0, steps * dt],
        solver=adjsim.Splitting("BAB", dt, exact=exact),
        adjoint=adjoint or adjsim.DirectAdjoint(),
        compile=compile,
    )


SHORT = slow_but(lambda name: name == "neo-hookean", MATERIALS)


@pytest.mark.parametrize("name", SHORT)
def test_a_free_body_keeps_momentum_and_angular_momentum(name):
    found = adjsim.simulate(
        (made := dynamics(MATERIALS[name](FREE, 10.0, 0.3))),
        made.init(*start(FREE, FREE.lumped_mass(2.0))),
        [0.0, 1.0],
        solver=adjsim.VelocityVerlet(STEP),
    )
    x, p = found.position, found.momentum
    turn = torch.linalg.cross(x, p).sum(1)
    # Sums of 200 steps with rounding errors of 1e-16 of the largest momentum and position.
    torch.testing.assert_close(p.sum(1)[1], p.sum(1)[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(turn[1], turn[0], rtol=1e-12, atol=1e-12)
    assert float((x[1] - x[0]).abs().max()) > 0.5


@pytest.mark.parametrize("name", SHORT)
def test_the_energy_error_is_of_second_order(name):
    made = dynamics(MATERIALS[name](FREE, 10.0, 0.3))
    errors = []
    for dt in (0.02, 0.01):
        found = adjsim.simulate(
            made,
            made.init(*start(FREE, FREE.lumped_mass(2.0))),
            [0.02 * k for k in range(51)],
            solver=adjsim.VelocityVerlet(dt),
        )
        with torch.no_grad():
            energy = made.invariant(type(found.final)(found.position, found.momentum))
        errors.append(float((energy - energy[0]).abs().max()))
    # 4, up to the next order of the step.
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[0] > 1e-6


def numbers() -> dict[str, nn.Parameter]:
    return {
        "youngs_modulus": field(FREE, 8.0, 12.0),
        "poissons_ratio": parameter(0.3),
        "rest_stretch": nn.Parameter(torch.tensor([1.1, 0.95, 1.05], dtype=torch.float64)),
        "density": field(FREE, 1.5, 2.5),
    }


def loss(name, given, adjoint, **options):
    mass = FREE.lumped_mass(given["density"])
    rest = {k: x for k, x in given.items() if k != "density"}
    made = adjsim.Hamiltonian(MATERIALS[name](FREE, **rest), mass)
    found = rolled(made, 20, adjoint=adjoint, **options)
    weight = random(*FREE.vertices.shape, seed=8)
    return (weight * found.final.position).sum() + (found.final.momentum**2).sum(), found


@pytest.mark.parametrize(
    ("name", "exact"),
    slow_but(
        lambda name, exact: name == "neo-hookean" and not exact,
        list(itertools.product(MATERIALS, (False, True))),
    ),
)
def test_rollout_gradients(name, exact):
    given, h = numbers(), 1e-5
    grads = {}
    for adjoint in (adjsim.DirectAdjoint(), adjsim.CheckpointAdjoint(), adjsim.ReversibleAdjoint()):
        value, _ = loss(name, given, adjoint, exact=exact)
        grads[type(adjoint)] = torch.autograd.grad(value, list(given.values()))
    # Recomputed states are the same, and reversed ones are off by the rounding of 20 steps.
    for kind, tolerance in ((adjsim.CheckpointAdjoint, 1e-12), (adjsim.ReversibleAdjoint, 1e-10)):
        for mine, direct in zip(grads[kind], grads[adjsim.DirectAdjoint], strict=True):
            close(mine, direct, tolerance)
    if exact:
        # The lattice's rounding has no derivative that differences could see.
        return
    for k, p in enumerate(given.values()):
        direction, ends = random(*p.shape, seed=9) if p.ndim else torch.ones(()), []
        for sign in (1, -1):
            with torch.no_grad():
                p += sign * h * direction
                ends.append(float(loss(name, given, adjsim.DirectAdjoint())[0]))
                p -= sign * h * direction
        slope = (ends[0] - ends[1]) / (2 * h)
        grad = grads[adjsim.ReversibleAdjoint][k]
        assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        pytest.param("neo-hookean", False, marks=pytest.mark.slow),
        *(
            pytest.param(*row, marks=pytest.mark.marathon)
            for row in itertools.product(MATERIALS, (False, True))
            if row != ("neo-hookean", False)
        ),
    ],
)
def test_compiled_runs_equal_eager_ones(name, exact):
    given, results = numbers(), []
    for compile in (False, True):
        value, found = loss(name, given, adjsim.ReversibleAdjoint(), exact=exact, compile=compile)
        results.append((found, torch.autograd.grad(value, list(given.values()))))
    (eager, expected), (compiled, grads) = results
    assert compiled.stats["compiled_forward"] == "C++"
    assert compiled.stats["compiled_backward"] == "C++"
    if exact:
        assert torch.equal(compiled.final.position, eager.final.position)
    # Sums over the elements of a vertex have another order.
    close(compiled.final.position, eager.final.position, 1e-13)
    for mine, theirs in zip(grads, expected, strict=True):
        close(mine, theirs, 1e-11)


@pytest.mark.parametrize(
    ("name", "steps", "compile"),
    [
        ("neo-hookean", 60, False),
        *(pytest.param(name, 20_000, True, marks=pytest.mark.marathon) for name in MATERIALS),
    ],
)
def test_exact_reversal(name, steps, compile):
    made = dynamics(MATERIALS[name](FREE, parameter(10.0), 0.3))
    found = rolled(made, steps, adjoint=adjsim.ReversibleAdjoint(), exact=True, compile=compile)
    (grad,) = torch.autograd.grad((found.final.position**2).sum(), [made.potential.youngs_modulus])
    assert found.stats["reconstruction_error"] == 0
    assert bool(torch.isfinite(grad))
    assert float((found.final.position.detach() - FREE.vertices).abs().max()) > 0.1


def test_rounded_forces_sum_to_zero():
    rounding = Rounding(torch.full((2, 1, 1, 1), 2.0**-30, dtype=torch.float64))
    batch = torch.stack([moved(SOLID), 1.1 * SOLID.vertices])
    for name in MATERIALS:
        force = adjsim.force(body(name), batch, rounding=rounding).detach()
        assert bool((force.sum(-2) == 0).all()), name
        # At most 24 elements at a vertex, with up to three contributions.
        torch.testing.assert_close(
            force, adjsim.force(body(name), batch), rtol=0, atol=72 * 2.0**-31
        )


# Errors.

WRONG = [
    (lambda: NeoHookean(SOLID, -1.0, 0.3), "youngs_modulus must be positive; got -1"),
    (lambda: NeoHookean(SOLID, 1.0, 0.5), "poissons_ratio must be between -1 and 0.5.*got 0.5"),
    (lambda: NeoHookean(SOLID, 1.0, [0.3, 0.2]), r"poissons_ratio must be one number or \(12,\)"),
    (lambda: NeoHookean(SOLID, 1.0, 0.3, rest_stretch=[1.0]), r"must be \(3,\) or \(12, 3\)"),
    (lambda: NeoHookean(SOLID, 1.0, 0.3, rest_stretch=[1, 1, 0]), "rest_stretch must be positive"),
    (lambda: NeoHookean(meshes.sheet([1, 1], [1, 1]), 1.0, 0.3), "HarmonicBond over mesh.edges"),
    (
        lambda: NeoHookean(SOLID, 1.0, 0.3)(SOLID.vertices[1:]),
        r"has 12 vertices in 3 dimensions; position is \(11, 3\)",
    ),
]


@pytest.mark.parametrize(("make", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_input_is_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_the_saved_state_holds_the_numbers():
    assert set(body("neo-hookean").state_dict()) == {
        "youngs_modulus",
        "poissons_ratio",
        "rest_stretch",
    }
