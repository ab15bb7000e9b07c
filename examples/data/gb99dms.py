"""A protein in GBn2 water, its loss of distances, and gradients by four estimators.

The loss is that of J. G. Greener, Chem. Sci. 15, 4897 (2024). For make_gb99dms.py.
"""

import time
from pathlib import Path
from typing import NamedTuple

import openmm.app as app
import torch
from ase import units
from openmm import XmlSerializer, unit

import adjsim
from adjsim.core.durable.files import replacing
from adjsim.core.durable.ranks import Ranks
from adjsim.io import from_openmm, to_openmm, write_force_field

FILES = ("amber14/protein.ff14SB.xml", "implicit/gbn2.xml")
OPTIONS = {
    "nonbondedMethod": app.NoCutoff,
    "constraints": None,
    "rigidWater": False,
    "implicitSolventKappa": 0.7 / unit.nanometer,
}
PS, KT, FRICTION = 1000 * units.fs, 300 * units.kB, 0.1


class Model(NamedTuple):
    """The options of OpenMM for a system, and the step of its runs."""

    options: dict
    dt: float


# The models of the published trainings, and of the published long runs.
FLEXIBLE = Model(OPTIONS, units.fs)
CONSTRAINED = Model(
    OPTIONS | {"constraints": app.HBonds, "hydrogenMass": 4 * unit.amu}, 4 * units.fs
)
NANOMETRE = 10.0
SOLVENT = ("radius", "scale", "alpha", "beta", "gamma", "neck", "offset")
ESTIMATORS = ("exact path", "clipped path", "reweighting", "score")
# Charges, wells, torsions and three kinds of numbers of the solvent. Differences are by
# the common scale of all numbers of a kind.
SIX = (
    "coulomb.charge",
    "lennard_jones.epsilon",
    "torsions.k",
    "solvent.radius",
    "solvent.scale",
    "solvent.neck",
)


class Plan(NamedTuple):
    """The lengths of runs in steps, their number, and a clip (norm in 1/angstrom)."""

    steps: int
    burn_in: int
    every: int
    replicas: int
    norm: float = 0.1
    clip_every: int = 100
    compile: bool = True


class Protein:
    """A structure with ff14SB and GBn2, and the target of its distances (angstrom)."""

    def __init__(self, pdb, target=None, model=FLEXIBLE):
        self.pdb, self.model, self.dt = pdb, model, model.dt
        field = app.ForceField(*FILES)
        self.system = field.createSystem(pdb.topology, **model.options)
        self.potential, structure = from_openmm(
            self.system, pdb.positions, pdb.topology
        )
        self.position = structure.position
        self.dynamics = adjsim.Langevin(
            self.potential, structure.mass, KT, friction=FRICTION / PS
        )
        if structure.constraints is not None:
            held = structure.constraints
            self.dynamics = adjsim.Constrained(self.dynamics, held)
        names = [atom.name for atom in pdb.topology.atoms()]
        self.alpha = torch.tensor([i for i, name in enumerate(names) if name == "CA"])
        self.pairs = torch.triu_indices(len(self.alpha), len(self.alpha), 1)
        self.moments = Moments(self.alpha, self.pairs)
        i, j = self.pairs
        self.weight = ((j - i) / 10).clamp(max=1.0) * 2 / len(self.alpha) ** 2
        self.target = None if target is None else target[:, i, j]
        self.initial, self.index, self.keys, self.estimator = {}, {}, [], None
        groups = self._groups()
        for name, x in self.potential.named_parameters():
            x.requires_grad_(name in groups)
            if name in groups:
                # The numbers of a group are equal, or have one type; zeros stay zero.
                own = list(dict.fromkeys(groups[name]))
                self.initial[name] = x.detach().clone()
                self.index[name] = torch.tensor(
                    [own.index(key) for key in groups[name]]
                )
                self.keys += [f"{name} {key}" for key in own]

    @staticmethod
    def read(folder, name, model=FLEXIBLE):
        """Read a structure, and the means and deviations of its target."""
        lines = (Path(folder) / f"{name}.txt").read_text().split("\n")[:2]
        target = torch.tensor([[float(x) for x in line.split()] for line in lines])
        count = round(target.shape[1] ** 0.5)
        pdb = app.PDBFile(str(Path(folder) / f"{name}.pdb"))
        return Protein(pdb, NANOMETRE * target.reshape(2, count, count), model)

    def _groups(self):
        """Return the group of each number: of one type, term or initial value."""
        wells, torsions = self.potential.lennard_jones, self.potential.torsions
        rows = zip(wells.sigma, wells.epsilon, strict=True)
        well = [f"{s:.6f} {e:.6f}" for s, e in rows]
        names = self.potential.labels["torsions"]
        terms = zip(names, torsions.periodicity, torsions.k, strict=True)
        found = {
            "coulomb.charge": [well[i] for i in wells.species.tolist()],
            "lennard_jones.epsilon": well,
            "lennard_jones.sigma": well,
            "torsions.k": [f"{name} {n:.0f} {k:.6f}" for name, n, k in terms],
        }
        for name in SOLVENT:
            numbers = getattr(self.potential.solvent, name).reshape(-1)
            found[f"solvent.{name}"] = [f"{x:.6f}" for x in numbers]
        return found

    def names(self):
        """Return the names that the dynamics gives to the trained numbers."""
        own = [name for name, _ in self.dynamics.named_parameters()]
        return {
            name: next(x for x in own if x.endswith(f"potential.{name}"))
            for name in self.index
        }

    def _sizes(self):
        return [int(index.max()) + 1 for index in self.index.values()]

    @torch.no_grad()
    def scale(self, scales):
        """Set numbers to their initial values times scales, by key (else 1)."""
        values = torch.tensor([scales.get(key, 1.0) for key in self.keys])
        parts = values.split(self._sizes())
        for (name, initial), own in zip(self.initial.items(), parts, strict=True):
            factor = own[self.index[name]].reshape(initial.shape)
            self.potential.get_parameter(name).copy_(initial * factor)

    def by_scale(self, gradient):
        """Return the derivatives by all scales, from those by the numbers."""
        found = []
        names = self.names()
        for (name, initial), size in zip(
            self.initial.items(), self._sizes(), strict=True
        ):
            terms = (gradient[names[name]] * initial).reshape(-1)
            found.append(terms.new_zeros(size).index_add(0, self.index[name], terms))
        return torch.cat(found)

    def of_kind(self, kind):
        """Return the keys of all numbers of a kind."""
        return [key for key in self.keys if key.split()[0] == kind]

    def by_kind(self, gradient):
        """Return the derivatives by the scales of six kinds, from all scales."""
        kinds = [key.split()[0] for key in self.keys]
        masks = torch.tensor([[kind == name for kind in kinds] for name in SIX])
        return masks.to(gradient) @ gradient

    def write(self, path):
        """Write the numbers as a ForceField XML file of OpenMM, or else as a system.

        The hydrogens of arginine have a type of other hydrogens and other radii, which
        no row of a type can hold where the solvent has changed.
        """
        try:
            topology, options = self.pdb.topology, self.model.options
            write_force_field(path, self.potential, topology, FILES, **options)
        except ValueError as reason:
            print(f"a system is written instead: {reason}")
            system = to_openmm(self.potential, self.system)
            with replacing(Path(path)) as temporary:
                temporary.write_text(XmlSerializer.serialize(system))

    def loss(self, moments):
        """Return the loss of mean moments, ``(2, pairs)``."""
        mean, target, spread = moments[0], *self.target
        # A run of few frames may have less spread than rounding resolves.
        own = (moments[1] - mean**2).clamp(min=1e-8).sqrt()

        def divergence(a, s, b, t):
            return (t / s).log() + (s**2 + (a - b) ** 2) / (2 * t**2) - 0.5

        forward = divergence(target, spread, mean, own)
        backward = divergence(mean, own, target, spread)
        return (self.weight * (forward.log1p() + backward.log1p())).sum()

    def simulation(self, plan):
        def initial(replicas, generator):
            position = self.position.repeat(replicas, 1, 1)
            return self.dynamics.init(position, generator=generator)

        return adjsim.Simulation(
            self.dynamics,
            initial,
            [0.0, plan.steps * self.dt],
            solver=adjsim.Splitting("BAOAB", self.dt, exact=True),
            compile=plan.compile,
        )

    def average(self, function, plan):
        """Return the time average of a function over the frames of a plan."""
        return adjsim.TimeAverage(function, plan.burn_in * self.dt, plan.every)

    def run(self, plan, seed, start=None, clip=None, **options):
        """Run one replica with the record of its moments, retraced by its gradient."""
        simulation, adjoint = self.simulation(plan), adjsim.ReversibleAdjoint()
        if start is None:
            start = simulation.initial(1, torch.Generator().manual_seed(seed))
        return adjsim.simulate(
            self.dynamics,
            start,
            simulation.ts,
            solver=simulation.solver,
            adjoint=adjoint if clip is None else adjoint.clipped(clip),
            record=self.average(self.moments, plan),
            generator=seed,
            compile=plan.compile,
            **options,
        )

    def gradients(self, run):
        """Return the gradients of the loss of a run by all trained numbers."""
        wanted = [x for x in self.dynamics.parameters() if x.requires_grad]
        return torch.autograd.grad(self.loss(run.record[0]), wanted)

    def timed(self, plan, seed, rounds=4, **options):
        """Return the shortest seconds of a run, and of its gradient too, and a run."""
        forward, whole = [], []
        # The first round compiles.
        for _ in range(rounds):
            begun = time.perf_counter()
            with torch.no_grad():
                self.run(plan, seed, **options)
            between = time.perf_counter()
            run = self.run(plan, seed, **options)
            self.gradients(run)
            forward.append(between - begun)
            whole.append(time.perf_counter() - between)
        return min(forward), min(whole), run

    def means(self, plan, seed, store=None):
        """Run all replicas, by all ranks, and return their moments."""

        @torch.no_grad()
        def one(i):
            own = None if store is None else Path(store) / f"means-{i}"
            return self.run(plan, 1000 * seed + i, store=own).record[0]

        return torch.stack(Ranks.of(None).share(plan.replicas, one))

    def shares(self):
        """Return the effective share of the frames of the last gradient, by each kind.

        Of frames that are reweighted: the share if the numbers of one kind had changed
        since alone. Other estimators store no frames.
        """
        if not isinstance(self.estimator, adjsim.Reweighting):
            return {}
        names = {name: [own] for name, own in self.names().items()}
        names["all"] = [x for group in names.values() for x in group]
        return self.estimator.effective_shares(names)

    def gradient(self, kind, plan, means, seed, store=None):
        """Estimate the gradient of the loss at mean moments, with each replica a chunk.

        dL = sum_a dL/dm_a dm_a: the observable is the sum of the moments m_a with fixed
        slopes dL/dm_a.
        """
        center = means.mean(0).requires_grad_()
        slopes = torch.autograd.grad(self.loss(center), center)[0]
        observable = self.average(Slope(self.moments, slopes), plan)
        reversible = adjsim.ReversibleAdjoint()
        clip = adjsim.Clip(plan.norm, plan.clip_every)
        make, options = {
            "exact path": (adjsim.Pathwise, {"adjoint": reversible}),
            "clipped path": (adjsim.Pathwise, {"adjoint": reversible, "clip": clip}),
            "reweighting": (adjsim.Reweighting, {}),
            "score": (adjsim.ScoreFunction, {}),
        }[kind]
        self.estimator = by_scale(make, self)(**options)
        return self.estimator(
            self.simulation(plan),
            observable,
            replicas=plan.replicas,
            chunks=plan.replicas,
            generator=seed,
            store=None if store is None else Path(store) / kind.replace(" ", "-"),
        )


def by_scale(estimator, protein):
    """Return a class of estimators of derivatives by scales, with their errors."""

    class ByScale(estimator):
        def combine(self, simulation, parts, sizes):
            found = super().combine(simulation, parts, sizes)
            for part in parts:
                scales = protein.by_scale(part.grad)
                part.grad = {"scales": scales, "kinds": protein.by_kind(scales)}
            return found

    return ByScale


class Moments:
    """Distances and their squares, ``(..., 2, pairs)``, of states."""

    def __init__(self, alpha, pairs):
        self.first, self.second = alpha[pairs[0]], alpha[pairs[1]]

    def __call__(self, state):
        position = state.position
        r = position[..., self.first, :] - position[..., self.second, :]
        r = r.norm(dim=-1)
        return torch.stack([r, r**2], -2)


class Slope:
    """The sum of moments with fixed slopes, of states."""

    def __init__(self, moments, slopes):
        self.moments, self.slopes = moments, slopes

    def __call__(self, state):
        return (self.moments(state) * self.slopes).sum((-1, -2))
