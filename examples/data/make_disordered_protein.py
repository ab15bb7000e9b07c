"""Make disordered_protein.json: the model and the long runs of plot_disordered_protein.

Run: python examples/data/make_disordered_protein.py. It takes about fifteen minutes on
one core.
"""

import json
import math
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openmm
import torch
from ase import units
from studies import commit, rounded

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.io import from_openmm

HERE = Path(__file__).resolve().parent
FILE = HERE / "disordered_protein.json"
# Twice the sequence of histatin 5. The radius of gyration is that measured by SAXS at
# this temperature, pH and ionic strength, in nm, as listed among the data of CALVADOS.
SEQUENCE = 2 * "DSHAKRHHGYKRKFHEKHHSHRGY"
KELVIN, PH, IONIC = 298.0, 7.0, 0.15
MEASURED, MEASURED_ERROR = 1.87, 0.05
# CALVADOS 2: mass (amu), lambda, sigma (nm), charge. Tesei and Lindorff-Larsen, Open
# Research Europe 2, 94 (2022).
RESIDUES = {
    "A": (71.07, 0.274329796904, 0.504, 0.0),
    "D": (115.09, 0.041604048061, 0.558, -1.0),
    "E": (129.11, 0.000693546096, 0.592, -1.0),
    "F": (147.18, 0.867235898206, 0.636, 0.0),
    "G": (57.05, 0.705884373367, 0.45, 0.0),
    "H": (137.14, 0.466366729056, 0.608, 1 / (1 + 10 ** (PH - 6))),
    "K": (128.17, 0.179021173899, 0.636, 1.0),
    "R": (156.19, 0.730762476752, 0.656, 1.0),
    "S": (87.08, 0.462541681161, 0.518, 0.0),
    "Y": (163.18, 0.977461144934, 0.646, 0.0),
}
ASHBAUGH_HATCH = (
    "eps*select(step(r-2^(1/6)*s), 4*l*(x12-x6-shift), 4*(x12-x6-l*shift)+1-l);"
    "x12=x6^2; x6=(s/r)^6; shift=(s/rc)^12-(s/rc)^6;"
    "l=scale*0.5*(l1+l2); s=0.5*(s1+s2)"
)
YUKAWA = "c*q1*q2*(exp(-kappa*r)/r-exp(-kappa*rq)/rq)"
PS, KT = 1000 * units.fs, KELVIN * units.kB
DT, FRICTION, EVERY, REPLICAS = 0.02 * PS, 0.01 / PS, 2 * PS, 16
EQUILIBRATION, LENGTH = 100 * PS, 1600 * PS
SCALES = (0.0, 0.5, 1.0, 1.5, 2.0)


def protein():
    """Return an ``openmm.System`` of beads, and positions of a zigzag, in nm."""
    thermal = 8.3145e-3 * KELVIN
    water = 5321 / KELVIN + 233.76 - 0.9297 * KELVIN
    water += 1.417e-3 * KELVIN**2 - 8.292e-7 * KELVIN**3
    bjerrum = 138.935458 / water / thermal
    kappa = math.sqrt(8 * math.pi * bjerrum * IONIC * 0.602214)
    bonds = openmm.HarmonicBondForce()
    sticky = openmm.CustomNonbondedForce(ASHBAUGH_HATCH)
    charged = openmm.CustomNonbondedForce(YUKAWA)
    globals_of = {
        sticky: {"eps": 0.8368, "rc": 2.0, "scale": 1.0},
        charged: {"c": bjerrum * thermal, "kappa": kappa, "rq": 4.0},
    }
    for force, values in globals_of.items():
        for name, value in values.items():
            force.addGlobalParameter(name, value)
    for force, names in ((sticky, "sl"), (charged, "q")):
        for name in names:
            force.addPerParticleParameter(name)
    system, last = openmm.System(), len(SEQUENCE) - 1
    for k, letter in enumerate(SEQUENCE):
        mass, stickiness, sigma, charge = RESIDUES[letter]
        # The ends are an amino group and a carboxyl group.
        system.addParticle(mass + 2 * (k == 0) + 16 * (k == last))
        sticky.addParticle([sigma, stickiness])
        charged.addParticle([charge + (k == 0) - (k == last)])
        if k > 0:
            bonds.addBond(k - 1, k, 0.38, 8033.0)
            sticky.addExclusion(k - 1, k)
            charged.addExclusion(k - 1, k)
    for force, cutoff in ((sticky, 2.0), (charged, 4.0)):
        force.setNonbondedMethod(openmm.CustomNonbondedForce.CutoffNonPeriodic)
        force.setCutoffDistance(cutoff)
    for force in (bonds, sticky, charged):
        system.addForce(force)
    number = np.arange(len(SEQUENCE))
    return system, np.stack([0.3 * number, 0.23 * (number % 2), 0 * number], 1)


class Protein:
    """The chain, whose stickiness is trainable: one scale, or a number of each bead."""

    def __init__(self):
        self.system, self.positions = protein()
        self.potential, self.structure = from_openmm(self.system, self.positions)
        for parameter in self.potential.parameters():
            parameter.requires_grad_(False)
        self.scale = self.potential.custom_pairs.scale.requires_grad_(True)
        self.stickiness = self.potential.custom_pairs.l.requires_grad_(True)
        self.dynamics = adjsim.Langevin(
            self.potential, self.structure.mass, KT, friction=FRICTION
        )

    def put(self, scale):
        with torch.no_grad():
            self.scale.fill_(scale)

    def simulation(self, starts, duration):
        """Return a simulation from stored positions ``(replicas, beads, 3)``."""
        starts = torch.as_tensor(starts)

        def initial(count, generator):
            return self.dynamics.init(starts[:count], generator=generator)

        return adjsim.Simulation(
            self.dynamics,
            initial,
            [0.0, round(duration / DT) * DT],
            solver=adjsim.BAOAB(DT),
            compile=True,
        )

    def run(self, starts, duration, seed):
        """Return positions every EVERY, ``(frames, replicas, beads, 3)``."""
        stride = round(EVERY / DT)
        steps = range(stride, round(duration / DT) + 1, stride)
        with torch.no_grad():
            return adjsim.simulate(
                self.dynamics,
                self.dynamics.init(torch.as_tensor(starts), generator=seed),
                [0.0, *(k * DT for k in steps)],
                solver=adjsim.BAOAB(DT),
                generator=seed,
                compile=True,
            ).position[1:]


def square(state):
    """Return the squared radius of gyration of each chain, nm^2."""
    return (adjsim.radius_of_gyration(state.position) / 10) ** 2


def newton(protein, starts):
    """Fit the scale, and return the steps and the last estimate."""
    reweighting = adjsim.Reweighting(every=EVERY, burn_in=EQUILIBRATION, threshold=0.4)
    simulation = protein.simulation(starts, EQUILIBRATION + LENGTH)
    rows, scale = [], 1.0
    for k in range(6):
        protein.put(scale)
        found = reweighting(
            simulation,
            adjsim.TimeAverage(square),
            replicas=REPLICAS,
            chunks=REPLICAS,
            generator=100 + k,
        )
        slope = float(found.grad["potential.custom_pairs.scale"])
        rows.append(
            {
                "scale": scale,
                "square": float(found.value),
                "square error": float(found.value_stderr),
                "slope": slope,
                "slope error": float(found.grad_stderr["potential.custom_pairs.scale"]),
                "share": found.diagnostics["weights_ess"],
                "sampled": found.diagnostics["sampled"],
            }
        )
        print(rows[-1], flush=True)
        scale += float(np.clip((MEASURED**2 - rows[-1]["square"]) / slope, -0.4, 0.4))
    name = "potential.custom_pairs.l"
    return rows, {"grad": found.grad[name], "error": found.grad_stderr[name]}


def study():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    head, begun = commit(__file__), time.perf_counter()
    protein = Protein()
    zigzag = protein.structure.position.expand(REPLICAS, -1, -1)
    starts = protein.run(zigzag, 3 * EQUILIBRATION, 1)[-1]
    starts = starts - starts.mean(-2, keepdim=True)
    rows, residues = newton(protein, starts)
    curve, last = [], None
    for k, scale in enumerate([*SCALES, rows[-1]["scale"]]):
        protein.put(scale)
        found = protein.run(starts, EQUILIBRATION + LENGTH, 10 + k)
        frames = found[round(EQUILIBRATION / EVERY) :]
        squares = (adjsim.radius_of_gyration(frames) / 10) ** 2
        radii = squares.mean(0).sqrt()
        counts, _ = np.histogram(squares.sqrt().flatten(), np.linspace(1, 4, 61))
        curve.append(
            {
                "scale": scale,
                "radius": squares.mean().sqrt(),
                "error": radii.std() / REPLICAS**0.5,
                "counts": counts,
            }
        )
        last = found[-1]
    last = last - last.mean(-2, keepdim=True)
    return {
        "commit": head,
        "versions": {name: version(name) for name in ("torch", "openmm")},
        "minutes": rounded((time.perf_counter() - begun) / 60, 2),
        "fit": rounded(rows, 8),
        "residues": rounded(residues, 4),
        "curve": rounded(curve, 6),
        # The last states at the fitted scale.
        "starts": np.round(last.numpy(), 2).tolist(),
    }


if __name__ == "__main__":
    found = study()
    with replacing(FILE) as path:
        path.write_text(json.dumps(found) + "\n")
