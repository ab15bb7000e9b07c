"""Runs of a molecule of four atoms: every adjoint, compiled, and exact reversal."""

from __future__ import annotations

import itertools

import pytest
import torch

import adjsim
from tests.bonded import close
from tests.problems import parameter, slow_but, vector


def short() -> adjsim.potentials.SumPotential:
    """A number, one for each term and one for each type, with one of each coordinate."""
    return adjsim.HarmonicBond(
        [[0, 1], [1, 2], [2, 3]], vector(20.0, 22.0), parameter(1.53), types=[0, 1, 0]
    ) + adjsim.PeriodicTorsion([[0, 1, 2, 3]] * 2, parameter(0.05), [3, 1], vector(0.0, 0.4))


def bent() -> adjsim.HarmonicAngle:
    return adjsim.HarmonicAngle(
        [[0, 1, 2], [1, 2, 3]], vector(5.0, 6.0), parameter(1.95), types=[0, 1]
    )


def butane() -> adjsim.potentials.SumPotential:
    pair = adjsim.LennardJones(parameter(0.01), parameter(3.0))
    return (
        adjsim.HarmonicBond([[0, 1], [1, 2], [2, 3]], parameter(20.0), parameter(1.53))
        + adjsim.HarmonicAngle([[0, 1, 2], [1, 2, 3]], vector(5.0), vector(1.95), types=[0, 0])
        + adjsim.RyckaertBellemans([[0, 1, 2, 3]], vector(0.1, -0.1, 0.05, -0.2, 0.1, 0.02))
        + adjsim.PeriodicTorsion([[0, 1, 2, 3]] * 2, parameter(0.05), [3, 1], vector(0.0, 0.4))
        + adjsim.HarmonicImproper([[0, 2, 1, 3]], parameter(0.02), parameter(0.4))
        + adjsim.CosineAngle([[0, 1, 2]], parameter(0.5), parameter(1.9))
        + adjsim.UreyBradley([[0, 1, 2]], parameter(0.3), parameter(2.5))
        + adjsim.ScaledPairs(pair, [[0, 3]], 0.5)
        + adjsim.ExplicitPairs([[0, 3]], parameter(0.005), parameter(3.0), parameter(0.01), 14.4)
        + adjsim.FlatBottomRestraint([1], parameter(0.5), torch.zeros(1, 3), parameter(1.0))
    )


def centres() -> adjsim.potentials.SumPotential:
    """Groups and places by expressions, with a table."""
    return adjsim.potentials.CustomCentroid(
        [[0, 1], [2, 3, 1]],
        [[0, 1]],
        "k*f(distance(g1,g2))",
        {"k": parameter(3.0)},
        tables={"f": adjsim.potentials.ContinuousFunction(vector(1.0, 0.2, 0.0, 1.5), 0.5, 4.0)},
        weights=[[1.0, 2.0], [3.0, 1.0, 1.0]],
    ) + adjsim.potentials.CustomExternal(
        [1, 3], "k*(x^2+2*y^2+periodicdistance(x,y,z,x0,0,0)^2)",
        {"k": vector(0.5, 0.6), "x0": parameter(0.2)},
    )  # fmt: skip


def expressions() -> adjsim.potentials.SumPotential:
    """One of each kind of expression of several coordinates."""
    return (
        centres()
        + adjsim.potentials.CustomCompound(
            [[0, 1, 2, 3]],
            "k*(distance(p1,p2)-r0)^2 + k*(distance(p2,p3)-r0)^2 + k*(distance(p3,p4)-r0)^2"
            "+ bend*(angle(p1,p2,p3)-1.9)^2 + twist(kind)*(1-cos(dihedral(p1,p2,p3,p4)))",
            {"k": parameter(10.0), "r0": parameter(1.53), "bend": vector(2.0), "kind": 1.0},
            tables={"twist": adjsim.potentials.DiscreteFunction(vector(0.3, 2.0))},
        )
        + adjsim.potentials.CustomHydrogenBond(
            [[0, 1]],
            [[3, 2], [2, 3]],
            "-q*p*exp(-distance(d1,a1))*cos(angle(d2,d1,a1))^2",
            donor_numbers={"q": vector(0.5)},
            acceptor_numbers={"p": vector(0.3, 0.7)},
            exclusions=[[0, 1]],
            cutoff=8.0,
        )
        # The computed values c of both atoms, as they are read from OpenMM.
        + adjsim.potentials.CustomPairs(
            "w*c1*c2*exp(-r);c1=h(t1)*sqrt(q1);c2=h(t2)*sqrt(q2)",
            {"w": parameter(0.5), "q": vector(0.5, 0.7, 1.0, 0.8), "t": [0.0, 1.0, 1.0, 0.0]},
            tables={"h": adjsim.potentials.DiscreteFunction(vector(0.3, 0.6))},
        )
    )


START = torch.tensor(
    [[0.0, 0, 0], [1.5, 0, 0], [2.1, 1.4, 0], [3.4, 1.5, 0.8]], dtype=torch.float64
)


def run(make, adjoint, *, exact, steps, compile=False, replicas=()):
    """Steps of Langevin dynamics: the trajectory and its dynamics."""
    dynamics = adjsim.Langevin(make(), 14.0, kT=0.03, friction=0.1)
    found = adjsim.simulate(
        dynamics,
        dynamics.init(START.expand(*replicas, 4, 3) + 0, generator=3),
        [0.0, steps * 0.1],
        solver=adjsim.Splitting("BAOAB", 0.1, exact=exact),
        adjoint=adjoint,
        generator=5,
        compile=compile,
    )
    return found, dynamics


def gradients(make, adjoint, **options):
    found, dynamics = run(make, adjoint, **options)
    trainable = dynamics.trainable()
    loss = (found.final.position**2).sum()
    grads = torch.autograd.grad(loss, list(trainable.values()))
    return found, dict(zip(trainable, grads, strict=True))


@pytest.mark.parametrize(
    ("make", "exact"),
    slow_but(
        lambda make, exact: make is short and not exact,
        [*itertools.product((short, butane), (False, True)), (centres, True), (expressions, True)],
        marathon=lambda make, exact: make is expressions or (make is butane and not exact),
    ),
)
def test_every_adjoint_gives_one_gradient(make, exact):
    options = {"exact": exact, "steps": 25, "replicas": (2,)}
    _, direct = gradients(make, adjsim.DirectAdjoint(), **options)
    # The rounding of 25 steps: recomputed states are the same, reversed ones are off by 1e-14.
    for adjoint, tolerance in (
        (adjsim.CheckpointAdjoint(), 1e-12),
        (adjsim.ReversibleAdjoint(), 1e-10),
    ):
        _, found = gradients(make, adjoint, **options)
        for name, grad in direct.items():
            close(found[name], grad, tolerance)


@pytest.mark.parametrize(
    ("make", "exact", "replicas"),
    [
        pytest.param(bent, False, (), marks=pytest.mark.slow),
        pytest.param(short, True, (), marks=pytest.mark.slow),
        *(
            pytest.param(*row, marks=pytest.mark.marathon)
            for row in (
                (short, False, (20,)),
                (butane, False, (2,)),
                (butane, True, ()),
                (expressions, True, ()),
            )
        ),
    ],
)
def test_compiled_runs_equal_eager_ones(make, exact, replicas):
    options = {"exact": exact, "steps": 12, "replicas": replicas}
    eager, expected = gradients(make, adjsim.ReversibleAdjoint(), **options)
    found, grads = gradients(make, adjsim.ReversibleAdjoint(), compile=True, **options)
    assert found.stats["compiled_forward"] == "C++"
    assert found.stats["compiled_backward"] == "C++"
    # Functions such as cos have other last bits, which the forces of 12 steps enlarge.
    close(found.final.position, eager.final.position, 1e-11)
    for name, grad in expected.items():
        close(grads[name], grad, 1e-9)


@pytest.mark.parametrize(
    ("make", "steps", "compile"),
    [
        (short, 100, False),
        pytest.param(butane, 2000, False, marks=pytest.mark.marathon),
        pytest.param(butane, 100_000, True, marks=pytest.mark.marathon),
    ],
)
def test_exact_reversal(make, steps, compile):
    found, _ = gradients(make, adjsim.ReversibleAdjoint(), exact=True, steps=steps, compile=compile)
    assert found.stats["reconstruction_error"] == 0
    assert float((found.final.position - START).abs().max()) > 0.1
