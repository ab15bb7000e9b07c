"""Generalised Born against OpenMM, differences, known limits, and itself in other loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim import CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint, Splitting
from adjsim.core.rounding import Rounding
from adjsim.core.strain import Strain
from adjsim.potentials.base import force, force_vjp
from adjsim.potentials.bonded.tabulated import ContinuousFunction
from adjsim.potentials.solvent import CustomSolvent, GeneralizedBorn, Necks, Stage
from tests.retracing import forth_and_back
from tests.suites import PotentialContract

# In kJ/mol, nm and elementary charges, as OpenMM's GBSAOBCForce has it; its obc2.xml has another.
OPENMM, OPENMM_CUSTOM = 138.93545764438198, 138.935485
ATOMS = 6


def molecule(seed: int = 0, atoms: int = ATOMS, spread: float = 1.5) -> dict[str, Tensor]:
    """Random positions in angstrom, many closer than their radii, with random numbers."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(atoms, generator=generator, dtype=torch.float64)

    normal = torch.randn(atoms, 4, generator=generator, dtype=torch.float64)
    return {
        "position": spread * normal[:, :3],
        "charge": 0.5 * normal[:, 3],
        "radius": drawn(1.1, 1.9),
        "scale": drawn(0.6, 1.0),
    }


def contained_molecule() -> dict[str, Tensor]:
    """Two of the spheres are large enough to contain others."""
    found = molecule(3, spread=1.0)
    found["radius"][:2] *= 3
    return found


def trainable(found: dict[str, Tensor], **settings: object) -> GeneralizedBorn:
    """A potential with every number a parameter."""
    numbers = {name: nn.Parameter(x.clone()) for name, x in found.items() if name != "position"}
    others = {"solute": 1.5, "solvent": 60.0, "surface": 0.02, "offset": 0.09}
    others |= {"alpha": 1.0, "beta": 0.8, "gamma": 4.85}
    if "necks" in settings:
        others["neck"] = 0.6
    numbers |= {
        name: nn.Parameter(torch.tensor(x, dtype=torch.float64))
        for name, x in others.items()
        if name not in numbers
    }
    return GeneralizedBorn(**numbers, constant=1.4, **settings)


def necked_molecule() -> dict[str, Tensor]:
    """Every atom has a shape of its own, and one a negative scale."""
    found = molecule(4)
    found["scale"][2] *= -1
    generator = torch.Generator().manual_seed(5)
    for name, size in (("alpha", 0.9), ("beta", 0.6), ("gamma", 0.4)):
        drawn = torch.rand(ATOMS, generator=generator, dtype=torch.float64)
        found[name] = size * (0.5 + drawn)
    return found


def necks(atoms: int = ATOMS) -> Necks:
    """Tables that are not symmetric, whose necks end between the atoms."""
    generator = torch.Generator().manual_seed(6)
    depth, place = torch.rand(2, atoms, atoms, generator=generator, dtype=torch.float64)
    return Necks(0.3 * depth, 2.0 + place, reach=0.5, quadratic=0.8, sextic=0.2)


def inside(found: dict[str, Tensor]) -> int:
    """Count pairs (i, j) of which sphere j contains sphere i."""
    rho = found["radius"] - 0.09
    r = torch.cdist(found["position"], found["position"])
    return int((r + rho[:, None] < found["scale"] * rho).fill_diagonal_(False).sum())


# Atoms are in several of its copies.
BOX = ((7.0, 0.0, 0.0), (1.5, 7.0, 0.0), (-1.0, 2.0, 7.0))
CASES = {
    "plain": (molecule(), {}),
    "salt": (molecule(1), {"kappa": 0.3}),
    "cutoff": (molecule(2), {"cutoff": 3.0}),
    "salt and cutoff": (molecule(2), {"cutoff": 3.3, "kappa": 0.3, "box": BOX}),
    "unbounded": (molecule(1), {"bounded": False}),
    "necks": (necked_molecule(), {"necks": necks()}),
    "contained": (contained_molecule(), {}),
    "contained, as in obc2.xml": (contained_molecule(), {"contained": False}),
}


def staged(**options: object) -> CustomSolvent:
    """A sum over pairs, a number that follows from it, and energies of both, with a table."""
    values = nn.Parameter(torch.linspace(1, 0, 5).double() ** 2)
    places = ("", "") if "box" in options else ("+0.1*x*y", "*z")
    return CustomSolvent(
        {
            "I": Stage("f(r)*p2+exp(-r)*p1", pairs=True, exclusions=False),
            "B": Stage("log(2+I^2)*g" + places[0]),
            "J": Stage("B2*exp(-r^2)", pairs=True),
        },
        [Stage("p*B^2-J" + places[1]), Stage("g*B1*B2*J1*J2/(1+r)", pairs=True)],
        {
            "p": nn.Parameter(torch.linspace(0.5, 1.0, ATOMS, dtype=torch.float64)),
            "g": nn.Parameter(torch.tensor(0.7, dtype=torch.float64)),
        },
        tables={"f": ContinuousFunction(values, 0.0, 4.0)},
        exclusions=[[0, 1], [2, 4]],
        unit=1.4,
        length_unit=1.1,
        **options,
    )


BUILT = [pytest.param(trainable(x, **y), x["position"], id=name) for name, (x, y) in CASES.items()]
BUILT += [
    pytest.param(staged(), molecule(2)["position"], id="stages"),
    pytest.param(staged(cutoff=3.3, box=BOX), molecule(2)["position"], id="stages in a box"),
]


@pytest.mark.parametrize(("potential", "position"), BUILT)
class TestSolvent(PotentialContract):
    def test_parameters_against_central_differences(self, potential, position):
        """Of v . F with respect to each number, along a random direction."""
        parameters = dict(potential.named_parameters())
        v, h = torch.randn_like(position), 1e-5
        found = force_vjp(potential, position, list(parameters.values()))[1](v)[1]
        gradients = found.gradient(list(parameters.values()))
        for (name, x), gradient in zip(parameters.items(), gradients, strict=True):
            along = torch.randn_like(x) * x.detach()
            work = []
            for step in (h, -h):
                with torch.no_grad():
                    x += step * along
                    work.append(float((force(potential, position) * v).sum()))
                    x -= step * along
            # Truncation h^2 and rounding 1e-16 / h are below 1e-9 of the work.
            expected = (work[0] - work[1]) / (2 * h)
            scale = 1e-6 * abs(expected) + 1e-8
            assert float((gradient * along).sum()) == pytest.approx(expected, abs=scale), name

    def test_a_batch_has_the_gradients_of_its_systems(self, potential, position):
        parameters = list(potential.parameters())
        batch = torch.stack([position, 1.1 * position])
        v = torch.randn_like(batch)
        value, pullback = force_vjp(potential, batch, parameters)
        along, rest = pullback(v)
        single = []
        for k in range(2):
            one, inner = force_vjp(potential, batch[k], parameters)
            product, found = inner(v[k])
            torch.testing.assert_close(value[k], one, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(along[k], product, rtol=1e-12, atol=1e-12)
            single.append(found.gradient(parameters))
        for mine, a, b in zip(rest.gradient(parameters), *single, strict=True):
            torch.testing.assert_close(mine, a + b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["salt and cutoff", "stages in a box"])
def test_virial_and_strain(name):
    """They are minus derivatives of the energy as box and positions are stretched together."""
    potential, q = next(x.values for x in BUILT if x.id == name)
    rows, none = torch.tensor(BOX, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    none.requires_grad_()

    def energy(e):
        return potential(q + q @ e, box=rows + rows @ e)

    (virial,) = torch.autograd.grad(-energy(none), none)
    torch.testing.assert_close(potential.virial(q), virial, rtol=1e-12, atol=1e-12)
    strain = Strain.of(rows, torch.zeros(1, 1, dtype=torch.float64))
    forces = potential.strained_force(q, strain)
    torch.testing.assert_close(forces[0], potential.force(q), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(forces[1].squeeze(), virial.trace(), rtol=1e-12, atol=1e-12)


def test_cases_contain_what_they_say():
    assert inside(contained_molecule()) > 0
    assert inside(molecule()) == 0


def in_openmm(found: dict[str, Tensor], kind: str, cutoff: float | None, kappa: float) -> object:
    openmm = pytest.importorskip("openmm")
    numbers = zip(
        found["charge"].tolist(),
        (found["radius"] / 10).tolist(),
        found["scale"].tolist(),
        strict=True,
    )
    if kind == "GBSAOBCForce":
        term = openmm.GBSAOBCForce()
        term.setSolventDielectric(78.5)
        for row in numbers:
            term.addParticle(*row)
    else:
        from openmm.app.internal.customgbforces import GBSAOBC2Force

        term = GBSAOBC2Force(SA="ACE", kappa=kappa, cutoff=cutoff)
        for row in numbers:
            term.addParticle(list(row))
        term.finalize()
    if cutoff:
        term.setNonbondedMethod(term.CutoffNonPeriodic)
        term.setCutoffDistance(cutoff)
    system = openmm.System()
    for _ in found["charge"]:
        system.addParticle(1.0)
    system.addForce(term)
    return system


def by_openmm(system, position: Tensor) -> tuple[float, Tensor]:
    """Energy and force on OpenMM's Reference platform, of forces in group 0."""
    openmm = pytest.importorskip("openmm")
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(position.numpy())
    state = context.getState(getEnergy=True, getForces=True, groups={0})
    kilojoule = openmm.unit.kilojoule_per_mole
    forces = state.getForces(asNumpy=True).value_in_unit(kilojoule / openmm.unit.nanometer)
    return state.getPotentialEnergy().value_in_unit(kilojoule), torch.from_numpy(forces.copy())


SYSTEMS = {
    "one atom": (molecule(0, 1), None, 0.0),
    "two atoms": (molecule(1, 2), None, 0.0),
    "overlapping": (molecule(2, 22, 3.0), None, 0.0),
    "contained": (contained_molecule(), None, 0.0),
    "far": (molecule(4, 8, 30.0), None, 0.0),
    # Of which the inverse is no number of float32.
    "cutoff": (molecule(5, 22, 3.0), 0.47, 0.0),
    "salt": (molecule(6, 22, 3.0), None, 1.2),
}


@pytest.mark.parametrize("kind", ["GBSAOBCForce", "obc2.xml"])
@pytest.mark.parametrize("name", list(SYSTEMS))
def test_openmm(name, kind):
    found, cutoff, kappa = SYSTEMS[name]
    if kappa and kind == "GBSAOBCForce":
        kappa = 0.0
    ours = kind == "GBSAOBCForce"
    potential = GeneralizedBorn(
        found["charge"],
        found["radius"] / 10,
        found["scale"],
        constant=OPENMM if ours else OPENMM_CUSTOM,
        offset=0.009,
        probe=0.14,
        surface=2.25936 if ours else 28.3919551 / (4 * math.pi),
        kappa=kappa,
        cutoff=cutoff,
        contained=ours,
    )
    position = found["position"] / 10
    energy, expected = by_openmm(in_openmm(found, kind, cutoff, kappa), position)
    # Both compute in float64; 1e-6 is what the library promises, and 1e-11 what is left.
    assert float(potential(position)) == pytest.approx(energy, rel=1e-11)
    scale = float(expected.abs().max())
    torch.testing.assert_close(potential.force(position), expected, rtol=1e-11, atol=1e-12 * scale)


@pytest.mark.slow
def test_openmm_force_field_file():
    """Alanine dipeptide with the radii and scales of ``implicit/obc2.xml``, at random positions."""
    openmm = pytest.importorskip("openmm")
    from openmm import app

    field = app.ForceField("amber14-all.xml", "implicit/obc2.xml")
    topology = app.Topology()
    chain, before = topology.addChain(), None
    for name in ("ACE", "ALA", "NME"):
        template = field._templates[name]
        residue = topology.addResidue(name, chain)
        atoms = [topology.addAtom(x.name, x.element, residue) for x in template.atoms]
        for i, j in template.bonds:
            topology.addBond(atoms[i], atoms[j])
        by_name = {x.name: x for x in atoms}
        if before is not None:
            topology.addBond(before["C"], by_name["N"])
        before = by_name
    system = field.createSystem(topology, constraints=None)
    (term,) = (x for x in system.getForces() if isinstance(x, openmm.CustomGBForce))
    # The file writes rho and scale rho.
    charge, rho, sphere = torch.tensor(
        [term.getParticleParameters(i) for i in range(term.getNumParticles())], dtype=torch.float64
    ).T
    for x in system.getForces():
        x.setForceGroup(0 if isinstance(x, openmm.CustomGBForce) else 1)
    assert len(charge) == 22
    potential = GeneralizedBorn(
        charge,
        rho + 0.009,
        sphere / rho,
        constant=OPENMM_CUSTOM,
        offset=0.009,
        probe=0.14,
        surface=28.3919551 / (4 * math.pi),
        contained=False,
    )
    position = molecule(7, 22, 0.25)["position"]
    energy, expected = by_openmm(system, position)
    assert float(potential(position)) == pytest.approx(energy, rel=1e-11)
    torch.testing.assert_close(potential.force(position), expected, rtol=1e-10, atol=1e-8)


def test_born_energy_of_an_ion():
    q, radius = 1.7, 2.1
    potential = GeneralizedBorn([q], [radius], [0.8], solute=2.0, solvent=50.0, constant=14.4)
    born = radius - 0.09
    assert float(potential.born_radii(torch.zeros(1, 3))) == pytest.approx(born, rel=1e-15)
    expected = -0.5 * 14.4 * (1 / 2 - 1 / 50) * q * q / born
    assert float(potential(torch.zeros(1, 3))) == pytest.approx(expected, rel=1e-14)
    assert float(potential.force(torch.zeros(1, 3)).abs().max()) == 0


def test_far_charges_interact_as_in_the_solvent():
    """With Coulomb's law inside the solute, what remains is Coulomb's law in the solvent."""
    (q, p), r = (1.0, -0.8), 4e3
    solvated = GeneralizedBorn([q, p], [1.5, 2.0], [0.8, 0.8], constant=14.4, surface=0.02)
    inside = 14.4 * q * p / r**2
    total = float(solvated.force(torch.tensor([[r, 0.0, 0.0], [0.0, 0.0, 0.0]]))[0, 0]) + inside
    # What an atom displaces of the other one's solvent falls with r^-5, 1e-9 of the rest here.
    assert total == pytest.approx(inside / 78.5, rel=1e-7)


def test_surface_is_that_of_a_lone_atom():
    lone = GeneralizedBorn([0.0], [1.5], [0.8], surface=0.02)
    ratio = 1.5 / (1.5 - 0.09)
    expected = 0.02 * 4 * math.pi * (1.5 + 1.4) ** 2 * ratio**6
    assert float(lone(torch.zeros(1, 3))) == pytest.approx(expected, rel=1e-14)


def embedded(found: dict[str, Tensor]) -> CustomSolvent:
    """Atoms whose energy is a root of a sum over their neighbours, as in a metal."""
    return CustomSolvent(
        {"density": Stage("p2*exp(-r)", pairs=True)},
        [Stage("-k*sqrt(density)"), Stage("p1*p2*exp(-2*r)", pairs=True)],
        {"p": nn.Parameter(found["radius"].clone()), "k": nn.Parameter(torch.ones(()).double())},
        exclusions=[[0, 1], [2, 4]],
        cutoff=9.0,
    )


SOLVENTS = {
    "plain": trainable,
    "necks": lambda found: trainable(found, necks=necks()),
    "stages": embedded,
}


def chain(
    exact: bool = False, seed: int = 0, kind: str = "plain"
) -> tuple[adjsim.Langevin, object, Splitting]:
    """Charges in a trap that keep apart, at a temperature where they move by their size."""
    found = molecule(seed, spread=2.0)
    potential = SOLVENTS[kind](found) + adjsim.SoftSphere(0.5, 1.5) + adjsim.Harmonic(0.3)
    dynamics = adjsim.Langevin(potential, mass=12.0, kT=0.3, friction=0.2)
    state = dynamics.init(found["position"], generator=torch.Generator().manual_seed(1))
    return dynamics, state, Splitting("BAOAB", 0.05, exact=exact)


def gradients(adjoint, *, steps: int, compile: bool = False, system=None):
    dynamics, state, solver = system or chain()
    dynamics.zero_grad()
    run = adjsim.simulate(
        dynamics,
        state,
        [0.0, steps * solver.dt],
        solver=solver,
        adjoint=adjoint,
        compile=compile,
        generator=torch.Generator().manual_seed(2),
    )
    run.final.position.square().sum().backward()
    return run, {name: x.grad for name, x in dynamics.named_parameters()}


def agree(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert len(expected) in (2, 10, 11)
    for name, x in expected.items():
        scale = relative * float(x.abs().max())
        torch.testing.assert_close(found[name], x, rtol=0, atol=scale, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("kind", ["necks", pytest.param("stages", marks=pytest.mark.slow)])
def test_adjoints_agree(kind):
    system = chain(kind=kind)
    _, direct = gradients(DirectAdjoint(), steps=10, system=system)
    agree(gradients(CheckpointAdjoint(), steps=10, system=system)[1], direct, 1e-12)
    agree(gradients(ReversibleAdjoint(), steps=10, system=system)[1], direct, 1e-10)


@pytest.mark.parametrize(
    ("exact", "steps", "kind"),
    [
        pytest.param(True, 100_000, "plain", marks=pytest.mark.marathon),
        pytest.param(False, 10, "plain", marks=pytest.mark.marathon),
        pytest.param(True, 200, "necks", marks=pytest.mark.slow),
        pytest.param(True, 200, "stages", marks=pytest.mark.slow),
    ],
)
def test_compiled_equals_eager_and_comes_back(exact, steps, kind):
    """Bit for bit, if the run is exact."""
    system = chain(exact, kind=kind)
    eager, expected = gradients(ReversibleAdjoint(), steps=10, system=system)
    run, found = gradients(ReversibleAdjoint(), steps=10, system=system, compile=True)
    assert run.stats["compiled_forward"] == run.stats["compiled_backward"] == "C++"
    torch.testing.assert_close(run.final.position, eager.final.position, rtol=1e-11, atol=1e-11)
    # Functions differ in their last bits, which a multiple of the lattice's spacing follows.
    agree(found, expected, 1e-9)
    run, found = gradients(ReversibleAdjoint(), steps=steps, system=system, compile=True)
    assert run.stats["reconstruction_error"] == 0 or not exact
    assert all(bool(torch.isfinite(x).all()) for x in found.values())


def test_gradients_through_steps_against_differences():
    dynamics, state, solver = chain()

    def loss() -> Tensor:
        run = adjsim.simulate(
            dynamics,
            state,
            [0.0, 10 * solver.dt],
            solver=solver,
            adjoint=ReversibleAdjoint(),
            generator=torch.Generator().manual_seed(2),
        )
        return run.final.position.square().sum()

    loss().backward()
    for name, x in dynamics.named_parameters():
        along, h, ends = torch.randn_like(x) * x.detach(), 1e-5, []
        for step in (h, -h):
            with torch.no_grad():
                x += step * along
                ends.append(float(loss()))
                x -= step * along
        expected = (ends[0] - ends[1]) / (2 * h)
        # Rounding of the loss, about 1e2, is 1e-9 of it after a division by h.
        found = float((x.grad * along).sum())
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize("steps", [50, pytest.param(2_000, marks=pytest.mark.marathon)])
def test_exact_runs_come_back_bit_for_bit(steps):
    dynamics, state, solver = chain(exact=True)
    before, after, back = forth_and_back(dynamics, state, solver, steps)
    assert float((before.position - after.position).abs().max()) > 0.1
    for field, a, b in zip(before._fields, before, back, strict=True):
        assert torch.equal(a, b), field


def test_rounded_sums_do_not_depend_on_the_order_of_atoms():
    found = molecule(8, 40, 3.0)
    position, order = found.pop("position"), torch.randperm(40)
    rounding = Rounding(torch.full((1, 1, 1), 2.0**-50))
    one = GeneralizedBorn(**found).force(position, rounding)
    other = GeneralizedBorn(**{name: x[order] for name, x in found.items()})
    assert torch.equal(other.force(position[order], rounding), one[order])
    plain = GeneralizedBorn(**found).force(position)
    # Of 40 contributions in each of two sums, rounded by 2^-47, some have factors up to 1e2.
    torch.testing.assert_close(one, plain, rtol=0, atol=1e-10)


def test_numbers_that_are_not_trained_have_no_gradient():
    found = molecule()
    position, charge = found.pop("position"), nn.Parameter(found.pop("charge"))
    fixed = GeneralizedBorn(charge.detach(), **found)
    along, rest = force_vjp(fixed, position, [])[1](torch.ones_like(position))
    assert rest == []
    only = GeneralizedBorn(charge, **found)
    product, deferred = force_vjp(only, position, [charge])[1](torch.ones_like(position))
    torch.testing.assert_close(product, along)
    assert deferred.gradient([charge])[0].shape == (ATOMS,)


WRONG = {
    r"charge, radius and scale must be \(atoms,\).*\(2,\), \(3,\), \(2,\)": {"radius": [1.5] * 3},
    r"radius must be above the offset, 0.09; atom 1 has 0.09": {"radius": [1.5, 0.09]},
    r"gamma must be one number, or one for each atom, \(2,\)": {"gamma": [1.0] * 3},
    r"neck is the weight of necks": {"neck": 0.3},
    r"necks are of 3 atoms and radius of 2": {"necks": Necks(torch.ones(3, 3), torch.ones(3, 3))},
    r"solvent must be at least 1.*got 0.5": {"solvent": 0.5},
    r"solute must be one number": {"solute": [1.0, 2.0]},
    r"probe must be zero or positive": {"probe": -1.4},
    r"kappa must be zero or positive": {"kappa": -0.1},
    r"constant must be finite": {"constant": math.inf},
    r"cutoff must be positive": {"cutoff": 0.0},
}


@pytest.mark.parametrize("message", list(WRONG))
def test_wrong_numbers_are_refused(message):
    given = {"charge": [1.0, -1.0], "radius": [1.5, 1.5], "scale": [0.8, 0.8]}
    with pytest.raises(ValueError, match=message):
        GeneralizedBorn(**{**given, **WRONG[message]})


def test_tables_of_necks_are_checked():
    with pytest.raises(ValueError, match=r"depth and place must be \(atoms, atoms\).*\(2, 3\)"):
        Necks(torch.ones(2, 3), torch.ones(2, 2))
    with pytest.raises(ValueError, match="depth requires grad"):
        Necks(nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2))


def test_another_number_of_atoms_is_refused():
    with pytest.raises(ValueError, match="charge is for 2 atoms and position has 3"):
        GeneralizedBorn([1.0, -1.0], [1.5] * 2, [0.8] * 2)(torch.zeros(3, 3))
