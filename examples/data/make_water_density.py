"""The density of flexible water at 298 K and 1 bar, by a piston and by OpenMM.

216 molecules of SPC/Fw (Wu, Tepper and Voth 2006) with particle-mesh Ewald. Both sides
begin with the same positions and take the same force field. One moves the box by
adjsim.LangevinPiston, the other by OpenMM's Monte Carlo barostat. The results are in
water_density.json.

Run: python examples/data/make_water_density.py piston|openmm PICOSECONDS
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import openmm
import torch
from ase import units
from openmm import app, unit
from studies import commit

import adjsim
from adjsim.io import from_openmm
from adjsim.observables import mean_with_error

HERE = Path(__file__).parent
FS, KELVIN, SEED, EVERY = units.fs, 298, 1, 20
OUT = HERE / "water_density.json"
GRAMS = 216 * (15.9994 + 2 * 1.008) / units.mol * 1e24


def system():
    """Return OpenMM's system with a barostat, positions in nm, and topology."""
    pdb = app.PDBFile(str(HERE / "water.pdb"))
    made = app.ForceField(str(HERE / "spcfw.xml")).createSystem(
        pdb.topology,
        nonbondedMethod=app.PME,
        nonbondedCutoff=0.85 * unit.nanometer,
        constraints=None,
        rigidWater=False,
        removeCMMotion=False,
    )
    for force in made.getForces():
        if isinstance(force, openmm.NonbondedForce):
            force.setUseSwitchingFunction(True)
            force.setSwitchingDistance(0.75 * unit.nanometer)
    made.addForce(openmm.MonteCarloBarostat(1 * unit.bar, KELVIN * unit.kelvin, 25))
    return made, np.array(pdb.getPositions(asNumpy=True)._value), pdb.topology


def by_piston(picoseconds):
    """Return densities every EVERY femtoseconds, and seconds a step."""
    torch.set_num_threads(1)
    made, position, topology = system()
    potential, structure = from_openmm(made, position, topology)
    dynamics = adjsim.LangevinPiston(
        potential,
        structure.mass,
        structure.temperature * units.kB,
        friction=1 / (1000 * FS),
        pressure=structure.pressure,
        tau=500 * FS,
    )
    start = dynamics.init(structure.position, generator=SEED)
    steps = round(picoseconds * 1000)
    begun = time.perf_counter()
    with torch.no_grad():
        run = adjsim.simulate(
            dynamics,
            start,
            np.arange(0, steps + 1, EVERY) * FS,
            solver=adjsim.Splitting(dynamics.scheme, FS),
            generator=SEED,
            compile=True,
            record=lambda state: GRAMS / dynamics.volume(state),
            progress=True,
        )
    return run.record.tolist(), (time.perf_counter() - begun) / steps


def by_openmm(picoseconds):
    """Return densities every EVERY femtoseconds, and seconds a step."""
    made, position, _ = system()
    integrator = openmm.LangevinMiddleIntegrator(
        KELVIN * unit.kelvin, 1 / unit.picosecond, 1 * unit.femtosecond
    )
    integrator.setRandomNumberSeed(SEED)
    platform = openmm.Platform.getPlatformByName("CPU")
    context = openmm.Context(made, integrator, platform, {"Threads": "1"})
    context.setPositions(position)
    context.setVelocitiesToTemperature(KELVIN * unit.kelvin, SEED)
    steps, densities = round(picoseconds * 1000), []
    begun = time.perf_counter()
    for _ in range(steps // EVERY):
        integrator.step(EVERY)
        volume = context.getState().getPeriodicBoxVolume() / unit.angstrom**3
        densities.append(GRAMS / volume)
    return densities, (time.perf_counter() - begun) / steps


def main(side, picoseconds):
    picoseconds, made_at = float(picoseconds), commit(__file__)
    sides = {"piston": by_piston, "openmm": by_openmm}
    densities, seconds = sides[side](picoseconds)
    # The first 20 ps are equilibration.
    found = mean_with_error(densities[20_000 // EVERY :])
    results = json.loads(OUT.read_text()) if OUT.exists() else {}
    results[side] = {
        "density": found.value,
        "stderr": found.stderr,
        "independent samples": found.ess,
        "picoseconds": picoseconds,
        "milliseconds a step": 1e3 * seconds,
        "seed": SEED,
        "commit": made_at,
    }
    OUT.write_text(json.dumps(results, indent=1) + "\n")
    print(results[side])


if __name__ == "__main__":
    main(*sys.argv[1:])
