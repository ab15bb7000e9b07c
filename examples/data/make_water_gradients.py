"""How density and heat of vaporisation of flexible water change with its force field.

64 molecules of SPC/Fw (Wu, Tepper and Voth 2006) with particle-mesh Ewald at 298 K and
1 bar, moved by adjsim.LangevinPiston. Derivatives with respect to epsilon and sigma of
oxygen and the charge of hydrogen by ScoreFunction, by Reweighting, along the paths, and
by runs with changed numbers. The results are in water_gradients.json.

Run: python examples/data/make_water_gradients.py [part ...], parts in this order:
starts, state, reweighting, differences, score, paths, fluctuations
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import openmm
import torch
from ase import units
from openmm import app, unit
from studies import commit, rounded
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.io import from_openmm

HERE = Path(__file__).parent
FILE = HERE / "water_gradients.json"
STARTS = Path(tempfile.gettempdir()) / "water_gradients.pt"
SIDE, KELVIN = 4, 298
MOLECULES = SIDE**3
FS, PS, KT = units.fs, 1000 * units.fs, KELVIN * units.kB
CUTOFF, SWITCH, TOLERANCE = 0.53, 0.43, 1e-3  # nm, nm, and of the Ewald sum
GRAMS, KILOJOULE = 1 / units.mol * 1e24, units.kJ / units.mol
REPLICAS, MELT, APART = 16, 30, 4  # ps to melt the lattice, and between starts
LENGTHS = {"reweighting": 20, "score": 6, "differences": 6}  # ps, of each replica
BURN_IN, FRAME, WINDOW = 2, 0.4, 1.0  # ps
SEEDS = {
    "starts": 1,
    "state": 1,
    "reweighting": 2,
    "differences": 100,
    "score": 3,
    "paths": 4,
    "fluctuations": 5,
}
# Changes of the logarithms of the numbers.
SHIFTS = {"epsilon": 0.2, "sigma": 0.02, "charge": 0.05}
SHARES = (-1, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1)
MEMORY = (8, 4, 0.01)  # replicas, ps, and ps between frames, of fluctuations
LONGEST = 0.6  # ps, of their correlations
WINDOWS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)  # ps, of paths


class Neutral(nn.Module):
    """Charges of all atoms from that of hydrogen: q, and -2 q on oxygen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.tensor([-2.0, 1, 1]).repeat(MOLECULES))

    def forward(self, q):
        return q * self.share

    def right_inverse(self, charges):
        return charges[1].clone()


NAMES = {
    "epsilon": "potential.lennard_jones.epsilon",
    "sigma": "potential.lennard_jones.sigma",
    "charge": "potential.coulomb.parametrizations.charge.original",
}


def lattice():
    """Return positions in nm of turned molecules on a lattice, and the topology."""
    edge = (MOLECULES * 18.0154 * GRAMS) ** (1 / 3) / 10  # of 1 g/cm3
    r, angle, rng = 0.1012, 1.976410845, np.random.default_rng(0)
    shape = r * np.array([[0, 0, 0], [1, 0, 0], [np.cos(angle), np.sin(angle), 0]])
    topology = app.Topology()
    chain, position = topology.addChain(), []
    for place in np.ndindex(SIDE, SIDE, SIDE):
        residue = topology.addResidue("HOH", chain)
        atoms = [
            topology.addAtom(name, app.Element.getBySymbol(name[0]), residue)
            for name in ("O", "H1", "H2")
        ]
        topology.addBond(atoms[0], atoms[1])
        topology.addBond(atoms[0], atoms[2])
        turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        position.append(shape @ turn + np.array(place) * edge / SIDE)
    topology.setUnitCellDimensions(3 * [edge] * unit.nanometer)
    return np.concatenate(position), topology


def water(friction=1.0):
    """Return the dynamics and the positions of the lattice; friction in 1/ps."""
    position, topology = lattice()
    made = app.ForceField(str(HERE / "spcfw.xml")).createSystem(
        topology,
        nonbondedMethod=app.PME,
        nonbondedCutoff=CUTOFF * unit.nanometer,
        ewaldErrorTolerance=TOLERANCE,
        constraints=None,
        rigidWater=False,
        removeCMMotion=False,
    )
    for force in made.getForces():
        if isinstance(force, openmm.NonbondedForce):
            force.setUseSwitchingFunction(True)
            force.setSwitchingDistance(SWITCH * unit.nanometer)
    potential, structure = from_openmm(made, position, topology)
    register_parametrization(potential.coulomb, "charge", Neutral(), unsafe=True)
    dynamics = adjsim.LangevinPiston(
        potential,
        structure.mass,
        KT,
        friction=friction / PS,
        pressure=units.bar,
        tau=500 * FS,
    )
    for name, parameter in dynamics.named_parameters():
        parameter.requires_grad_(name in NAMES.values())
    return dynamics, structure.position


def change(dynamics, name, shift):
    """Multiply a number by exp(shift)."""
    with torch.no_grad():
        dynamics.get_parameter(NAMES[name]).mul_(float(np.exp(shift)))


def gas_energy(potential):
    """Return the mean energy of a molecule alone, in eV.

    In its lengths r and angle a, volume is r^2 dr for each bond and sin(a) da, and the
    energy is a sum of functions of one of them. So the mean is a sum of integrals.
    """

    def mean(k, x0, volume):
        width = (KT / k) ** 0.5
        x = x0 + width * torch.linspace(-8, 8, 4001)
        energy = k / 2 * (x - x0) ** 2
        weight = volume(x) * torch.exp(-energy / KT)
        return float((weight * energy).sum() / weight.sum())

    bonds, angles = potential.bonds, potential.angles
    return 2 * mean(bonds.k.item(), bonds.length.item(), torch.square) + mean(
        angles.k.item(), angles.angle.item(), torch.sin
    )


def observed(dynamics):
    """Return a function from states to density (g/cm3) and heat (kJ/mol)."""
    gas = gas_energy(dynamics.potential) + KT

    def observe(state):
        heat = gas - dynamics.potential_energy(state) / MOLECULES
        density = dynamics.density(state) * GRAMS
        return torch.stack([density, heat / KILOJOULE], -1)

    return observe


def times(length, every):
    return np.arange(round(length / every) + 1) * every * PS


def solver(dynamics, dt=FS, **options):
    return adjsim.Splitting(dynamics.scheme, dt, **options)


def simulation(dynamics, length, **options):
    """Return a simulation from the starts, in their order."""
    kept = torch.load(STARTS, weights_only=True)

    def initial(count, generator):
        return dynamics.state_type(*(x[:count].clone() for x in kept))

    return adjsim.Simulation(
        dynamics,
        initial,
        [0.0, length * PS],
        solver=solver(dynamics, **options),
        compile=True,
    )


def slopes(estimate, dynamics):
    """Return the derivatives with respect to the logarithms, and their errors."""
    found = {}
    for name, full in NAMES.items():
        number = dynamics.get_parameter(full).detach()
        pair = estimate.grad[full] * number, estimate.grad_stderr[full] * number
        # Of the two species, oxygen is the first.
        found[name] = [x[..., 0] if number.ndim else x for x in pair]
    return found


@torch.no_grad()
def starts(seed):
    """Melt a lattice and keep states that are APART picoseconds apart."""
    dynamics, position = water(friction=20.0)
    state = dynamics.init(position, generator=seed)
    state = adjsim.simulate(
        dynamics,
        state,
        [0.0, 0.2 * PS],
        solver=solver(dynamics, 0.25 * FS),
        generator=seed,
        compile=True,
    ).final
    dynamics, _ = water()
    run = adjsim.simulate(
        dynamics,
        state,
        np.concatenate([[0.0], MELT + APART * np.arange(REPLICAS)]) * PS,
        solver=solver(dynamics),
        generator=seed + 1,
        compile=True,
    )
    kept = [getattr(run, name)[1:] for name in state._fields]
    torch.save(kept, STARTS)
    return {
        "gas (kJ/mol)": gas_energy(dynamics.potential) / KILOJOULE,
        "density": dynamics.density(dynamics.state_type(*kept)) * GRAMS,
    }


def state(seed):
    """Return the first of the starts, for a short run elsewhere."""
    names = water()[0].state_type._fields
    kept = torch.load(STARTS, weights_only=True)
    return {name: x[0] for name, x in zip(names, kept, strict=True)}


def reweighting(seed):
    """Sample once, and turn the samples to changed numbers."""
    dynamics, _ = water()
    estimator = adjsim.Reweighting(every=FRAME * PS, threshold=1e-9)
    run = simulation(dynamics, LENGTHS["reweighting"])
    average = adjsim.TimeAverage(observed(dynamics))
    generator = torch.Generator().manual_seed(seed)

    def estimated():
        return estimator(
            run, average, replicas=REPLICAS, chunks=REPLICAS, generator=generator
        )

    begun, base = time.process_time(), estimated()
    print(base, flush=True)
    found = {
        "seconds of samples": time.process_time() - begun,
        "value": [base.value, base.value_stderr],
        "slopes": slopes(base, dynamics),
        "independent samples": base.diagnostics["ess"],
        "curves": {},
    }
    for name, largest in SHIFTS.items():
        rows = []
        for share in SHARES:
            change(dynamics, name, share * largest)
            there = estimated()
            assert not there.diagnostics["sampled"]
            rows.append(
                {
                    "shift": share * largest,
                    "value": [there.value, there.value_stderr],
                    "share": there.diagnostics["weights_ess"],
                }
            )
            change(dynamics, name, -share * largest)
            print(name, rows[-1], flush=True)
        found["curves"][name] = rows
    return found


@torch.no_grad()
def differences(seed):
    """Run with changed numbers, and return averages over windows by replica."""
    found = {}
    for k, (name, largest) in enumerate(SHIFTS.items()):
        for sign in (1, -1):
            dynamics, _ = water()
            change(dynamics, name, sign * largest)
            run = simulation(dynamics, 0)
            record = adjsim.simulate(
                dynamics,
                run.initial(REPLICAS, None),
                times(LENGTHS["differences"], 0.02),
                solver=run.solver,
                generator=seed + 10 * k + sign,
                compile=True,
                record=observed(dynamics),
            ).record[1:]
            windows = record.unflatten(0, (-1, round(WINDOW / 0.02))).mean(1)
            found[f"{name} {sign * largest:+}"] = windows.permute(2, 1, 0)
            print(name, sign, windows[BURN_IN:].mean((0, 1)), flush=True)
    return found


def score(seed):
    """Take the covariance at every step of a run of its own."""
    dynamics, _ = water()
    estimate = adjsim.ScoreFunction()(
        simulation(dynamics, LENGTHS["score"]),
        adjsim.TimeAverage(observed(dynamics)),
        replicas=REPLICAS,
        chunks=REPLICAS,
        generator=torch.Generator().manual_seed(seed),
    )
    print(estimate, flush=True)
    return {
        "value": [estimate.value, estimate.value_stderr],
        "slopes": slopes(estimate, dynamics),
        "independent samples": estimate.diagnostics["ess"],
    }


def paths(seed):
    """Differentiate the density at the end of paths of several lengths."""
    dynamics, _ = water()
    estimator = adjsim.Pathwise(adjsim.ReversibleAdjoint())
    final = adjsim.Final(lambda state: dynamics.density(state) * GRAMS)
    rows = []
    for length in WINDOWS:
        begun = time.process_time()
        estimate = estimator(
            simulation(dynamics, length, exact=True),
            final,
            replicas=REPLICAS,
            chunks=REPLICAS,
            generator=torch.Generator().manual_seed(seed),
        )
        rows.append(
            {
                "length": length,
                "slopes": slopes(estimate, dynamics),
                "growth": estimate.diagnostics["growth"],
                "lost at": estimate.diagnostics["lost_at"],
                "seconds": time.process_time() - begun,
            }
        )
        print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def fluctuations(seed):
    """Return sizes and correlations in time, (numbers, lags), of fluctuations.

    They are those of dU/kT by the logarithms of the numbers, and of the density.
    """
    dynamics, _ = water()
    run, (replicas, length, every) = simulation(dynamics, 0), MEMORY
    frames = adjsim.simulate(
        dynamics,
        run.initial(replicas, None),
        times(length, every),
        solver=run.solver,
        generator=seed,
        compile=True,
    )
    kind = dynamics.state_type
    states = [
        kind(*(getattr(frames, name)[:, k] for name in kind._fields))
        for k in range(replicas)
    ]

    def series(function):
        return torch.stack([function(state) for state in states], -1)

    h, found = 1e-4, []
    for name in SHIFTS:
        energies = []
        for shift in (h, -h):
            change(dynamics, name, shift)
            energies.append(series(dynamics.potential_energy) / KT)
            change(dynamics, name, -shift)
        found.append((energies[0] - energies[1]) / (2 * h))
    x = torch.stack([*found, series(dynamics.density) * GRAMS])
    x = x - x.mean((1, 2), keepdim=True)
    lags = range(round(LONGEST / every) + 1)
    count = x.shape[1]
    products = [(x[:, lag:] * x[:, : count - lag]).mean((1, 2)) for lag in lags]
    variance = products[0]
    return {
        "lags (ps)": [lag * every for lag in lags],
        "sizes": dict(zip((*SHIFTS, "density"), variance.sqrt().tolist(), strict=True)),
        "correlations": torch.stack(products, -1) / variance[:, None],
    }


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # a small system
    head = commit(__file__)  # before the runs, since the code is that of now
    study = json.loads(FILE.read_text()) if FILE.exists() else {}
    study["settings"] = {
        "molecules": MOLECULES,
        "cutoff (nm)": CUTOFF,
        "replicas": REPLICAS,
        "lengths (ps)": LENGTHS,
        "burn-in of changed runs (ps)": BURN_IN,
        "window (ps)": WINDOW,
        "frames (ps)": FRAME,
        "shifts": SHIFTS,
    }
    parts = (starts, state, reweighting, differences, score, paths, fluctuations)
    parts = {part.__name__: part for part in parts}
    for name in sys.argv[1:] or SEEDS:
        begun = time.process_time()
        results = parts[name](SEEDS[name])
        study[name] = {
            "seed": SEEDS[name],
            "commit": head,
            "results": results,
            "seconds": time.process_time() - begun,
        }
        print(name, study[name]["seconds"], flush=True)
        with replacing(FILE) as temporary:
            text = json.dumps(rounded(study, 5), separators=(",", ":"))
            temporary.write_text(text + "\n")


if __name__ == "__main__":
    main()
