"""A setting that changes after construction is followed, or refused as the constructor would."""

import itertools

import pytest
import torch
from torch import nn

import adjsim
from adjsim import meshes
from adjsim.meshes import Mesh
from adjsim.potentials import (
    Actuated,
    Coulomb,
    CubicSpline,
    Cylinder,
    Ewald,
    ForceFieldPotential,
    GeneralizedBorn,
    GraphPotential,
    Gravity,
    HarmonicBond,
    Harmonics,
    MessagePassing,
    Mie,
    NeoHookean,
    PairNetwork,
    ParticleContact,
    ParticleMeshEwald,
    PeriodicTorsion,
    PiecewiseLinear,
    Plane,
    ReactionField,
    ScaledPairs,
    Switched,
    Wolf,
)
from adjsim.potentials.pairs.noble import LennardJonesMixture
from adjsim.potentials.pairs.tail import DispersionCorrection
from tests.problems import parameter, slow_but

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


@pytest.mark.slow
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


@pytest.mark.slow
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
        (born, {"neck": 0.3}, "neck is the weight of necks"),
        (born, {"radius": 0.05}, "radius must be above the offset"),
        (born, {"solvent": 0.5}, "solvent must be at least 1"),
        (lambda: born(cutoff=2.0, box=BOX), {"cutoff": 9.0}, "cutoff 9 is above half"),
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


@pytest.mark.slow
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


def bond():
    return HarmonicBond([(0, 1), (2, 3), (4, 5)], parameter([1.0, 2.0]), 1.0, types=[0, 1, 1])


def pairs(**options):
    table = torch.rand(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pair = adjsim.LennardJones(table + table.T, 1.0, cutoff=2.5, box=BOX)
    return ScaledPairs(pair, [(0, 1), (2, 3)], **options)


def torsion(**numbers):
    found = {"k": 1.0, "periodicity": 3, "phase": 0.5, **numbers}
    return PeriodicTorsion([(0, 1, 2, 3)], **found)


def graph():
    return GraphPotential(MessagePassing(2.5), 2.5, box=BOX)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (bond, lambda x: x.index.copy_(x.index.flip(0)), "index of HarmonicBond has changed"),
        (bond, lambda x: x.types.copy_(torch.tensor([1, 1, 0])), "types of HarmonicBond"),
        (bond, lambda x: setattr(x, "k", parameter([1.0, 2.0, 3.0])), "is for 3 types"),
        (pairs, lambda x: setattr(x.potential, "box", BOX * 1.5), "box"),
        (
            pairs,
            lambda x: setattr(x.potential, "epsilon", torch.ones(8, 8, dtype=torch.float64)),
            "another shape",
        ),
        (torsion, lambda x: x.periodicity.zero_(), "periodicity must be positive"),
        (torsion, lambda x: x.phase.fill_(180.0), "phase must be in radians"),
        (graph, lambda x: setattr(x, "skin", -0.5), "skin must be zero or positive"),
        (graph, lambda x: setattr(x, "cutoff", -0.5), "cutoff must be positive"),
        (
            lambda: Ewald(CHARGES, box=BOX, cutoff=2.5),
            lambda x: setattr(x, "skin", -1.0),
            "skin must be",
        ),
        (
            lambda: ParticleMeshEwald(CHARGES, box=BOX, cutoff=2.5),
            lambda x: setattr(x, "order", 3),
            "order must be from",
        ),
        (
            lambda: Wolf(CHARGES, 0.3, cutoff=2.5),
            lambda x: setattr(x, "alpha", -0.5),
            "alpha must be zero or positive",
        ),
        (
            lambda: PairNetwork(4, 2.5),
            lambda x: setattr(x, "cutoff", 2.0),
            "basis of the network ends at",
        ),
        (
            lambda: ParticleContact(0.9, 1.0),
            lambda x: setattr(x, "cutoff", 1.5),
            r"at least the largest sum of two radii, 1\.8; it is 1\.5",
        ),
        (
            lambda: adjsim.LennardJones(1.0, 1.0),
            lambda x: setattr(x, "epsilon", torch.ones(6, dtype=torch.float64)),
            "must be a number or",
        ),
        (mixture, lambda x: setattr(x, "mixing", lambda e, s, f, t: (e + 2 * f, s + t)), "symm"),
    ],
)
def test_a_setting_that_no_longer_fits_is_refused(make, change, message):
    potential = make()
    potential(positions())
    with torch.no_grad():
        change(potential)
    with pytest.raises(ValueError, match=message):
        adjsim.force(potential, positions())


@pytest.mark.slow
def test_the_reaction_field_follows_its_cutoff_and_permittivity():
    found = ReactionField(CHARGES, 80.0, cutoff=2.0)
    found(positions())
    found.cutoff, found.permittivity = 1.5, 4.0
    agree(found, ReactionField(CHARGES, 4.0, cutoff=1.5))


def test_truncated_pairs_follow_a_cutoff_that_is_given_later():
    def make(cutoff):
        pair = adjsim.LennardJones(1.0, 1.0, cutoff=cutoff)
        return ScaledPairs(pair, [(0, 1), (2, 5)], truncated=True)

    found = make(None)
    found(positions())
    found.potential.cutoff = 1.7
    agree(found, make(1.7))


def test_a_signal_may_not_move_a_number_out_of_its_range():
    signal = PiecewiseLinear([0.0, 1.0], [0.3, 0.5])
    potential = Actuated(ParticleContact(0.3, 1.0, cutoff=0.7), radius=signal)
    adjsim.force(potential, positions(), 0.0)
    with pytest.raises(ValueError, match=r"largest sum of two radii, 1; it is 0\.7"):
        adjsim.force(potential, positions(), 1.0)


RISING = PiecewiseLinear([0.0, 0.2, 0.3, 0.5], parameter([1.0, 1.2, -0.5, 1.0]))


LEAVING = {
    "epsilon must not be": lambda: Actuated(adjsim.LennardJones(1.0, 0.5), epsilon=RISING),
    "youngs_modulus must be positive": lambda: Actuated(
        NeoHookean(meshes.box((1, 1, 1), (1, 1, 1)), 9.0, 0.3), youngs_modulus=RISING
    ),
    "poissons_ratio must be between": lambda: Actuated(
        NeoHookean(meshes.box((1, 1, 1), (1, 1, 1)), 9.0, 0.3),
        poissons_ratio=PiecewiseLinear([0.0, 0.3, 0.5], [0.3, 0.6, 0.3]),
    ),
}


@pytest.mark.parametrize(
    ("message", "compiled", "exact"),
    slow_but(
        # Which number leaves its range does not depend on how the steps run.
        lambda message, compiled, exact: "epsilon" in message or not (compiled or exact),
        itertools.product(LEAVING, [False, True], [False, True]),
        marathon=lambda message, compiled, exact: True,
    ),
)
def test_a_signal_that_leaves_the_range_in_between_stops_the_run(message, compiled, exact):
    dynamics = adjsim.Hamiltonian(LEAVING[message]())
    start = dynamics.init(positions(8), torch.zeros(8, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=message):
        adjsim.simulate(
            dynamics, start, [0.0, 0.1, 0.6], solver=adjsim.Splitting("BAB", 0.01, exact=exact),
            adjoint=adjsim.ReversibleAdjoint(), compile=compiled,
        )  # fmt: skip


def reshaped(name, shape):
    return lambda module: setattr(module, name, torch.ones(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (lambda: Coulomb(CHARGES), reshaped("charge", (6, 1)), r"charge must be \(atoms,\)"),
        (
            lambda: NeoHookean(meshes.box((1, 1, 1), (1, 1, 1)), 9.0, 0.3),
            reshaped("youngs_modulus", (5, 1)),
            "youngs_modulus must be one number",
        ),
        (
            lambda: adjsim.PositionRestraint([0, 1], 1.0, torch.zeros(2, 3)),
            reshaped("position", (1, 3)),
            r"position must be \(2, dim\)",
        ),
        (lambda: Gravity(1.0, 9.81), reshaped("g", (3,)), "g must be one number"),
        (
            lambda: Gravity(1.0, 9.81, direction=[0.0, 0.0, 1.0]),
            lambda p: p.direction.zero_(),
            "direction must not be zero",
        ),
        (
            lambda: adjsim.LennardJones(1.0, 1.0, exclusions=[(0, 1)]),
            lambda p: p.exclusions.sub_(1),
            r"exclusions have the pair \(-1, 0\)",
        ),
    ],
)
def test_a_shape_or_a_number_that_the_constructor_refuses_is_refused_later(make, change, message):
    potential = make()
    adjsim.force(potential, positions(8) if isinstance(potential, NeoHookean) else positions())
    change(potential)
    with pytest.raises(ValueError, match=message):
        adjsim.force(potential, positions(8) if isinstance(potential, NeoHookean) else positions())


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (
            lambda: CubicSpline([0.0, 1.0], [0.0, 1.0], slopes=0.0),
            reshaped("slopes", (3,)),
            "slopes must be",
        ),
        (
            lambda: Harmonics([1.0, 2.0], 1.0),
            reshaped("frequency", (3,)),
            "frequency must be one number",
        ),
        (
            lambda: PiecewiseLinear([0.0, 1.0], [0.0, 1.0]),
            lambda x: x.times.neg_(),
            "increasing numbers",
        ),
    ],
)
def test_a_signal_checks_its_numbers_when_it_is_evaluated(make, change, message):
    signal = make()
    signal(0.3)
    change(signal)
    with pytest.raises(ValueError, match=message):
        signal(0.3)


@pytest.mark.parametrize(
    ("dynamics", "change", "message"),
    [
        (lambda p: adjsim.NoseHooverChain(p), lambda d: setattr(d, "dof", -3.0), "dof must be"),
        (lambda p: adjsim.Bussi(p), lambda d: setattr(d, "dof", 2.5), "dof"),
        (
            lambda p: adjsim.OverdampedLangevin(p),
            lambda d: setattr(d, "kT", torch.ones(3, dtype=torch.float64)),
            "kT must be one number",
        ),
        (
            lambda p: adjsim.Bussi(p),
            lambda d: setattr(d, "tau", torch.ones(3, dtype=torch.float64)),
            "tau must be one number",
        ),
    ],
)
def test_numbers_of_a_whole_system_are_checked_at_each_run(dynamics, change, message):
    found = dynamics(adjsim.Harmonic(1.0))
    start = found.init(positions(), *([] if "Over" in type(found).__name__ else [positions()]))
    change(found)
    schemes = {"NoseHooverChain": "NBABN", "Bussi": "RBABR"}
    solver = (
        adjsim.Splitting(schemes[type(found).__name__], 0.1)
        if type(found).__name__ in schemes
        else adjsim.EulerMaruyama(0.1)
    )
    with pytest.raises((ValueError, TypeError), match=message):
        adjsim.simulate(found, start, [0.0, 0.1], solver=solver, generator=0)
