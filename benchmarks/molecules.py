"""Molecules against OpenMM: microseconds a step, in one run, on one thread.

Alanine dipeptide (22 atoms) in vacuum and in generalised Born solvent (OBC2), a peptide of 20
residues in OBC2, both of amber14, and 216 flexible water molecules (SPC/Fw) with particle-mesh
Ewald. Velocity Verlet, 0.5 fs, float64; OpenMM's CPU platform has mixed precision. All sides begin
with the same positions and momenta, and forces are first compared with OpenMM's Reference platform.
The dipeptide in vacuum and water also run in jax-md, which reads OpenMM's systems. Rounds alternate
between the sides; the smallest time of each side counts. A gradient is a whole run, forward and
backward, with respect to every number of the force field and the start, in constant memory.

With the word `rigid`, 216 rigid waters (TIP3P) by BAOAB against the same field without constraints.

Needs ``pip install -c constraints.txt -e ".[test,bench]"``.
Run: python benchmarks/molecules.py [case ...], python benchmarks/molecules.py million|rigid
"""

from __future__ import annotations

import copy
import resource
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openmm
import torch
from ase import units
from openmm import app, unit
from rounds import Side, measure, one_core
from torch import Tensor, nn

import adjsim
from adjsim.io import Structure, from_openmm

DATA = Path(__file__).parents[1] / "examples" / "data"
DT, KT, ROUNDS = 0.5, 300 * units.kB, 5
FS = units.fs
# The offset of the radii of implicit/obc2.xml, in nm.
OFFSET = 0.009
AMBER = "amber14-all.xml"
# Of OpenMM's forces, in kJ/mol/nm.
FORCE = 0.1 * units.kJ / units.mol
# The largest allowed difference of forces, relative to the largest force: that of the method for
# particle-mesh Ewald, whose tolerance is 5e-4, and rounding of OpenMM's constants elsewhere.
MESH, ROUNDING = 1e-3, 1e-6
# jax-md's Coulomb constant has eight digits.
IN_JAX = 1e-5


@dataclass(frozen=True)
class Case:
    """A molecular system, and the targets of its ratios to OpenMM and to its own forward run."""

    file: str
    fields: tuple[str, ...]
    options: dict[str, Any]
    steps: int
    over_openmm: float
    over_forward: float | None = 3.5
    agree: float = ROUNDING


OPEN = {"nonbondedMethod": app.NoCutoff}
CASES = {
    "dipeptide": Case("dipeptide.pdb", (AMBER,), OPEN, 20000, 1.0),
    "dipeptide OBC2": Case("dipeptide.pdb", (AMBER, "implicit/obc2.xml"), OPEN, 10000, 1.0),
    "peptide OBC2": Case("peptide.pdb", (AMBER, "implicit/obc2.xml"), OPEN, 1000, 0.35),
    "water": Case(
        "water.pdb",
        (str(DATA / "spcfw.xml"),),
        {"nonbondedMethod": app.PME, "nonbondedCutoff": 0.9 * unit.nanometer},
        200,
        1.0,
        3.0,
        MESH,
    ),
}


@dataclass(frozen=True)
class Molecules:
    """A case as it is run."""

    system: Any
    potential: nn.Module
    structure: Structure
    momentum: Tensor
    steps: int

    def dynamics(self) -> adjsim.Hamiltonian:
        return adjsim.Hamiltonian(self.potential, self.structure.mass)

    def context(self, platform: str, system: Any = None) -> Any:
        system = self.system if system is None else system
        options = {"Threads": "1"} if platform == "CPU" else {}
        integrator = openmm.VerletIntegrator(DT * unit.femtosecond)
        chosen = openmm.Platform.getPlatformByName(platform)
        context = openmm.Context(system, integrator, chosen, options)
        context.setPositions(self.structure.position.numpy() * unit.angstrom)
        velocity = self.momentum / self.structure.mass.unsqueeze(-1) * FS
        context.setVelocities(velocity.numpy() * unit.angstrom / unit.femtosecond)
        return context


def molecules(case: Case) -> Molecules:
    pdb = app.PDBFile(str(DATA / case.file))
    field = app.ForceField(*case.fields)
    system = field.createSystem(
        pdb.topology, constraints=None, rigidWater=False, removeCMMotion=False, **case.options
    )
    potential, structure = from_openmm(system, pdb.positions, pdb.topology)
    dynamics = adjsim.Hamiltonian(potential, structure.mass)
    with torch.no_grad():
        momentum = dynamics.thermal_momentum(structure.position, KT, 0)
    made = Molecules(system, potential, structure, momentum, case.steps)
    state = made.context("Reference").getState(getForces=True)
    reference = torch.tensor(state.getForces(asNumpy=True)._value) * FORCE
    error = (adjsim.force(potential, structure.position).detach() - reference).abs().max()
    error = float(error / reference.abs().max())
    assert error < case.agree, error
    print(f"forces differ from OpenMM's Reference platform by {error:.1e} of the largest")
    return made


def forward(made: Molecules, exact: bool) -> Side:
    # Compiled loops belong to a dynamics.
    dynamics = made.dynamics()
    start = dynamics.init(made.structure.position, made.momentum)

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        with torch.no_grad():
            adjsim.simulate(
                dynamics,
                start,
                [0.0, made.steps * DT * FS],
                solver=adjsim.Splitting("BAB", DT * FS, exact=exact),
                compile=True,
            )
        return {"forward": (time.perf_counter() - begun) / made.steps}

    return run


def gradient(made: Molecules, exact: bool) -> Side:
    inputs = [x.clone().requires_grad_() for x in (made.structure.position, made.momentum)]
    dynamics, steps = made.dynamics(), max(10, made.steps // 4)
    wanted = [*dynamics.parameters(), *inputs]

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        found = adjsim.simulate(
            dynamics,
            dynamics.init(*inputs),
            [0.0, steps * DT * FS],
            solver=adjsim.Splitting("BAB", DT * FS, exact=exact),
            # A plain run this long may not be retraced; its time is what is measured.
            adjoint=adjsim.ReversibleAdjoint(tol=1e300),
            compile=True,
        )
        middle = time.perf_counter()
        torch.autograd.grad(found.final.position.square().sum(), wanted, allow_unused=True)
        end = time.perf_counter()
        return {"forward": (middle - begun) / steps, "gradient": (end - begun) / steps}

    return run


def with_obc_force(system: Any) -> Any | None:
    """Return the system with OpenMM's own force of OBC2 in place of its file's custom force.

    Both are the same function, and which one is faster depends on the platform.
    """
    twin = copy.deepcopy(system)
    for number, custom in enumerate(twin.getForces()):
        if isinstance(custom, openmm.CustomGBForce):
            own = openmm.GBSAOBCForce()
            for k in range(custom.getNumParticles()):
                charge, radius, scaled = custom.getParticleParameters(k)
                own.addParticle(charge, radius + OFFSET, scaled / radius)
            twin.removeForce(number)
            twin.addForce(own)
            return twin
    return None


def in_openmm(made: Molecules, system: Any) -> Side:
    # The first forces begin the threads.
    with one_core():
        context = made.context("CPU", system)
        context.getState(getForces=True)
    integrator = context.getIntegrator()

    @one_core()
    def run() -> dict[str, float]:
        begun = time.perf_counter()
        integrator.step(made.steps)
        context.getState(getPositions=True)
        return {"forward": (time.perf_counter() - begun) / made.steps}

    return run


def in_jax(made: Molecules, case: Case) -> dict[str, Side]:
    """Return the side of jax-md, where it is installed and can do the case.

    It has no generalised Born solvent. Its gradient is with respect to the start alone, and it
    stores every step.
    """
    try:
        from molecules_in_jax import InJax
    except ImportError as missing:
        print(f"without jax-md: {missing}")
        return {}
    if any("obc2" in field for field in case.fields):
        return {}
    cutoff = case.options.get("nonbondedCutoff")
    there = InJax(
        made.system,
        app.PDBFile(str(DATA / case.file)),
        None if cutoff is None else cutoff.value_in_unit(unit.angstrom),
        made.momentum.numpy(),
        made.structure.mass.unsqueeze(-1).numpy(),
        DT * FS,
    )
    own = adjsim.force(made.potential, made.structure.position).detach()
    theirs = torch.from_numpy(np.array(there.force(there.position)))
    error = float((own - theirs).abs().max() / own.abs().max())
    assert error < IN_JAX, error
    return {"jax-md": there.side(made.steps, max(10, made.steps // 4))}


def compare(name: str) -> None:
    case = CASES[name]
    made = molecules(case)
    sides = {
        "adjsim": forward(made, False),
        "adjsim gradient": gradient(made, False),
        "OpenMM CPU": in_openmm(made, made.system),
    }
    own = with_obc_force(made.system)
    if own is not None:
        sides["OpenMM CPU, GBSAOBCForce"] = in_openmm(made, own)
    sides |= in_jax(made, case)
    if case.over_forward is not None:
        sides["adjsim, exact"] = forward(made, True)
        sides["adjsim gradient, exact"] = gradient(made, True)
    best = measure(sides, ROUNDS)
    reference = min(best[side]["forward"] for side in best if side.startswith("OpenMM"))
    target = "no target" if case.over_forward is None else f"target {case.over_forward}"
    print(
        f"\n{name}, {len(made.structure.position)} atoms, {len(list(made.potential.parameters()))} "
        f"parameters; forward over OpenMM: target {case.over_openmm}; gradient over own forward: "
        f"{target}"
    )
    print(f"| {'side':24} | us a step | over OpenMM | gradient, us | over forward |")
    print("|---|---|---|---|---|")
    for side, found in best.items():
        row = f"| {side:24} | {1e6 * found['forward']:9.1f} | {found['forward'] / reference:.3f} |"
        if "gradient" in found:
            whole, plain = found["gradient"], found["forward"]
            row += f" {1e6 * whole:9.1f} | {whole / plain:.2f} |"
        else:
            row += " | |"
        print(row, flush=True)


def rigid() -> None:
    """Compare steps of rigid water with steps of flexible water, by the same word and step."""
    # The start of a run takes as long as ten steps.
    pdb, steps = app.PDBFile(str(DATA / "water.pdb")), 200
    field = app.ForceField("amber14/tip3p.xml")
    options = {"nonbondedMethod": app.PME, "nonbondedCutoff": 0.9 * unit.nanometer}

    def water(held: bool) -> tuple[Any, Any]:
        system = field.createSystem(pdb.topology, rigidWater=held, removeCMMotion=False, **options)
        potential, structure = from_openmm(system, pdb.positions, pdb.topology)
        inner = adjsim.Langevin(potential, structure.mass, KT, 0.001 / FS)
        if not held:
            return inner, inner.init(structure.position, generator=0)
        oxygen, *hydrogens = structure.position.reshape(-1, 3, 3).unbind(1)
        arms = [nn.functional.normalize(x - oxygen, dim=-1) * 0.9572 for x in hydrogens]
        near = torch.stack([oxygen, *(oxygen + x for x in arms)], 1).reshape(-1, 3)
        dynamics = adjsim.Constrained(inner, structure.constraints)
        return dynamics, dynamics.init(near, generator=0)

    def run(dynamics: Any, start: Any, exact: bool) -> dict[str, float]:
        solver = adjsim.Splitting("BAOAB", DT * FS, exact=exact)
        adjoint = adjsim.ReversibleAdjoint(tol=1e300)
        times = []
        for differentiated in (False, True):
            begun = time.perf_counter()
            with torch.set_grad_enabled(differentiated):
                found = adjsim.simulate(
                    dynamics,
                    start,
                    [0.0, steps * DT * FS],
                    solver=solver,
                    adjoint=adjoint,
                    compile=True,
                    generator=0,
                )
                if differentiated:
                    wanted = list(dynamics.parameters())
                    loss = found.final.position.square().sum()
                    torch.autograd.grad(loss, wanted, allow_unused=True)
            times.append((time.perf_counter() - begun) / steps)
        return {"forward": times[0], "gradient": times[1]}

    sides: dict[str, Side] = {}
    for held in (False, True):
        dynamics, start = water(held)
        for exact in (False, True):
            name = f"{'rigid' if held else 'flexible'}{', exact' if exact else ''}"
            sides[name] = partial(run, dynamics, start, exact)
    best = measure(sides, ROUNDS)
    print("| side | us a step | over flexible | gradient, us | over flexible | over forward |")
    print("|---|---|---|---|---|---|")
    for name, found in best.items():
        base = best[name.replace("rigid", "flexible")]
        forward, gradient = (found[x] / base[x] for x in ("forward", "gradient"))
        print(
            f"| {name} | {1e6 * found['forward']:.0f} | {forward:.2f} | "
            f"{1e6 * found['gradient']:.0f} | {gradient:.2f} | "
            f"{found['gradient'] / found['forward']:.2f} |"
        )


def million() -> None:
    """Measure the memory of an exact gradient through a million steps of the dipeptide."""
    made = molecules(CASES["dipeptide"])
    dynamics = adjsim.Langevin(made.potential, made.structure.mass, KT, 0.001 / FS)
    inputs = [x.clone().requires_grad_() for x in (made.structure.position, made.momentum)]

    def run(steps: int) -> float:
        begun = time.perf_counter()
        found = adjsim.simulate(
            dynamics,
            dynamics.init(*inputs),
            [0.0, steps * DT * FS],
            solver=adjsim.Splitting("BAOAB", DT * FS, exact=True),
            adjoint=adjsim.ReversibleAdjoint(),
            compile=True,
            generator=0,
        )
        wanted = [*dynamics.parameters(), *inputs]
        torch.autograd.grad(found.final.position.square().sum(), wanted, allow_unused=True)
        assert found.stats["reconstruction_error"] == 0
        return time.perf_counter() - begun

    run(1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = run(10**6)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"a million exact BAOAB steps of the dipeptide, forward and backward: {seconds:.0f} s, ")
    print(f"the resident set grew by {grown:.1f} MB; the start came back bit for bit")


def main() -> None:
    torch.set_num_threads(1)
    words = sys.argv[1:]
    if words in (["million"], ["rigid"]):
        {"million": million, "rigid": rigid}[words[0]]()
        return
    for name in words or CASES:
        compare(name)


if __name__ == "__main__":
    main()
