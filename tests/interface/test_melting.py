"""Long-range order of a structure, and the liquid that is melted from a crystal."""

from __future__ import annotations

from pathlib import Path

import ase.io
import pytest
import torch
from ase import units
from ase.build import bulk, make_supercell

from adjsim.cli.job import Job
from adjsim.cli.melting import Preparation, different_density, melted, melting_temperature, order_of
from adjsim.cli.models import BathSettings, model_of
from adjsim.core.durable.ranks import Ranks
from adjsim.io.systems import structure
from adjsim.solvers import Splitting

DENSITY = 0.02125
EXAMPLES = Path(__file__).parents[2] / "examples" / "data"


def crystal(lattice, cells, rattle=0.0, seed=0):
    """A crystal of argon at the density of the liquid.

    ``rattle`` is the displacement along each axis, in units of the distance of neighbours.
    """
    count, spacing = {"fcc": (4, 0.5**0.5), "bcc": (2, 0.75**0.5), "sc": (1, 1.0)}[lattice]
    side = (count / DENSITY) ** (1 / 3)
    atoms = bulk("Ar", lattice, a=side, cubic=True).repeat(cells)
    atoms.rattle(rattle * spacing * side, seed=seed)
    return atoms


def order(atoms):
    return order_of(torch.from_numpy(atoms.positions), torch.from_numpy(atoms.cell.array))


@pytest.mark.parametrize("rattle", [0.0, 0.01, 0.05, 0.1])
@pytest.mark.parametrize(("lattice", "cells"), [("fcc", 3), ("fcc", 4), ("bcc", 3), ("sc", 4)])
def test_a_rattled_crystal_is_ordered(lattice, cells, rattle):
    """Neighbours of a crystal near its melting vibrate by a tenth of their distance."""
    for seed in range(5):
        assert order(crystal(lattice, cells, rattle, seed)).found


def test_the_peak_of_a_rattled_crystal_falls_as_its_factor_of_debye_and_waller():
    """Of 864 atoms: exp(-(7.7 u)^2), up to fluctuations of 5 % over the third of four peaks."""
    for u in (0.02, 0.05, 0.1):
        found = order(crystal("fcc", 6, u)).peak / 864
        assert found == pytest.approx(float(torch.tensor(-((7.7 * u) ** 2)).exp()), rel=0.05)


def test_a_liquid_and_a_gas_are_disordered():
    liquid = ase.io.read(EXAMPLES / "argon.xyz")
    assert not order(liquid).found
    gas = liquid.copy()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        gas.set_scaled_positions(torch.rand(108, 3, generator=generator).numpy())
        assert not order(gas).found


def test_order_does_not_depend_on_the_origin_or_on_the_cell_of_a_lattice():
    atoms = crystal("fcc", 3, 0.05)
    expected = order(atoms)
    atoms.positions += [0.3, -1.1, 7.0]
    assert order(atoms).peak == pytest.approx(expected.peak)
    tilted = atoms.copy()
    tilted.set_cell(make_supercell(atoms, [[1, 0, 0], [1, 1, 0], [0, -1, 1]]).cell)
    assert order(tilted).peak == pytest.approx(expected.peak)
    assert order(tilted).limit == pytest.approx(expected.limit)


def test_two_atoms_are_disordered():
    assert not order_of(torch.tensor([[0.0] * 3, [4.0] * 3]), torch.tensor([8.0] * 3)).found


def jobs(path, temperature):
    system = structure(path)
    for kelvin in (temperature, 3 * temperature):
        bath = BathSettings(kelvin, 200.0, 0.001, [], [])
        model = model_of(system, "langevin", bath)
        yield Job(system, model, "BAOAB", Splitting("BAOAB", 4 * units.fs), kelvin, 0)


@pytest.mark.slow
def test_a_crystal_is_melted(tmp_path, monkeypatch):
    """Every liquid is another one, and its density is that of the crystal."""
    path = tmp_path / "a.xyz"
    ase.io.write(path, crystal("fcc", 2), format="extxyz")
    monkeypatch.setattr("adjsim.cli.melting.COLD_STAGES", 1)
    cold, hot = jobs(path, 150.0)
    box, start = cold.system.potential.box, cold.system.position
    assert order_of(start, box).found
    # 3 epsilon, and not three times the temperature.
    assert melting_temperature(cold) == pytest.approx(3 * 150.0)
    assert melting_temperature(next(jobs(path, 85.0))) == pytest.approx(3 * 116.79, rel=1e-4)
    liquids = melted(hot, cold, 2, compile=False, ranks=Ranks(None))
    spacing = DENSITY ** (-1 / 3)
    for liquid in liquids:
        assert not order_of(liquid, box).found
        assert float((liquid - start).square().sum(-1).mean().sqrt()) > spacing
    assert float((liquids[0] - liquids[1]).abs().max()) > spacing
    # Starts are drawn from both.
    drawn = cold.drawn(liquids, 16, torch.Generator().manual_seed(0)).position
    assert {int((liquids - q).abs().amax((1, 2)).argmin()) for q in drawn} == {0, 1}


def test_what_does_not_melt_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.xyz"
    ase.io.write(path, crystal("fcc", 2), format="extxyz")
    monkeypatch.setattr("adjsim.cli.melting.HOT_STAGES", 1)
    cold, hot = jobs(path, 0.1)
    with pytest.raises(ValueError, match=r"did not melt in 250 steps at 0.3 K: its atoms moved by"):
        melted(hot, cold, 2, compile=False, ranks=Ranks(None))


def test_doubts_about_the_starts():
    solid, liquid = order(crystal("fcc", 3)), order(ase.io.read(EXAMPLES / "argon.xyz"))
    assert Preparation(liquid).doubts == []
    assert Preparation(solid, 350.0, 0, 8).doubts == []
    assert "was not melted: a crystal may stay superheated" in Preparation(solid).doubts[0]
    assert "3 of 8 melted starts had long-range" in Preparation(solid, 350.0, 3, 8).doubts[0]
    assert "It was melted at 350 K" in Preparation(solid, 350.0, 0, 8).sentence("K")
    assert "disordered, as a liquid is" in Preparation(liquid).sentence("K")


def test_different_densities_are_said():
    assert different_density(0.0213, 0.02125) == []
    assert different_density(0.0213, None) == []
    assert "difference of +10.6 %" in different_density(0.0235, 0.02125)[0]
