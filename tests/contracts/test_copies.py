"""Every public object survives a copy, a pickle and a file, and its copy reads no other."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from torch import nn

import adjsim
from adjsim import adjoints, dynamics, meshes, potentials, solvers
from adjsim.core.reading import Reading
from tests import bonded, contact, mechanics
from tests.contracts.test_exclusions import KINDS
from tests.contracts.test_readings import EVERY as READ
from tests.copies import WAYS
from tests.problems import parameter, square, vector
from tests.sites import force_field

BOX = meshes.box([1.0, 1.0, 1.0], [1, 1, 1])
CHARGE = (0.4, -0.3, 0.5, -0.2, 0.1, -0.5)


def network():
    return potentials.MessagePassing(1.5, species=2, hidden=4, basis=3)


MODULES = {
    **READ,
    **bonded.EVERY,
    **{f"body {name}": make for name, make in mechanics.BODIES.items()},
    **{f"pair {name}": (lambda make=make: make(cutoff=2.4)) for name, make in KINDS.items()},
    **{f"surface {name}": make for name, make in contact.SURFACES.items()},
    **{f"penalty {name}": make for name, make in contact.PENALTIES.items()},
    "contact": lambda: contact.contact("plane", "quadratic"),
    "moving": lambda: contact.moving("plane", "softplus"),
    "ball contact": lambda: potentials.ParticleContact(parameter(0.4), parameter(50.0)),
    "neo-Hookean": lambda: adjsim.NeoHookean(BOX, parameter(5.0), 0.3),
    "St. Venant": lambda: adjsim.StVenantKirchhoff(BOX, parameter(5.0), 0.3),
    "corotated": lambda: adjsim.CorotatedLinear(BOX, parameter(5.0), 0.3),
    "hinges": lambda: adjsim.HingeBending(meshes.sheet([1.0, 0.8], [2, 2]), parameter(1.3)),
    "improper": lambda: adjsim.HarmonicImproper([[0, 1, 2, 3]], parameter(1.0), 0.1),
    "solvent": lambda: adjsim.GeneralizedBorn(vector(*CHARGE), [1.5] * 6, [0.8] * 6),
    "dispersion mesh": lambda: potentials.LennardJonesMesh(
        [0, 1, 0], parameter([1.0, 0.5]), vector(1.0, 0.9), box=[4.0] * 3, cutoff=1.9
    ),
    "expression": lambda: potentials.CustomPairs(
        "k*q1*q2/r", {"k": parameter(1.0), "q": [1.0] * 6}
    ),
    "custom solvent": lambda: potentials.CustomSolvent(
        {"n": potentials.Stage("exp(-r)", pairs=True)},
        [potentials.Stage("k*q*n^2")],
        {"k": parameter(1.0), "q": [1.0] * 6},
    ),
    "necked solvent": lambda: adjsim.GeneralizedBorn(
        vector(*CHARGE),
        [1.5] * 6,
        [0.8] * 6,
        neck=parameter(0.4),
        necks=potentials.Necks(torch.full((6, 6), 0.2), torch.full((6, 6), 2.5)),
    ),
    "graph": lambda: adjsim.GraphPotential(network(), 1.5, species=[0, 1]),
    "graph force": lambda: potentials.GraphForce(network(), 1.5, species=[0, 1]),
    "model": lambda: potentials.ForceModel(nn.Linear(3, 3)),
    "precision": lambda: potentials.InPrecision(adjsim.GraphPotential(network(), 1.5)),
    "network": lambda: potentials.PairNetwork(4, 1.5, [4.0] * 3, basis=3),
    "spline": lambda: adjsim.CubicSpline([0.0, 0.4, 1.0], vector(1.0, -2.0, 0.5)),
    "lines": lambda: adjsim.PiecewiseLinear([0.0, 0.4, 1.0], vector(1.0, -2.0, 0.5)),
    "harmonics": lambda: adjsim.Harmonics([1.0, 0.3], [0.5, 1.0], [0.0, 0.2]),
    "actuated": lambda: potentials.Actuated(
        adjsim.Harmonic(1.0), center=adjsim.Harmonics(parameter(0.1), 1.0)
    ),
    "open loop": lambda: potentials.OpenLoop(adjsim.Harmonics(parameter(0.1), 1.0)),
    "controller": lambda: potentials.NeuralController(nn.Linear(7, 3), index=[0]),
    "force field": lambda: potentials.ForceFieldPotential(a=adjsim.Harmonic(parameter(1.0))),
    "virtual sites": lambda: force_field(None),
    "sum": lambda: adjsim.Harmonic(parameter(1.0)) + potentials.ForceModel(nn.Linear(3, 3)),
    "piston": lambda: adjsim.LangevinPiston(
        adjsim.HarmonicBond([[0, 1]], parameter(2.0), 0.5, box=[4.0, 4.1, 4.2]), piston_friction=0.3
    ),
    "piston with chains": lambda: adjsim.NoseHooverPiston(
        adjsim.HarmonicBond([[0, 1]], parameter(2.0), 0.5, box=[4.0, 4.1, 4.2]), chain_tau=0.3
    ),
    "constrained": lambda: adjsim.Constrained(
        adjsim.Hamiltonian(adjsim.Harmonic(parameter(2.0))),
        adjsim.DistanceConstraints([[0, 1]], parameter(1.2)),
    ),
    "constrained piston": lambda: adjsim.Constrained(
        adjsim.LangevinPiston(
            adjsim.HarmonicBond([[0, 2]], parameter(2.0), 0.5, box=[4.0, 4.1, 4.2])
        ),
        adjsim.DistanceConstraints([[0, 1]], parameter(1.2)),
    ),
    "positive": adjsim.Positive,
    "between": lambda: adjsim.Between(0.0, 1.0),
}
# Classes that are made by subclasses, or by a run; states and moves, which are tuples and data
# classes; and those that need a model of another library.
BASES = {
    "BondedPotential", "CompoundTerm", "Contact", "Controller", "CustomTerm", "Dynamics",
    "ElasticPotential", "ForceField", "MassiveDynamics", "MovingContact", "PairPotential",
    "Penalty", "Potential", "RadialPotential", "SeparablePotential", "Signal", "Surface",
    "SurfaceContact", "TabulatedFunction", "Term", "Truncation",
}  # fmt: skip
ELSEWHERE = {
    # tests/interface/test_copies.py and test_copies_of_estimators.py
    "Comparison", "Final", "GradientEstimate", "OdeResult", "Simulation", "TimeAverage",
    # tests/interface/test_confidence.py, tests/gradients/test_steady_state.py
    "Confidence", "SteadyState",
    # tests/contracts/test_mace.py, where the model is installed
    "MACEPotential",
}  # fmt: skip


def made():
    """One object of each other public class."""
    well = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)))
    start = well.init(square()[0], generator=0)
    solver = adjsim.BAOAB(0.1)
    run = adjsim.simulate(well, start, [0.0, 0.2], solver=solver, generator=1)
    ode = adjsim.ODE(lambda t, y: -y)
    decay = ode.init(torch.ones(2, dtype=torch.float64))
    spectrum = adjsim.lyapunov_spectrum(
        ode, decay, [0.0, 1.0], solver=adjsim.RungeKutta("rk4", 0.1)
    )
    noble = potentials.NOBLE_GASES["Ar"]
    shift = dynamics.Shear("position", dynamics.Field("momentum"), "h")
    return [
        run, spectrum, noble, shift, start, decay, potentials.Expression("k*x^2; x=r-1"),
        potentials.Stage("r", pairs=True),
        adjsim.Clip(0.1, 100),
        adjsim.NoseHooverChain(adjsim.Harmonic()).init(*square(), 0),
        adjsim.GeneralizedLangevin(adjsim.Harmonic()).init(*square(), 0),
        adjsim.ESH(adjsim.Harmonic()).init(*square(), 0),
        MODULES["piston"]().init(torch.ones(3, 3, dtype=torch.float64)),
        MODULES["piston with chains"]().init(torch.ones(3, 3, dtype=torch.float64)),
        adjsim.OverdampedLangevin(adjsim.Harmonic()).init(square()[0]),
        potentials.Shifted(), potentials.ForceShifted(), potentials.Switched(1.0),
        dynamics.Scale("momentum", dynamics.Coefficient("c")),
        dynamics.GeneralFlow(("momentum",), torch.add, None),
        dynamics.Combination("c", (dynamics.Force(), dynamics.Random())),
        dynamics.Function(torch.add, ("position",)), dynamics.FunctionOfTime(torch.add),
        dynamics.Time(), dynamics.Field("momentum"), dynamics.Coefficient("c"), dynamics.Force(),
        dynamics.Random(), well.stationary_density(), well.heat_limit(start),
        dynamics.Refusal("a reason"), potentials.Rounding(torch.ones(())),
        adjsim.BrownianPath(1, 0.5),
        adjsim.OverdampedLangevin(adjsim.Harmonic()).stationary_density(),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("copied", WAYS.values(), ids=WAYS)
def test_a_copy_is_itself(copied):
    """A copy of a module holds tensors of its own, with the same values, and no other module."""
    for name, make in MODULES.items():
        module = make()
        twin = copied(module)
        ours, theirs = Reading(module), Reading(twin)
        assert type(twin) is type(module), name
        assert ours.names == theirs.names
        for x, y in zip(ours.tensors, theirs.tensors, strict=True):
            assert torch.equal(x, y), name
            assert x is not y, name
        own = {id(part) for part in module.modules()}
        for part in [*twin.modules(), *theirs.bound().modules()]:
            assert id(part) not in own, name


@pytest.mark.parametrize("copied", WAYS.values(), ids=WAYS)
def test_other_objects_survive(copied):
    ode = adjsim.ODE(torch.add)  # Lambdas cannot be pickled.
    assert copied(ode).fun is torch.add
    for x in made():
        twin = copied(x)
        assert type(twin) is type(x)
        if isinstance(x, tuple):
            assert all(
                torch.equal(*map(torch.as_tensor, pair)) for pair in zip(x, twin, strict=True)
            )
        elif dataclasses.is_dataclass(x) and type(x).__eq__ is not object.__eq__:
            if not isinstance(x, adjsim.LyapunovSpectrum | dynamics.HeatLimit):
                assert twin == x
        elif isinstance(x, adjsim.Trajectory):
            assert torch.equal(twin.position, x.position)
        elif isinstance(x, dynamics.CanonicalPositions):
            state = adjsim.PhaseState(*square())
            assert torch.equal(twin.reduced_energy(state), x.reduced_energy(state))


def test_every_public_class_is_copied_by_a_test():
    covered = {type(part) for make in MODULES.values() for part in make().modules()}
    covered |= {type(x) for x in made()}
    public = {
        name: x
        for module in (adjsim, potentials, dynamics)
        for name, x in vars(module).items()
        if inspect.isclass(x) and x.__module__.startswith("adjsim.") and not inspect.isabstract(x)
    }
    known = {*BASES, *ELSEWHERE, *solvers.__all__, *adjoints.__all__, "Adjoint"}
    left = {
        name
        for name, x in public.items()
        if x not in covered
        and name not in known
        and not issubclass(x, BaseException | adjsim.estimators.Estimator)
    }
    assert not left
