"""Make water_study.json: the long runs behind the page plot_water.py.

Run: python examples/data/make_water_study.py [part ...]. Without a part, all of them
are run, which takes about a quarter of an hour on one core. Each part replaces its own
entry of the file. Later parts begin with positions of earlier ones, which these keep in
the folder of temporary files.
"""

import json
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openmm
import openmm.app as app
import torch
from ase import units
from openmm import unit
from studies import commit

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.io import from_openmm, to_openmm

HERE = Path(__file__).resolve().parent
FILE = HERE / "water_study.json"
WORK = Path(tempfile.gettempdir()) / "water_study"
PS, KT = 1000 * units.fs, 298 * units.kB
DENSITY = 0.99705  # of water at 25 degrees, g/cm^3
REPLICAS, BURN_IN, LENGTH, EVERY = 8, 1.0, 12.0, 0.1
SLOW, FAST = 2.0, 1.0  # steps of heavy and of real hydrogens, fs
NARROW, WIDE = 0.03, 0.1
SHIFT, KINETIC, SPACING, LAGS = 0.03, 2.0, 0.05, 31
RUNS, DURATIONS = 4, [0.05, 0.1, 0.2, 0.3, 0.5]
NAMES = ("charge", "epsilon", "sigma")


class Water:
    """216 molecules of SPC/Fw at the density of water, from OpenMM.

    Derivatives are with respect to the logarithms of three numbers: a factor of all
    charges, so that molecules stay neutral, and epsilon and sigma of oxygen.
    """

    def __init__(self, hydrogen=None):
        pdb = app.PDBFile(str(HERE / "water.pdb"))
        self.topology = pdb.topology
        molecules = pdb.topology.getNumResidues()
        grams = molecules * (15.9994 + 2 * 1.008) * units._amu * 1000
        edge = (grams / DENSITY * 1e24) ** (1 / 3)
        stretch = edge / pdb.topology.getUnitCellDimensions()[0]._value / 10
        position = np.array(pdb.getPositions(asNumpy=True)._value) * stretch
        pdb.topology.setUnitCellDimensions(3 * [edge / 10] * unit.nanometer)
        self.system = app.ForceField(str(HERE / "spcfw.xml")).createSystem(
            pdb.topology,
            nonbondedMethod=app.PME,
            nonbondedCutoff=0.9 * unit.nanometer,
            constraints=None,
            rigidWater=False,
            hydrogenMass=hydrogen and hydrogen * unit.amu,
            removeCMMotion=False,
        )
        for force in self.system.getForces():
            if isinstance(force, openmm.NonbondedForce):
                # A force that jumps at the cutoff has a gradient that misses the jumps.
                force.setUseSwitchingFunction(True)
                force.setSwitchingDistance(0.8 * unit.nanometer)
        self.potential, self.structure = from_openmm(
            self.system, position, pdb.topology
        )
        parts = self.potential.coulomb, self.potential.lennard_jones
        self.numbers = [parts[0].charge, parts[1].epsilon, parts[1].sigma]
        for parameter in self.potential.parameters():
            parameter.requires_grad_(any(parameter is x for x in self.numbers))
        self.box = self.structure.box
        self.oxygens = slice(None, None, 3)

    def scale_charges(self, factor):
        with torch.no_grad():
            self.numbers[0].mul_(factor)

    def slopes(self, value, **options):
        """Return the derivatives of a number with respect to the logarithms, (3,)."""
        charge, *rest = torch.autograd.grad(value, self.numbers, **options)
        first = (charge * self.numbers[0].detach()).sum()
        others = [
            g[0] * x.detach()[0] for g, x in zip(rest, self.numbers[1:], strict=True)
        ]
        return torch.stack([first, *others])

    def energy_slopes(self, frames):
        """Return the derivatives of U/kT of frames, (frames, 3)."""
        return torch.stack([self.slopes(self.potential(q)) for q in frames]) / KT

    def radial(self, position, r, width):
        """Return g(r) of oxygen and oxygen, (*batch, distances)."""
        return torch.stack(
            [
                adjsim.smooth_radial_distribution(
                    q[..., self.oxygens, :], r, self.box, width=width
                )
                for q in position
            ]
        )

    def langevin(self):
        return adjsim.Langevin(self.potential, self.structure.mass, KT, friction=1 / PS)

    def newton(self, position, seed):
        """Return the dynamics at constant energy, and a canonical start."""
        dynamics = adjsim.Hamiltonian(self.potential, self.structure.mass)
        with torch.no_grad():
            momentum = dynamics.thermal_momentum(position, KT, seed)
            mass = self.structure.mass[:, None]
            drift = momentum.sum(-2, keepdim=True) / mass.sum()
            return dynamics, dynamics.init(position, momentum - mass * drift)

    def in_openmm(self, position, durations, seed):
        """Return positions after each of these times, of one run at 298 K in OpenMM."""
        integrator = openmm.LangevinMiddleIntegrator(
            298 * unit.kelvin, 1 / unit.picosecond, SLOW * unit.femtosecond
        )
        integrator.setRandomNumberSeed(seed)
        context = openmm.Context(
            to_openmm(self.potential, self.system),
            integrator,
            openmm.Platform.getPlatformByName("CPU"),
            {"Threads": "1"},
        )
        context.setPositions(position.numpy() / 10)
        context.setVelocitiesToTemperature(298 * unit.kelvin, seed)
        found = []
        for duration in durations:
            integrator.step(round(duration * 1000 / SLOW))
            state = context.getState(positions=True)
            found.append(state.getPositions(asNumpy=True)._value)
        return torch.tensor(10 * np.stack(found))


def times(duration, spacing):
    return torch.arange(round(duration / spacing) + 1) * (spacing * PS)


def mean_and_error(blocks):
    """Return the mean of independent blocks, and its standard error."""
    return blocks.mean(0), blocks.std(0) / len(blocks) ** 0.5


def keep(name, tensor):
    """Keep positions for later parts, which are too many to store."""
    WORK.mkdir(exist_ok=True)
    torch.save(tensor, WORK / f"{name}.pt")


def kept(name):
    return torch.load(WORK / f"{name}.pt")


def structure(seed=1000):
    """Compute g(r) and its derivatives by reweighting canonical runs."""
    water = Water(hydrogen=4)
    # 40 ps melt the lattice of water.pdb, and then one state every 6 ps is a start.
    waits = [40.0] + [6.0] * (REPLICAS - 1)
    starts = water.in_openmm(water.structure.position, waits, seed)
    print("starts", flush=True)
    langevin = water.langevin()
    with torch.no_grad():
        run = adjsim.simulate(
            langevin,
            langevin.init(starts, generator=seed),
            times(BURN_IN + LENGTH, EVERY),
            solver=adjsim.BAOAB(SLOW * units.fs),
            generator=seed + 1,
        )
    print("run", flush=True)
    frames = run.position[1 + round(BURN_IN / EVERY) :]
    keep("canonical", frames[-1])
    slopes = torch.stack([water.energy_slopes(q) for q in frames])
    r, r_wide = torch.arange(2.3, 8.8, 0.05), torch.arange(2.3, 8.8, 0.1)
    with torch.no_grad():
        narrow = water.radial(frames, r, NARROW)
        wide = water.radial(frames, r_wide, WIDE)
    # Halves of replicas are the blocks. Each has a covariance about the common means.
    u = slopes - slopes.mean((0, 1))
    g = wide - wide.mean((0, 1))
    derivatives = -blocks(g.unsqueeze(-1) * u.unsqueeze(-2))
    value, error = mean_and_error(blocks(narrow))
    return {
        "seed": seed,
        "r": r,
        "g": value,
        "g error": error,
        "r wide": r_wide,
        "g wide": wide.mean((0, 1)),
        "derivatives": derivatives,
        "slopes of U/kT": u.transpose(0, 1),
        "states": [[short(atom, 6) for atom in q.tolist()] for q in frames[-1][:4]],
    }


def blocks(series):
    """Return the means over halves of replicas, (2 replicas, ...)."""
    halves = series.unflatten(0, (2, -1)).mean(1)
    return halves.flatten(0, 1)


def kinetics(seed=2000):
    """Compute D and g(r) at constant energy, with three values of the charges."""
    found, r_wide = {}, torch.arange(2.3, 8.8, 0.1)
    for i, (name, shift) in enumerate(
        {"model": 0.0, "more": SHIFT, "less": -SHIFT}.items()
    ):
        start, own = kept("canonical")[:RUNS], seed + 100 * i
        if shift:
            heavy = Water(hydrogen=4)
            heavy.scale_charges(np.exp(shift))
            start = torch.cat(
                [heavy.in_openmm(q, [3.0], own + 2 + k) for k, q in enumerate(start)]
            )
        water = Water()
        water.scale_charges(np.exp(shift))
        dynamics, state = water.newton(start, own)
        ts = times(KINETIC, SPACING)
        with torch.no_grad():
            run = adjsim.simulate(
                dynamics, state, ts, solver=adjsim.VelocityVerlet(FAST * units.fs)
            )
            oxygens = run.position[:, :, water.oxygens]
            ends = [
                dynamics.invariant(adjsim.PhaseState(run.position[k], run.momentum[k]))
                for k in (0, len(ts) // 2, -1)
            ]
            kinetic = run.momentum.square() / (2 * water.structure.mass[:, None])
            dof = 3 * run.position.shape[-2] - 3
            found[name] = {
                "shift": shift,
                "msd": adjsim.mean_squared_displacement(oxygens, LAGS).T,
                "g wide": water.radial(run.position[::2], r_wide, WIDE).mean(0),
                "temperature": 2 * kinetic.sum((-1, -2)).mean(0) / dof / units.kB,
                "energies": torch.stack(ends, 1),
            }
        print(name, found[name]["msd"][:, -1] / 6, flush=True)
        print(found[name]["temperature"], found[name]["energies"], flush=True)
    return {"seed": seed, "r wide": r_wide, "runs": found}


def displacement(water, dynamics, start, duration, **options):
    """Return the mean squared displacement of oxygens at the end of a run."""
    run = adjsim.simulate(
        dynamics,
        start,
        [0.0, duration * PS],
        solver=adjsim.VelocityVerlet(FAST * units.fs),
        **options,
    )
    moved = run.position[-1] - run.position[0]
    return moved[:, water.oxygens].square().sum(-1).mean()


def paths(seed=3000):
    """Take the gradient of the mean squared displacement along runs of several lengths.

    Runs begin with the same states at each length.
    """
    water, rows = Water(), []
    dynamics, starts = water.newton(kept("canonical")[:RUNS], seed)
    for duration in DURATIONS:
        values, gradients = [], []
        for k in range(RUNS):
            start = type(starts)(*(x[k : k + 1] for x in starts))
            value = displacement(
                water, dynamics, start, duration, adjoint=adjsim.ReversibleAdjoint()
            )
            values.append(value.item())
            gradients.append(water.slopes(value))
        gradients = torch.stack(gradients)
        rows.append({"duration": duration, "values": values, "gradients": gradients})
        print(rows[-1], flush=True)
    return {"seed": seed, "rows": rows}


@torch.no_grad()
def differences(seed=3000, durations=(0.1, 0.2, 0.3, 0.5), steps=(1e-3, 1e-4)):
    """Differentiate the first of the paths by central differences in the charges.

    The force jumps by the tolerance at the cutoff of the real-space sum. Between the
    runs of a difference with these steps many pairs cross it, so that the quotient has
    the part that the gradient of a path misses. With a tiny step the quotient is this
    gradient, or far off where a single pair crosses.
    """
    water, rows = Water(), []
    dynamics, starts = water.newton(kept("canonical")[:RUNS], seed)
    start = type(starts)(*(x[:1] for x in starts))
    for duration in durations:
        for h in steps:
            pair = []
            for factor in (1 + h, 1 - h):
                water.scale_charges(factor)
                pair.append(displacement(water, dynamics, start, duration).item())
                water.scale_charges(1 / factor)
            rows.append([duration, h, (pair[0] - pair[1]) / (2 * h)])
            print(rows[-1], flush=True)
    return {"seed": seed, "rows": rows}


def short(x, digits=5):
    """Return tensors and arrays as lists, and floats with few digits."""
    if isinstance(x, torch.Tensor | np.ndarray):
        x = x.tolist()
    if isinstance(x, list | tuple):
        return [short(y, digits) for y in x]
    if isinstance(x, dict):
        return {key: short(y, digits) for key, y in x.items()}
    return float(f"{x:.{digits}g}") if isinstance(x, float) else x


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    head = commit(__file__)  # before the runs, since the code is that of now
    study = json.loads(FILE.read_text()) if FILE.exists() else {}
    study["settings"] = {
        "kT (eV)": KT,
        "density (g/cm^3)": DENSITY,
        "step of canonical runs (fs)": SLOW,
        "step at constant energy (fs)": FAST,
        "replicas": REPLICAS,
        "canonical (ps)": LENGTH,
        "constant energy (ps)": KINETIC,
        "frames (ps)": SPACING,
        "runs at constant energy": RUNS,
        "widths of g(r) (angstrom)": [NARROW, WIDE],
        "shift of log charge": SHIFT,
        "derivatives": NAMES,
    }
    parts = {f.__name__: f for f in (structure, kinetics, paths, differences)}
    for name in sys.argv[1:] or parts:
        begun = time.process_time()
        study[name] = {
            "made_by": "examples/data/make_water_study.py",
            "commit": head,
            "versions": {x: version(x) for x in ("torch", "openmm", "numpy")},
            **parts[name](),
            "seconds": time.process_time() - begun,
        }
        print(name, study[name]["seconds"], flush=True)
        with replacing(FILE) as temporary:
            text = json.dumps(short(study), separators=(",", ":"))
            temporary.write_text(text + "\n")


if __name__ == "__main__":
    main()
