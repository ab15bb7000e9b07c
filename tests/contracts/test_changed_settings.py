"""A setting that changes after construction is followed, or refused as the constructor would."""

import pytest
import torch
from torch import nn

import adjsim
from adjsim.meshes import Mesh
from adjsim.potentials import (
    Coulomb,
    Ewald,
    ForceFieldPotential,
    GeneralizedBorn,
    Mie,
    ParticleMeshEwald,
    ScaledPairs,
    Switched,
)
from adjsim.potentials.contact import Cylinder, Plane
from adjsim.potentials.dispersion import DispersionCorrection
from adjsim.potentials.elastic import NeoHookean
from adjsim.potentials.noble import LennardJonesMixture

BOX = torch.full((3,), 6.0, dtype=torch.float64)


def positions(atoms=6):
    generator = torch.Generator().manual_seed(1)
    sites = torch.cartesian_prod(*[torch.arange(2.0, dtype=torch.float64)] * 3)[:atoms] * 1.6
    return sites + 0.1 * torch.randn(atoms, 3, generator=generator, dtype=torch.float64)


def mixture(species=(0, 1, 0, 1, 1, 0), cutoff=2.5):
    return LennardJonesMixture(list(species), [1.0, 0.5], [1.0, 1.2], cutoff=cutoff, box=BOX)


def agree(found, fresh):
    q = positions()
    with torch.no_grad():
        torch.testing.assert_close(found(q), fresh(q), rtol=1e-14, atol=0)
        force = adjsim.force(fresh, q)
        torch.testing.assert_close(adjsim.force(found, q), force, rtol=1e-13, atol=1e-14)


def test_the_dispersion_correction_follows_its_potential():
    pair = mixture()
    found = DispersionCorrection(pair)
    found(positions())
    pair.cutoff = 2.9
    agree(found, DispersionCorrection(mixture(cutoff=2.9)))
    pair.species.zero_()
    agree(found, DispersionCorrection(mixture((0,) * 6, 2.9)))


def test_the_switch_of_a_dispersion_correction_ends_at_the_cutoff():
    pair = mixture()
    found = DispersionCorrection(pair, start=2.0)
    pair.cutoff = 1.9
    with pytest.raises(ValueError, match="start must be positive and at most the cutoff"):
        found(positions())


CHARGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize("kind", [Ewald, ParticleMeshEwald])
def test_a_repeated_exclusion_counts_once(kind):
    found = kind(CHARGES, box=BOX, cutoff=2.5, exclusions=[(0, 1)])
    found(positions())
    found.exclusions = torch.tensor([[3, 2], [3, 2], [1, 0]])
    agree(found, kind(CHARGES, box=BOX, cutoff=2.5, exclusions=[(0, 1), (2, 3)]))


@pytest.mark.parametrize("kind", [Ewald, ParticleMeshEwald])
@pytest.mark.parametrize("change", [{"cutoff": 2.9}, {"tolerance": 1e-6}, {"alpha": 1.3}], ids=str)
def test_alpha_follows_the_cutoff_unless_it_is_given(kind, change):
    found = kind(CHARGES, box=BOX, cutoff=2.5)
    found(positions())
    for name, value in change.items():
        setattr(found, name, value)
    agree(found, kind(CHARGES, **{"box": BOX, "cutoff": 2.5, **change}))


def test_a_shared_buffer_that_is_replaced_is_refused():
    charge = CHARGES.clone()
    found = ForceFieldPotential(a=Coulomb(charge), b=GeneralizedBorn(charge, [1.5] * 6, [0.8] * 6))
    found.to(torch.float32).to(torch.float64)
    found(positions())
    found.a.charge = 2 * found.a.charge
    with pytest.raises(ValueError, match=r"a\.charge and b\.charge were one tensor and are two"):
        found(positions())


def test_species_of_scaled_pairs_may_not_change():
    pair = mixture()
    found = ScaledPairs(pair, [(0, 1), (2, 3)])
    found(positions())
    pair.species.copy_(torch.tensor([1, 1, 0, 1, 1, 0]))
    with pytest.raises(ValueError, match="species of the potential have changed"):
        found(positions())


def born(**options):
    return GeneralizedBorn(CHARGES, [1.5] * 6, [0.8] * 6, **options)


def soft():
    mesh = Mesh(
        torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=torch.float64),
        tetrahedra=torch.tensor([[0, 1, 2, 3]]),
    )
    return NeoHookean(mesh, 1.0, 0.3)


def spoil(module, name, value):
    held = getattr(module, name, None)
    if isinstance(held, torch.Tensor):
        held.data.fill_(value)
    else:
        setattr(module, name, value)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (soft, {"poissons_ratio": 0.6}, "poissons_ratio must be between"),
        (soft, {"youngs_modulus": -1.0}, "youngs_modulus must be positive"),
        (born, {"cutoff": 3.0, "kappa": 0.1}, "together with kappa"),
        (born, {"radius": 0.05}, "radius must be above the offset"),
        (born, {"solvent": 0.5}, "solvent must be at least 1"),
        (
            lambda: adjsim.LennardJones(cutoff=2.5, box=BOX, truncation=Switched(2.0)),
            {"cutoff": 1.9},
            "start",
        ),
        (lambda: adjsim.LennardJones(cutoff=2.5, box=BOX), {"cutoff": -1.0}, "cutoff must be"),
        (lambda: Mie(1.0, 1.0, 12.0, 6.0), {"exponent": 5.0}, "attraction must be"),
        (lambda: Ewald(CHARGES, box=BOX, cutoff=2.5), {"tolerance": 0.7}, "tolerance"),
    ],
)
def test_what_the_constructor_refuses_is_refused_later(make, changes, message):
    potential = make()
    q = positions(4 if make is soft else 6)
    potential(q)
    for name, value in changes.items():
        spoil(potential, name, value)
    with pytest.raises(ValueError, match=message):
        potential(q)
    with pytest.raises(ValueError, match=message):
        adjsim.force(potential, q)


def test_the_depth_of_a_mie_potential_follows_its_exponents():
    found = Mie(1.0, 1.0, 12.0, 6.0)
    found(positions())
    found.exponent = 9.0
    agree(found, Mie(1.0, 1.0, 9.0, 6.0))


@pytest.mark.parametrize(
    ("surface", "name"),
    [
        (lambda: Plane([0.0, 0.0, 1.0]), "normal"),
        (lambda: Cylinder([0.0, 0.0, 0.0], [0.0, 0.0, 1.0], 1.0), "axis"),
    ],
)
def test_a_surface_without_a_direction_is_refused(surface, name):
    class Above(nn.Module):
        def __init__(self):
            super().__init__()
            self.surface = surface()

        def forward(self, position):
            gap = self.surface.coordinate(tuple(x.unsqueeze(-2) for x in position.unbind(-1)))
            return gap.value().square().sum((-1, -2))

    potential = Above()
    dynamics = adjsim.Hamiltonian(potential)
    start = dynamics.init(positions(), torch.zeros(6, 3))
    getattr(potential.surface, name).data.zero_()
    with pytest.raises(ValueError, match=f"{name} must not be zero"):
        adjsim.simulate(dynamics, start, [0.0, 0.1], solver=adjsim.VelocityVerlet(0.1))
