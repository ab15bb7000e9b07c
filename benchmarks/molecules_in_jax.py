"""The molecules of the benchmark in jax-md, by its reader of OpenMM's systems."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ase import units
from jax_md.mm_forcefields.amber import energy as amber_energy
from jax_md.mm_forcefields.io.openmm import convert_openmm_system
from jax_md.mm_forcefields.nonbonded.electrostatics import CutoffCoulomb, PMECoulomb
from rounds import Side

jax.config.update("jax_enable_x64", True)

# jax-md has no sum over all pairs of such a molecule; this cutoff, in angstrom, leaves none out.
BEYOND = 1e3
KCAL = units.kcal / units.mol


class InJax:
    """A force field in jax-md, and velocity Verlet with neighbours that are found at the start.

    Args:
        system, pdb: of OpenMM.
        cutoff: of the particle-mesh Ewald sum, in angstrom; None for an open molecule.
        momentum, mass: ``(atoms, 3)`` and ``(atoms, 1)``, in ASE's units.
        dt: in ASE's units.
    """

    def __init__(
        self,
        system: Any,
        pdb: Any,
        cutoff: float | None,
        momentum: np.ndarray,
        mass: np.ndarray,
        dt: float,
    ) -> None:
        box = None if cutoff is None else pdb.topology.getPeriodicBoxVectors()
        read = convert_openmm_system(system, pdb.topology, pdb.positions, box, r_cut=cutoff)
        coulomb = (
            CutoffCoulomb(r_cut=BEYOND)
            if cutoff is None
            else PMECoulomb(np.asarray(read.recip_grid), float(read.recip_alpha), cutoff)
        )
        energy, neighbours, _, _ = amber_energy(
            read.params, read.topology, read.box_vectors, coulomb, read.nb_options
        )
        self.position, self.momentum, self.mass = read.positions, jnp.asarray(momentum), mass
        found = neighbours.allocate(self.position)

        def force(q: Any) -> Any:
            return -KCAL * jax.grad(lambda x: energy(x, found)["etotal"])(q)

        def run(q: Any, p: Any, steps: int) -> Any:
            def step(carry: Any, _: None) -> tuple[Any, None]:
                q, p, f = carry
                p = p + 0.5 * dt * f
                q = q + dt * p / mass
                f = force(q)
                return (q, p + 0.5 * dt * f, f), None

            (q, p, _), _ = jax.lax.scan(step, (q, p, force(q)), None, length=steps)
            return q, p

        self.force = jax.jit(force)
        self.run = jax.jit(run, static_argnums=2)
        self.gradient = jax.jit(
            jax.grad(lambda q, p, steps: (run(q, p, steps)[0] ** 2).sum(), argnums=(0, 1)),
            static_argnums=2,
        )

    def side(self, steps: int, gradient_steps: int) -> Side:
        def measured() -> dict[str, float]:
            found = {}
            for name, function, count in (
                ("forward", self.run, steps),
                ("gradient", self.gradient, gradient_steps),
            ):
                begun = time.perf_counter()
                jax.block_until_ready(function(self.position, self.momentum, count))
                found[name] = (time.perf_counter() - begun) / count
            return found

        return measured
