"""Virtual sites: their places, forces through the map to all particles, exact and compiled runs."""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.core.reading import read
from adjsim.core.rounding import Rounding
from adjsim.core.strain import Strain
from adjsim.potentials.pairs.base import pair_paths
from adjsim.potentials.sites.groups import AverageSites, LocalCoordinatesSites, OutOfPlaneSites
from adjsim.potentials.sites.virtual_sites import VirtualSites
from adjsim.potentials.strained import strained_force
from tests.pressure import piston, position, start
from tests.problems import parameter
from tests.retracing import forth_and_back
from tests.sites import ATOMS, SITES, force_field, virtual_sites
from tests.suites import PotentialContract

BOX = torch.tensor([3.6, 3.7, 3.8], dtype=torch.float64)


@pytest.mark.parametrize("position", [position()], ids=[""])
@pytest.mark.parametrize("potential", [force_field(BOX)], ids=[""])
class TestSites(PotentialContract):
    pass


def test_places_are_those_of_plain_formulas():
    sites, q = virtual_sites(), position((2,))
    x = sites(q)
    torch.testing.assert_close(x[:, ATOMS], q, rtol=0, atol=0)

    def place(k, *weights):
        return sum(w * q[:, i] for i, w in weights)

    def rotated(origin, a, b, point):
        c = torch.linalg.cross(a, b)
        axes = [v / v.norm(dim=-1, keepdim=True) for v in (a, torch.linalg.cross(c, a), c)]
        return origin + sum(w * v for w, v in zip(point, axes, strict=True))

    expected = {
        1: place(1, (0, 0.7), (1, 0.3)),
        4: place(4, (1, 0.75), (3, 0.15), (5, 0.1)),
        5: place(5, (4, 1.05), (5, -0.2), (7, 0.15))
        + 0.12 * torch.linalg.cross(q[:, 5] - q[:, 4], q[:, 7] - q[:, 4]),
        9: rotated(
            q[:, 6] + 0.1 * (q[:, 2] - q[:, 6]),
            (q[:, 2] + q[:, 7]) / 2 - q[:, 6],
            q[:, 7] - q[:, 2],
            (0.1, -0.2, 0.15),
        ),
        10: rotated(
            q[:, 3] + 0.1 * (q[:, 7] - q[:, 3]),
            place(10, (2, 1.0), (7, 0.2), (3, -1.2)),
            q[:, 1] - q[:, 7],
            (-0.1, 0.2, 0.1),
        ),
    }
    for k, where in expected.items():
        torch.testing.assert_close(x[:, k], where, rtol=1e-14, atol=1e-14)


def test_the_force_is_that_on_all_particles_through_the_map():
    module, q = force_field(BOX), position()
    x = module.sites(q)
    on_all = sum(adjsim.force(part, x) for part in module.parts)
    (expected,) = torch.autograd.grad(module.sites(leaf := q.requires_grad_()), leaf, on_all)
    torch.testing.assert_close(adjsim.force(module, q.detach()), expected, rtol=1e-12, atol=1e-12)
    assert list(pair_paths(module, q)) == ["LennardJonesMixture 1"]


def test_averages_are_stretched_with_their_atoms():
    """So W of averages is that of all particles, to the last bit."""
    sites = VirtualSites(9, one=AverageSites([8], [[0, 1, 2]], [0.3, 0.1]))
    pairs = adjsim.LennardJones(0.7, 0.9, cutoff=1.6, box=BOX, exclusions=[[8, 0], [8, 1], [8, 2]])
    module = read(type(force_field(BOX))(sites, pairs=pairs))
    q, strain = position(), Strain(torch.full((1, 3), 0.03, dtype=torch.float64))
    along = strained_force(module, q, strain)[1]
    assert torch.equal(along, strained_force(read(pairs), sites(q), strain)[1])


def test_forward_mode_and_vmap():
    sites, q, v = virtual_sites(), position((3,)), torch.randn(3, 8, 3, dtype=torch.float64)
    _, along = torch.func.jvp(sites, (q,), (v,))
    jacobian = torch.func.vmap(torch.func.jacrev(sites))(q)
    torch.testing.assert_close(
        along, torch.einsum("bpaqc,bqc->bpa", jacobian, v), rtol=1e-12, atol=1e-12
    )


def test_axes_without_a_direction_are_zero():
    """With all atoms on a line, or two of them at one place, energies and forces are finite."""
    line = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]], dtype=torch.float64)
    for q in (line, line[[0, 0, 2]], line[[0, 0, 0]]):
        point = parameter([0.3, 0.2, 0.1])
        sites = VirtualSites(
            4,
            one=LocalCoordinatesSites([3], [[0, 1, 2]], point, [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]),
        )
        module = type(force_field(None))(sites, centre=adjsim.Harmonic(1.0))
        x = sites(q)
        along = float(q[1, 0]) > 0
        torch.testing.assert_close(x[3], torch.tensor([0.3 * along, 0, 0], dtype=torch.float64))
        assert bool(torch.isfinite(adjsim.force(module, q)).all())
        q = q.clone().requires_grad_()
        module(q).backward()
        assert bool(torch.isfinite(q.grad).all())
        assert bool(torch.isfinite(point.grad).all())


@pytest.mark.slow
def test_rounded_forces_are_multiples_and_keep_their_sum():
    module, q, unit = read(force_field(BOX)), position((2,)), 2.0**-20
    rounding = Rounding(torch.full((2, 1, 1, 1), unit, dtype=torch.float64))
    with torch.no_grad():
        rounded, smooth = module.force(q, rounding), module.force(q)
        value, _ = module.force_vjp(q, [], rounding)
        on_all = sum(part.force(module.sites(q), rounding) for part in module.parts)
    assert torch.equal(rounded, value)
    assert torch.equal(rounded, (rounded / unit).round() * unit)
    assert torch.equal(rounded.sum(-2), on_all.sum(-2))
    # Each of about twenty contributions to an atom is off by half a unit.
    torch.testing.assert_close(rounded, smooth, rtol=0, atol=20 * unit)


def hamiltonian():
    dynamics = adjsim.Hamiltonian(force_field(BOX), 1.3)
    return dynamics, dynamics.init(position(), 0.3 * torch.randn(8, 3, dtype=torch.float64))


@pytest.mark.slow
def test_exact_steps_come_back():
    dynamics, state = hamiltonian()
    before, after, found = forth_and_back(
        dynamics, state, adjsim.Splitting("BAB", 0.01, exact=True), 40
    )
    assert float((after.position - before.position).abs().max()) > 0.03
    assert all(map(torch.equal, found, before))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sites", marks=pytest.mark.slow),
        pytest.param("turned sites", marks=pytest.mark.marathon),
    ],
)
def test_exact_steps_in_boxes_that_move_come_back(kind):
    dynamics = piston(kind, "each", tau=3.0)
    before, after, found = forth_and_back(
        dynamics, start(dynamics, (2,)), adjsim.Splitting(dynamics.scheme, 0.01, exact=True), 40
    )
    assert float((after.strain - before.strain).abs().max()) > 1e-4
    assert all(map(torch.equal, found, before))


def gradients(dynamics, state, solver, **options):
    dynamics.zero_grad()
    run = adjsim.simulate(dynamics, state, [0.0, 10 * solver.dt], solver=solver, **options)
    (run.final.position.square().sum() + run.final.momentum[:, 0].sum()).backward()
    return run, {name: p.grad.clone() for name, p in dynamics.named_parameters()}


@pytest.mark.marathon
@pytest.mark.parametrize("exact", [False, True])
def test_compiled_steps_equal_eager_ones(exact):
    dynamics, state = hamiltonian()
    solver = adjsim.Splitting("BAB", 0.01, exact=exact)
    options = {"adjoint": adjsim.ReversibleAdjoint()}
    eager, expected = gradients(dynamics, state, solver, **options)
    compiled, found = gradients(dynamics, state, solver, compile=True, **options)
    direct, others = gradients(dynamics, state, solver)
    # The rest is C++.
    for name in ("compiled_forward", "compiled_backward"):
        assert compiled.stats[name].count("default (") == compiled.stats[name].count("adjsim.mesh_")
    if exact:
        assert torch.equal(compiled.position, eager.position)
        assert torch.equal(direct.position, eager.position)
    torch.testing.assert_close(compiled.position, eager.position, rtol=1e-12, atol=1e-12)
    assert any(name.startswith("potential.sites.local") for name in found)
    for name, grad in expected.items():
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(found[name], grad, rtol=0, atol=1e-10 * scale)
        torch.testing.assert_close(others[name], grad, rtol=0, atol=1e-10 * scale)


@pytest.mark.slow
def test_numbers_of_sites_against_central_differences():
    """Through ten steps, in a box."""
    dynamics, state = hamiltonian()
    solver, h = adjsim.VelocityVerlet(0.01), 1e-5
    _, found = gradients(dynamics, state, solver, adjoint=adjsim.ReversibleAdjoint())
    for name, p in dynamics.potential.sites.named_parameters():
        direction = torch.randn(p.shape, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                p.add_(sign * h * direction)
                final = adjsim.simulate(dynamics, state, [0.0, 0.1], solver=solver).final
                ends.append(float(final.position.square().sum() + final.momentum[:, 0].sum()))
                p.sub_(sign * h * direction)
        along = float((found[f"potential.sites.{name}"] * direction).sum())
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(along, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VirtualSites(4), "at least one group"),
        (
            lambda: VirtualSites(
                4, a=AverageSites([3], [[0, 1]], [0.5]), b=AverageSites([3], [[0, 1]], [0.5])
            ),
            "particle 3 is a virtual site twice",
        ),
        (lambda: VirtualSites(3, a=AverageSites([3], [[0, 1]], [0.5])), "there are 3 particles"),
        (
            lambda: VirtualSites(4, a=AverageSites([3], [[0, 3]], [0.5])),
            "follows atom 3, .* 3 atoms",
        ),
        (lambda: AverageSites([3, 4], [[0, 1]], [0.5]), "one for each site"),
        (lambda: AverageSites([3], [[0, 0]], [0.5]), "names an atom twice"),
        (lambda: AverageSites([3], [[0, 1]], [0.5, 0.1]), r"weight must be \(1,\)"),
        (lambda: OutOfPlaneSites([3], [[0, 1, 2]], [0.5, 0.1], [0.1, 0.2]), "cross must be"),
        (lambda: virtual_sites()(torch.zeros(14, 3)), "14 atoms, .* 8: give the atoms with mass"),
    ],
)
def test_wrong_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sites_that_change_are_refused():
    module = force_field(None)
    module.sites.two.site.fill_(2)
    with pytest.raises(ValueError, match="particles of virtual sites have changed"):
        module(position())
    assert SITES[0] == 1
