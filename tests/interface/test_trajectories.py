"""Trajectories as DCD and XTC, read by MDTraj and by OpenMM."""

from __future__ import annotations

import copy
import struct
from typing import NamedTuple

import mdtraj
import numpy as np
import pytest
import torch
from ase import units
from openmm import app
from openmm.app.internal.xtc_utils import read_xtc

import adjsim
from adjsim.core.trajectory import Trajectory
from adjsim.io import Structure, from_openmm, write_trajectory
from tests.openmm_systems import structure

PS = 1000 * units.fs
DT = 0.5 * units.fs
# Half a thousandth of a nanometre, and float32.
ROUNDING = {".xtc": 5.1e-4, ".dcd": 1e-6}


class Strained(NamedTuple):
    """The part of a state at constant pressure that is written."""

    position: torch.Tensor
    strain: torch.Tensor


@pytest.fixture(scope="module")
def vacuum():
    """A dipeptide, which begins at 1 fs and moves for 3 fs."""
    pdb = structure("dipeptide.pdb")
    position = 10 * torch.tensor([list(x) for x in pdb.positions._value], dtype=torch.float64)
    symbols = tuple(atom.element.symbol for atom in pdb.topology.atoms())
    found = Structure(position, torch.ones(22, 3).double(), torch.ones(22).double(), None, symbols)
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(0.1), found.mass)
    start = dynamics.init(found.position, found.momentum)
    times = torch.arange(2, 9, 2) * DT
    with torch.no_grad():
        run = adjsim.simulate(dynamics, start, times, solver=adjsim.VelocityVerlet(DT))
    return run, found, pdb.topology


@pytest.fixture(scope="module")
def piston():
    """Waters with a virtual site each, in a box that a piston moves."""
    pdb, field = structure("water.pdb"), app.ForceField("tip4pew.xml")
    model = app.Modeller(pdb.topology, pdb.positions)
    model.delete(list(pdb.topology.residues())[3:])
    model.addExtraParticles(field)
    system = field.createSystem(model.topology)
    found = from_openmm(system, model.positions, model.topology)[1]
    found = found._replace(box=torch.tensor([18.0, 19.0, 20.0], dtype=torch.float64))
    position = torch.stack([found.position * x for x in (1.0, 1.01, 1.02, 1.03)])
    states = Strained(position, torch.randn(4, 1, 3, dtype=torch.float64) / 100)
    start = Strained(*(x[0] for x in states))
    return Trajectory(torch.arange(4) * DT, states, None, start, {}), found, model.topology


@pytest.mark.parametrize("system", ["vacuum", "piston"])
@pytest.mark.parametrize("suffix", [".xtc", ".dcd"])
def test_trajectories_are_read_by_mdtraj(system, suffix, request, tmp_path):
    run, found, topology = request.getfixturevalue(system)
    path = tmp_path / f"run{suffix}"
    path.write_text("of a run before")
    box_before = topology.getPeriodicBoxVectors()
    write_trajectory(path, run, found, topology)
    assert sorted(x.name for x in tmp_path.iterdir()) == sorted([path.name, "run.pdb"])
    assert topology.getPeriodicBoxVectors() == box_before
    read = mdtraj.load(str(path), top=str(tmp_path / "run.pdb"))
    expected = found.all_positions(run.position).detach().numpy() / 10
    np.testing.assert_allclose(read.xyz, expected, rtol=0, atol=ROUNDING[suffix])
    names = [(atom.residue.name, atom.name, atom.residue.id) for atom in topology.atoms()]
    assert [(x.residue.name, x.name, str(x.residue.resSeq)) for x in read.topology.atoms] == names
    if system == "vacuum":
        assert read.unitcell_lengths is None
    else:
        lengths = found.box * run.strain[:, 0].exp() / 10
        np.testing.assert_allclose(read.unitcell_lengths, lengths, rtol=1e-6)
    times = (run.times / PS).numpy()
    if suffix == ".xtc":
        np.testing.assert_allclose(read.time, times, rtol=1e-6)
        np.testing.assert_allclose(read_xtc(str(path).encode())[2], times, rtol=1e-6)
    else:
        # MDTraj counts the frames of DCD, whose header has a step in AKMA units.
        header = path.read_bytes()[8:48]
        frames, first, every = struct.unpack("<3i", header[:12])
        step = struct.unpack("<f", header[36:])[0] * 0.04888821
        assert frames == len(times)
        np.testing.assert_allclose(step * (first + every * np.arange(frames)), times, rtol=1e-6)


def test_the_second_half_of_a_run_and_one_frame(vacuum, tmp_path):
    run, found, topology = vacuum
    for times in ([0.25, 0.75, 1.25, 1.75], [0.3, 0.4, 0.5, 0.6], [-0.2, -0.1, 0.0, 0.1]):
        later = copy.copy(run)
        later.times = torch.tensor(times, dtype=torch.float64) * PS
        write_trajectory(tmp_path / "run.xtc", later, found, topology)
        read = mdtraj.load(str(tmp_path / "run.xtc"), top=str(tmp_path / "run.pdb"))
        np.testing.assert_allclose(read.time, times, rtol=1e-6, atol=1e-9)
    later.times = later.times[-1:]
    later._states = run._states._replace(position=run.position[-1:])
    write_trajectory(tmp_path / "run.xtc", later, found, topology)
    read = mdtraj.load(str(tmp_path / "run.xtc"), top=str(tmp_path / "run.pdb"))
    np.testing.assert_allclose(read.time, [0.1], rtol=1e-6)


def test_what_a_file_cannot_hold_is_refused(vacuum, tmp_path):
    run, found, topology = vacuum
    for times, reason in (
        ([0, 1, 2, 4], r"evenly spaced times, and save time 1 is 1 ps, not 1.333"),
        ([3, 2, 1, 0], "must increase"),
        ([1 / 1.7171, 2 / 1.7171, 3 / 1.7171, 4 / 1.7171], None),
        ([1 / 1500, 1 + 1 / 1500, 2 + 1 / 1500, 3 + 1 / 1500], "begins at a whole number of steps"),
    ):
        other = copy.copy(run)
        other.times = torch.tensor(times, dtype=torch.float64) * PS
        if reason is None:
            write_trajectory(tmp_path / "run.dcd", other, found, topology)
            continue
        with pytest.raises(ValueError, match=reason):
            write_trajectory(tmp_path / "no.dcd", other, found, topology)
    with pytest.raises(ValueError, match=r"writes .dcd and .xtc; got 'no.trr'"):
        write_trajectory(tmp_path / "no.trr", run, found, topology)
    with pytest.raises(ValueError, match=r"the topology has 0 atoms and the trajectory 22"):
        write_trajectory(tmp_path / "no.xtc", run, found, app.Topology())
    bad = copy.copy(run)
    bad._states = run._states._replace(position=run.position.clone().fill_(float("nan")))
    for suffix in (".xtc", ".dcd"):
        with pytest.raises(ValueError, match="NaN"):
            write_trajectory(tmp_path / f"no{suffix}", bad, found, topology)
    batch = copy.copy(run)
    batch._states = run._states._replace(position=run.position[:, None])
    with pytest.raises(ValueError, match="a trajectory of one system"):
        write_trajectory(tmp_path / "no.xtc", batch, found, topology)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["run.dcd", "run.pdb"]
