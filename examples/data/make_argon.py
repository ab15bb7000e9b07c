"""Make argon.xyz: liquid argon at 85 K and the density of Yarnell's neutron
measurement, 0.02125 atoms per cubic angstrom.

108 atoms from a face-centred cubic lattice, melted at 300 K and equilibrated at 85 K by
a Nose-Hoover chain, in ASE's units (eV, angstrom, amu). Run: python
examples/data/make_argon.py
"""

from pathlib import Path

import torch
from ase import units
from ase.build import bulk
from ase.io import write

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.potentials import NOBLE_GASES


def main() -> None:
    torch.set_default_dtype(torch.float64)
    side = (4 / 0.02125) ** (1 / 3)
    atoms = bulk("Ar", "fcc", a=side, cubic=True).repeat(3)
    gas, edge = NOBLE_GASES["Ar"], 3 * side
    potential = adjsim.LennardJones(
        gas.kelvin * units.kB, gas.angstrom, cutoff=edge / 2, box=torch.full((3,), edge)
    )
    mass = torch.from_numpy(atoms.get_masses())
    position = torch.from_numpy(atoms.get_positions())
    generator = torch.Generator().manual_seed(0)
    dt = 4 * units.fs
    for kelvin, steps in ((300.0, 2_000), (85.0, 10_000)):
        dynamics = adjsim.NoseHooverChain(
            potential, mass, kelvin * units.kB, tau=200 * units.fs, dof=3 * 108 - 3
        )
        momentum = dynamics.thermal_momentum(position, dynamics.kT, generator)
        momentum = momentum - mass[:, None] * momentum.sum(0) / mass.sum()
        start = dynamics.init(position, momentum)
        with torch.no_grad():
            run = adjsim.simulate(
                dynamics,
                start,
                [0.0, steps * dt],
                solver=adjsim.Splitting("NBABN", dt),
                record=lambda s: s.position[0],
                progress=True,
            )
        position = run.final.position
    atoms.set_positions(position.numpy())
    atoms.wrap()
    with replacing(Path(__file__).with_name("argon.xyz")) as file:
        write(file, atoms, format="extxyz", columns=["symbols", "positions"])


if __name__ == "__main__":
    main()
