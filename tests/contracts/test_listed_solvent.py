"""Solvents whose stages are summed over a neighbour list, against all pairs and OpenMM."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import adjsim
from adjsim import ReversibleAdjoint, Splitting
from adjsim.core import box
from adjsim.potentials.base import force, force_vjp
from adjsim.potentials.solvent import CustomSolvent, GeneralizedBorn, Stage
from tests.contracts.test_solvent import (
    BOX,
    OPENMM,
    by_openmm,
    gradients,
    in_openmm,
    molecule,
    necked_molecule,
    necks,
    trainable,
)
from tests.retracing import forth_and_back
from tests.suites import PotentialContract

ATOMS = 24


@pytest.fixture
def lists(monkeypatch):
    """Lists of systems of any size."""
    monkeypatch.setattr(box, "LISTED_WITHOUT_BOX", 1)
    monkeypatch.setattr(box, "_smallest", lambda share: 1)


def staged(**settings: object) -> CustomSolvent:
    """Stages of pairs and of atoms, of functions with corners, one of them without exclusions."""
    place = "" if "box" in settings else "*z"
    return CustomSolvent(
        {
            "I": Stage("exp(-r)*p2+max(r,p1)*p1/(1+r^2)", pairs=True, exclusions=False),
            "B": Stage("log(2+I^2)*g"),
            "J": Stage("B2*exp(-r^2)*step(2-r)+abs(B1-B2)", pairs=True),
        },
        [Stage("p*B^2-J" + place), Stage("g*B1*B2*J1*J2/(1+r)+exp(-r)", pairs=True)],
        {
            "p": nn.Parameter(torch.linspace(0.5, 1.0, ATOMS, dtype=torch.float64)),
            "g": nn.Parameter(torch.tensor(0.7, dtype=torch.float64)),
        },
        exclusions=[[0, 1], [2, 4]],
        unit=1.4,
        length_unit=1.1,
        **settings,
    )


def embedded() -> CustomSolvent:
    """Atoms whose energy is a root of a sum over their neighbours, as in a metal."""
    return CustomSolvent(
        {"density": Stage("p2*exp(-r)", pairs=True)},
        [Stage("-p*sqrt(0.1+density)")],
        {"p": nn.Parameter(torch.linspace(0.5, 1.0, ATOMS, dtype=torch.float64))},
        exclusions=[[0, 1], [2, 4]],
        cutoff=3.0,
    )


def born(**settings: object) -> GeneralizedBorn:
    """With every number a parameter, of as many atoms as the others."""
    found = molecule(2, ATOMS)
    if "necks" in settings:
        few = necked_molecule()
        shape = {name: few[name].repeat(4) for name in ("alpha", "beta", "gamma", "scale")}
        found |= shape
    return trainable(found, **settings)


POTENTIALS = {
    "embedded": embedded,
    "stages in a box": lambda: staged(cutoff=3.3, box=BOX),
    "stages": lambda: staged(cutoff=3.0),
    "salt in a box": lambda: born(cutoff=3.2, kappa=0.3, box=(7.0, 8.0, 9.0), contained=False),
    "necks in a box": lambda: born(cutoff=3.3, necks=necks(ATOMS), box=BOX),
}
KINDS = [
    "embedded",
    pytest.param("stages in a box", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.marathon) for name in list(POTENTIALS)[2:]),
]
POSITION = molecule(2, ATOMS, 2.5)["position"]


def evaluated(potential, position: Tensor, v: Tensor, virial: bool) -> list[Tensor]:
    """Energy, force, product, gradients and virial."""
    parameters = list(potential.parameters())
    value, pullback = force_vjp(potential, position, parameters)
    along, rest = pullback(v)
    found = rest if isinstance(rest, list) else rest.gradient(parameters)
    work = [potential.virial(position)] if virial else []
    return [potential(position).detach(), value, along, *found, *work]


@pytest.mark.parametrize("name", KINDS)
def test_a_list_has_the_sums_of_all_pairs(name, lists, monkeypatch):
    """Of a batch, also where two lists differ by their skins: these have the same bits."""
    batch = torch.stack([POSITION, 1.1 * POSITION])
    v, virial = torch.randn_like(batch), "box" in name
    near = POTENTIALS[name]()
    assert near.path(batch) == near.path(batch, compiled=True) == "neighbour list"
    found = evaluated(near, batch, v, virial)
    near.skin = 0.01
    for one, other in zip(found, evaluated(near, batch, v, virial), strict=True):
        assert torch.equal(one, other)
    monkeypatch.undo()
    every = POTENTIALS[name]()
    assert every.path(batch) == "all pairs, by torch"
    for one, other in zip(found, evaluated(every, batch, v, virial), strict=True):
        scale = 1e-12 * float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=scale)


@pytest.mark.marathon
@pytest.mark.usefixtures("lists")
@pytest.mark.parametrize("potential", [staged(cutoff=3.0), born(cutoff=3.3, box=BOX)])
@pytest.mark.parametrize("position", [POSITION])
class TestListed(PotentialContract):
    def test_gradients_against_central_differences(self, potential, position):
        parameters, v, h = dict(potential.named_parameters()), torch.randn_like(position), 1e-5
        found = force_vjp(potential, position, list(parameters.values()))[1](v)[1]
        for (name, x), gradient in zip(parameters.items(), found, strict=True):
            along, work = torch.randn_like(x) * x.detach(), []
            for step in (h, -h):
                with torch.no_grad():
                    x += step * along
                    work.append(float((force(potential, position) * v).sum()))
                    x -= step * along
            expected = (work[0] - work[1]) / (2 * h)
            scale = 1e-6 * abs(expected) + 1e-8
            assert float((gradient * along).sum()) == pytest.approx(expected, abs=scale), name


def run_of(name: str, exact: bool) -> tuple[adjsim.Langevin, object, Splitting]:
    potential = POTENTIALS[name]() + adjsim.SoftSphere(0.5, 1.5) + adjsim.Harmonic(0.3)
    dynamics = adjsim.Langevin(potential, mass=12.0, kT=0.3, friction=0.2)
    grid = 1.9 * torch.cartesian_prod(*3 * [torch.arange(3).double()])[:ATOMS]
    state = dynamics.init(grid + 0.05 * POSITION, generator=torch.Generator().manual_seed(1))
    return dynamics, state, Splitting("BAOAB", 0.05, exact=exact)


@pytest.mark.usefixtures("lists")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("embedded", marks=pytest.mark.marathon),
        pytest.param("salt", marks=pytest.mark.slow),
    ],
)
def test_exact_runs_come_back_and_compiled_ones_agree(name, monkeypatch):
    monkeypatch.setitem(POTENTIALS, "salt", lambda: born(cutoff=3.3, kappa=0.3))
    dynamics, state, solver = run_of(name, exact=True)
    before, after, back = forth_and_back(dynamics, state, solver, 50)
    assert float((before.position - after.position).abs().max()) > 0.1
    for field, a, b in zip(before._fields, before, back, strict=True):
        assert torch.equal(a, b), field
    system = dynamics, state, solver
    eager, expected = gradients(ReversibleAdjoint(), steps=10, system=system)
    run, found = gradients(ReversibleAdjoint(), steps=10, system=system, compile=True)
    assert "neighbour list" in run.stats["pairs"].values()
    assert "pair_sums" in run.stats["compiled_forward"]
    assert run.stats["reconstruction_error"] == eager.stats["reconstruction_error"] == 0
    for key, x in expected.items():
        scale = 1e-9 * float(x.abs().max())
        torch.testing.assert_close(found[key], x, rtol=0, atol=scale)


@pytest.mark.slow
@pytest.mark.usefixtures("lists")
def test_lists_against_openmm():
    found = molecule(5, ATOMS, 3.0)
    potential = GeneralizedBorn(
        found["charge"],
        found["radius"] / 10,
        found["scale"],
        constant=OPENMM,
        offset=0.009,
        probe=0.14,
        surface=2.25936,
        cutoff=0.47,
    )
    position = found["position"] / 10
    assert potential.path(position) == "neighbour list"
    energy, expected = by_openmm(in_openmm(found, "GBSAOBCForce", 0.47, 0.0), position)
    assert float(potential(position)) == pytest.approx(energy, rel=1e-11)
    scale = float(expected.abs().max())
    torch.testing.assert_close(potential.force(position), expected, rtol=1e-11, atol=1e-12 * scale)


@pytest.mark.usefixtures("lists")
def test_positions_that_are_no_numbers_are_no_numbers_in_their_system_alone():
    potential, batch = embedded(), torch.stack([POSITION, POSITION])
    batch[1, 3, 0] = math.nan
    energy, value = potential(batch).detach(), potential.force(batch).detach()
    assert torch.equal(energy[0], potential(POSITION).detach())
    assert torch.equal(value[0], potential.force(POSITION).detach())
    assert bool(energy[1].isnan())
    assert bool(value[1].isnan().all())


def test_small_systems_and_tables_take_all_pairs():
    potential = adjsim.GeneralizedBorn(torch.ones(600), torch.ones(600), torch.ones(600), cutoff=9)
    position = torch.zeros(600, 3)
    assert potential.path(position) == "neighbour list"
    assert potential.path(position, compiled=True) == "all pairs, by torch"
    assert potential.path(torch.zeros(2000, 3), compiled=True) == "neighbour list"
    assert potential.path(torch.zeros(200, 3)) == "all pairs, by torch"
    everything = CustomSolvent({}, [Stage("exp(-r)", pairs=True)], {})
    assert everything.path(position) == "all pairs, by torch"


@pytest.mark.usefixtures("lists")
def test_counts_of_neighbours_have_no_slope():
    apart = torch.linalg.norm(POSITION.unsqueeze(0) - POSITION.unsqueeze(1), dim=-1)
    counts = ((apart < 2.5).sum(-1) - 1).to(POSITION)
    found = CustomSolvent({"I": Stage("step(2.5-r)", pairs=True)}, [Stage("I^2")], {}, cutoff=3.0)
    assert found.path(POSITION) == "neighbour list"
    assert found(POSITION) == counts.square().sum()
    assert bool((force(found, POSITION) == 0).all())
