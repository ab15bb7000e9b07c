"""simulate(): what it promises about paths, batches and dtypes, and what it refuses before any
work.
"""

from __future__ import annotations

import itertools
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

import adjsim
from adjsim import (
    BacksolveAdjoint,
    CheckpointAdjoint,
    DirectAdjoint,
    ODESolver,
    ReversibleAdjoint,
    Splitting,
    TimeAverage,
    VelocityVerlet,
)
from adjsim.core.trajectory import OWN
from tests.problems import DYNAMICS, POTENTIALS, parameter, slow_but, square

SOLVERS = [
    *[
        ("hamiltonian", s)
        for s in (
            VelocityVerlet(0.01),
            ODESolver("rk4", dt=0.01),
        )
    ],
    pytest.param("hamiltonian", ODESolver(), marks=pytest.mark.slow),
    pytest.param("hamiltonian", ODESolver("fixed_adams", dt=0.01), marks=pytest.mark.slow),
    ("chain-3", Splitting("NBABN", 0.01)),
    ("esh", Splitting("EAE", 0.01)),
]


def build(name="hamiltonian", potential="lennard-jones"):
    return DYNAMICS[name](POTENTIALS[potential]())


@pytest.mark.parametrize(("name", "solver"), SOLVERS, ids=lambda x: repr(x))
def test_the_path_does_not_depend_on_save_times_or_record(name, solver):
    dynamics = build(name)
    start = dynamics.init(*square())
    every = adjsim.simulate(dynamics, start, torch.arange(51) * 0.01, solver=solver)
    few = adjsim.simulate(dynamics, start, [0.0, 0.03, 0.31, 0.5], solver=solver)
    for field in start._fields:
        assert torch.equal(getattr(few, field), getattr(every, field)[[0, 3, 31, 50]])
        assert torch.equal(getattr(every.final, field), getattr(every, field)[-1])
    recorded = adjsim.simulate(
        dynamics, start, [0.0, 0.31, 0.5], solver=solver, record=lambda s: s.position
    )
    assert torch.equal(recorded.record, every.position[[0, 31, 50]])
    averaged = adjsim.simulate(
        dynamics, start, [0.0, 0.5], solver=solver, record=TimeAverage(lambda s: s.position)
    )
    assert all(torch.equal(a, b) for a, b in zip(averaged.final, every.final, strict=True))


@pytest.mark.parametrize(
    "adjoint",
    [DirectAdjoint(), CheckpointAdjoint(3), ReversibleAdjoint(checkpoint_every=7)],
    ids=repr,
)
def test_the_path_does_not_depend_on_the_adjoint(adjoint):
    dynamics = build("chain-3")
    start = dynamics.init(*square())
    options = {"ts": [0.0, 0.2, 0.5], "solver": Splitting("NBABN", 0.01)}
    plain = adjsim.simulate(dynamics, start, **options)
    other = adjsim.simulate(dynamics, start, adjoint=adjoint, **options)
    assert all(torch.equal(getattr(plain, f), getattr(other, f)) for f in start._fields)


@pytest.mark.parametrize(
    ("name", "potential"),
    slow_but(
        lambda name, potential: (
            (name == "hamiltonian" and potential in ("tilted", "mixture", "bonded", "plain-module"))
            or potential == "lennard-jones"
        ),
        itertools.product(["hamiltonian", "hamiltonian-masses", "chain-3", "esh"], POTENTIALS),
        # No dynamics knows its potential.
        marathon=lambda name, potential: name != "hamiltonian",
    ),
)
def test_a_batch_gives_the_numbers_of_its_replicas(name, potential):
    dynamics = build(name, potential)
    position, momentum = square((2, 3))
    solver = Splitting({"chain-3": "NBABN", "esh": "EAE"}.get(name, "BAB"), 0.0005)
    together = adjsim.simulate(
        dynamics, dynamics.init(position, momentum), [0.0, 0.005], solver=solver
    ).final
    for i in range(2):
        for j in range(3):
            start = dynamics.init(position[i, j], momentum[i, j])
            alone = adjsim.simulate(dynamics, start, [0.0, 0.005], solver=solver).final
            for a, b in zip(together, alone, strict=True):
                torch.testing.assert_close(a[i, j], b, rtol=1e-12, atol=1e-12)


def test_time_average_is_the_mean_over_steps():
    dynamics = build()
    start = dynamics.init(*square())
    frames = adjsim.simulate(dynamics, start, torch.arange(101) * 0.01, solver=VelocityVerlet(0.01))
    for burn_in, first in ((0.0, 1), (0.3, 31), (0.305, 31), (0.99, 100)):
        mean = adjsim.simulate(
            dynamics,
            start,
            [0.0, 1.0],
            solver=VelocityVerlet(0.01),
            record=TimeAverage(lambda s: s.position, burn_in),
        ).record
        torch.testing.assert_close(mean, frames.position[first:].mean(0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["hamiltonian", "chain-3", "esh"])
def test_dtype_follows_the_state(name, dtype):
    dynamics = build(name)
    start = dynamics.init(*(x.to(dtype) for x in square()))
    solver = Splitting({"chain-3": "NBABN", "esh": "EAE"}.get(name, "BAB"), 0.01)
    run = adjsim.simulate(
        dynamics, start, [0.0, 0.3], solver=solver, adjoint=ReversibleAdjoint(tol=1e-3)
    )
    assert all(x.dtype == dtype for x in (*run.final, run.position))
    run.final.position.square().sum().backward()
    assert dynamics.potential.epsilon.grad.dtype == torch.float64  # parameters keep their own
    assert run.stats["reconstruction_error"] < (1e-5 if dtype == torch.float32 else 1e-13)


def test_float32_says_its_range():
    """Where single precision cannot retrace a run to the tolerance, the error says what reaches
    further.
    """
    dynamics = build()
    start = dynamics.init(*(x.float() for x in square()))
    run = adjsim.simulate(
        dynamics, start, [0.0, 6.0], solver=VelocityVerlet(0.01), adjoint=ReversibleAdjoint()
    )
    with pytest.raises(
        adjsim.ReconstructionError, match="float64 reaches much further than float32"
    ):
        run.final.position.sum().backward()


def test_pinned_atoms_stay():
    """An infinite mass: no motion, no momentum, and a gradient for the others."""
    mass = nn.Parameter(torch.tensor([1.0, float("inf"), 2.0, 1.0]))
    dynamics = adjsim.NoseHooverChain(adjsim.LennardJones(parameter(1.0)), mass, parameter(0.5))
    assert dynamics.masses.dof(square()[0]) == 6
    start = dynamics.init(square()[0], generator=torch.Generator().manual_seed(1))
    assert torch.equal(start.momentum[1], torch.zeros(2))
    for adjoint in (DirectAdjoint(), ReversibleAdjoint()):
        run = adjsim.simulate(
            dynamics, start, [0.0, 0.3], solver=Splitting("NBABN", 0.01), adjoint=adjoint
        )
        assert torch.equal(run.final.position[1], start.position[1])
        assert not torch.equal(run.final.position[0], start.position[0])
        grads = torch.autograd.grad(
            run.final.position.square().sum(), list(dynamics.parameters()), retain_graph=True
        )
        assert all(torch.isfinite(g).all() for g in grads)
        assert grads[-1] is not None


def test_drawn_momenta_are_thermal_reproducible_and_differentiable():
    dynamics = adjsim.NoseHooverChain(adjsim.Harmonic(), parameter(2.0), parameter(0.7))
    position = torch.zeros(4000, 2, 2)
    a = dynamics.init(position, generator=torch.Generator().manual_seed(3))
    b = dynamics.init(position[:100], generator=torch.Generator().manual_seed(3))
    assert torch.equal(a.momentum[:100], b.momentum)
    # 16,000 independent squares: the relative standard error of their mean is sqrt(2 / 16000) = 1.1
    # %.
    assert float((a.momentum**2).mean() / 2.0) == pytest.approx(0.7, rel=0.045)
    (by_mass, by_kT) = torch.autograd.grad(a.momentum.square().sum(), (dynamics.mass, dynamics.kT))
    torch.testing.assert_close(by_mass * 2.0, by_kT * 0.7)


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (
            [0.0, 0.015],
            r"ts\[1\] = 0.015 is not an integer number of steps of dt = 0.01.*0.01 and 0.02",
        ),
        ([0.0, 0.2, 0.1], "increase"),
        ([0.0], "at least one save time"),
        ([0.0, float("nan")], "finite"),
        ([0.0, 0.01, 0.01 + 1e-9], "two save times fall on one step"),
    ],
)
def test_times_that_are_refused(times, says):
    dynamics = build()
    with pytest.raises(ValueError, match=says):
        adjsim.simulate(dynamics, dynamics.init(*square()), times, solver=VelocityVerlet(0.01))


def test_times_within_a_thousandth_of_a_step_are_taken():
    dynamics = build()
    start = dynamics.init(*square())
    run = adjsim.simulate(dynamics, start, [5.0, 5.1 + 9e-6], solver=VelocityVerlet(0.01))
    assert run.stats["steps"] == 10


class Counting(nn.Module):
    """Counts how often it is asked."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, position):
        self.calls += 1
        return (position**2).sum((-1, -2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"position": torch.full((4, 2), float("nan"), dtype=torch.float64)},
            "position has NaN or infinite entries",
        ),
        (
            {"momentum": torch.full((4, 2), float("inf"), dtype=torch.float64)},
            "momentum has NaN or infinite entries",
        ),
        ({"momentum": torch.zeros(4, 3, dtype=torch.float64)}, r"momentum has shape \(4, 3\)"),
        ({"position": torch.zeros(4)}, r"position has shape \(4,\)"),
        ({"momentum": torch.zeros(4, 2, dtype=torch.float32)}, "give all fields the same dtype"),
        ({"position": torch.zeros(0, 2), "momentum": torch.zeros(0, 2)}, "nothing to simulate"),
    ],
)
def test_starts_that_are_refused_before_any_step(change, says):
    potential = Counting()
    dynamics = adjsim.Hamiltonian(potential)
    start = adjsim.PhaseState(*square())._replace(**change)
    potential.calls = 0
    with pytest.raises(ValueError, match=says):
        adjsim.simulate(dynamics, start, [0.0, 1.0], solver=VelocityVerlet(0.01))
    assert potential.calls <= 1  # a check of its shape, never a step


def test_other_things_that_are_refused():
    dynamics = build()
    start = dynamics.init(*square())

    def run(**changes):
        options = {
            "dynamics": dynamics,
            "state": start,
            "ts": [0.0, 0.1],
            "solver": VelocityVerlet(0.01),
            **changes,
        }
        return adjsim.simulate(**options)

    with pytest.raises(ValueError, match="init needs the momentum"):
        dynamics.init(square()[0])
    with pytest.raises(ValueError, match="ESH needs at least two dimensions"):
        adjsim.ESH(adjsim.Harmonic()).init(torch.zeros(1, 1))
    assert adjsim.ESH(adjsim.Harmonic()).init(torch.zeros(5, 1, 2)).position.shape == (5, 1, 2)
    with pytest.raises(ValueError, match="has a term 'B' that it leaves out; its terms are A, B"):
        run(solver=Splitting("A", 0.01))
    with pytest.raises(ValueError, match="has no term 'N'"):
        run(solver=Splitting("NBABN", 0.01))
    with pytest.raises(ValueError, match="mass has 3 entries and the state 4 atoms"):
        run(dynamics=adjsim.Hamiltonian(adjsim.Harmonic(), mass=torch.ones(3)))
    with pytest.raises(ValueError, match="mass must be positive; got -1"):
        adjsim.Hamiltonian(adjsim.Harmonic(), mass=-1.0)
    with pytest.raises(ValueError, match=r"mass must be one number.*got shape \(4, 2\)"):
        adjsim.Hamiltonian(adjsim.Harmonic(), mass=torch.ones(4, 2))
    with pytest.raises(TypeError, match="steps a ChainState, not a PhaseState"):
        run(dynamics=build("chain-3"), solver=Splitting("NBABN", 0.01))

    class Wrong(nn.Module):
        def forward(self, position):
            return position**2

    with pytest.raises(
        ValueError, match=r"the potential maps position \(4, 2\) to energy \(4, 2\)"
    ):
        run(dynamics=adjsim.Hamiltonian(Wrong()))

    class Detached(nn.Module):
        def forward(self, position):
            return position.detach().square().sum((-1, -2))

    with pytest.raises(ValueError, match="Detached depends on positions in a way that torch does"):
        run(dynamics=adjsim.Hamiltonian(Detached()))

    class OfRows(adjsim.potentials.PairPotential):
        def pair_energy(self, s):
            return s.sum(-1)

    with pytest.raises(ValueError, match=r"OfRows must be elementwise .* it has shape \(4,\)"):
        run(dynamics=adjsim.Hamiltonian(OfRows()))

    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1, dtype=torch.float32)

        def forward(self, position):
            return self.layer(position).sum((-1, -2))

    with pytest.raises(
        ValueError, match="Single has parameters of float32 and position is float64"
    ):
        run(dynamics=adjsim.Hamiltonian(Single()))
    with pytest.raises(ValueError, match=r"burn_in = 0\.2 leaves nothing"):
        run(record=TimeAverage(lambda s: s.position, burn_in=0.2))
    with pytest.raises(ValueError, match="burn_in must be"):
        TimeAverage(lambda s: s.position, burn_in=-1.0)
    with pytest.raises(TypeError, match="record must return a tensor"):
        run(record=lambda s: 1.0)
    with pytest.raises(ValueError, match="dt must be a positive time"):
        VelocityVerlet(0.0)
    for bad in (
        {"method": "rk5"},
        {"method": "rk4"},
        {"method": "dopri5", "dt": 0.1},
        {"rtol": 0.0},
    ):
        with pytest.raises(
            ValueError, match=r"unknown ODE method|give dt|leave dt out|must be positive"
        ):
            ODESolver(**bad)


@pytest.mark.parametrize(
    ("solver", "adjoint", "fitting"),
    [
        (
            VelocityVerlet(0.01),
            BacksolveAdjoint(),
            "CheckpointAdjoint, DirectAdjoint, ReversibleAdjoint",
        ),
        (ODESolver(), ReversibleAdjoint(), "BacksolveAdjoint, DirectAdjoint"),
        (ODESolver(), CheckpointAdjoint(), "BacksolveAdjoint, DirectAdjoint"),
    ],
)
def test_pairs_that_do_not_go_together_name_those_that_do(solver, adjoint, fitting):
    dynamics = build()
    with pytest.raises(TypeError, match=f"does not go with .*; these do: {fitting}"):
        adjsim.simulate(
            dynamics, dynamics.init(*square()), [0.0, 0.1], solver=solver, adjoint=adjoint
        )


@pytest.mark.parametrize(
    "adjoint", [DirectAdjoint(), CheckpointAdjoint(), ReversibleAdjoint()], ids=repr
)
def test_a_run_that_explodes_names_the_step(adjoint):
    """In -q^4 a particle escapes in finite time; the step at which it did is found by hand here."""

    class Escape(nn.Module):
        def forward(self, position):
            return -(position**4).sum((-1, -2))

    dynamics, dt = adjsim.Hamiltonian(Escape()), 0.1
    q, p = torch.ones(1, 1), torch.zeros(1, 1)
    step = 0
    while bool(torch.isfinite(q + p).all()):
        p = p + dt / 2 * 4 * q**3
        q = q + dt * p
        p = p + dt / 2 * 4 * q**3
        step += 1
    start = dynamics.init(torch.ones(1, 1), torch.zeros(1, 1))
    with pytest.raises(FloatingPointError, match=rf"in step {step} \(t = {step * dt:g}\)"):
        adjsim.simulate(dynamics, start, [0.0, 50.0], solver=VelocityVerlet(dt), adjoint=adjoint)


def test_a_flow_without_an_inverse_is_for_checkpoints():
    """A term that rounds momenta down destroys information."""
    from adjsim.dynamics import GeneralFlow, Term

    class Forget(Term):
        def drift(self, t, state):
            return {}

        def moves(self, h, state):
            return (
                GeneralFlow(("momentum",), lambda c, p: (p * (p.detach().abs() > 0.05),), None),
            )

    class Forgetful(adjsim.Hamiltonian):
        @property
        def terms(self):
            return super().terms | {"V": Forget()}

    made = build()
    dynamics = Forgetful(made.potential, made.mass)
    start = dynamics.init(*square())
    options = {"ts": [0.0, 0.2], "solver": Splitting("VBABV", 0.01)}
    with pytest.raises(
        TypeError, match=r"term 'V' of Forgetful has no inverse.*CheckpointAdjoint\(\)"
    ):
        adjsim.simulate(dynamics, start, adjoint=ReversibleAdjoint(), **options)
    found = []
    for adjoint in (DirectAdjoint(), CheckpointAdjoint()):
        run = adjsim.simulate(dynamics, start, adjoint=adjoint, **options)
        found.append(
            torch.autograd.grad(run.final.position.square().sum(), list(dynamics.parameters()))
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_trajectory_says_what_it_has():
    dynamics = build()
    start = dynamics.init(*square())
    run = adjsim.simulate(
        dynamics, start, [0.0, 0.1], solver=VelocityVerlet(0.01), record=lambda s: s.position
    )
    with pytest.raises(AttributeError, match="was not saved, since record= was given"):
        run.position  # noqa: B018
    with pytest.raises(AttributeError, match="has no 'direction'"):
        run.direction  # noqa: B018
    assert "2 frames of PhaseState" in repr(run)
    assert run.stats["steps"] == 10
    assert run.stats["order"] == 2
    assert run.stats["energy_evaluations"] == 11  # "BAB" shares one force a step


def test_work_is_counted_through_the_backward():
    dynamics = build()
    start = dynamics.init(*square())
    expected = {"DirectAdjoint": 22, "ReversibleAdjoint": 11 + 22}
    for adjoint in (DirectAdjoint(), ReversibleAdjoint()):
        run = adjsim.simulate(
            dynamics,
            start,
            [0.0, 0.1],
            solver=VelocityVerlet(0.01),
            adjoint=adjoint,
            record=lambda s: s.position,
        )
        run.record[-1].square().sum().backward()
        # The last force moves no position that the loss sees, and needs no product.
        assert (
            expected[type(adjoint).__name__] - 2
            <= run.stats["energy_evaluations"]
            <= expected[type(adjoint).__name__]
        )


def test_the_example_of_the_readme_runs():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert float(names["sigma"].grad) != 0
    assert names["run"].stats["reconstruction_error"] < 1e-9


def test_steps_are_those_of_the_whole_run():
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic())
    times = [0.0, 0.1, 0.3]
    run = adjsim.simulate(
        dynamics, dynamics.init(*square()), times, solver=adjsim.VelocityVerlet(0.01)
    )
    assert run.stats["steps"] == 30


def test_defaults_of_dynamics_are_one():
    potential = adjsim.Harmonic()
    for dynamics, names in (
        (adjsim.Hamiltonian(potential), ["mass"]),
        (adjsim.Langevin(potential), ["mass", "kT", "friction"]),
        (adjsim.OverdampedLangevin(potential), ["kT", "friction"]),
        (adjsim.NoseHooverChain(potential), ["mass", "kT", "tau"]),
        (adjsim.GeneralizedLangevin(potential), ["mass", "kT", "rates", "strengths"]),
    ):
        assert [float(getattr(dynamics, name)) for name in names] == [1.0] * len(names)
    assert adjsim.NoseHooverChain(potential).length == 3


def test_canonical_weights_sum_to_one_over_time():
    weights = adjsim.dynamics.canonical_weights(torch.tensor([[0.0, 1.0], [0.5, 3.0]]))
    torch.testing.assert_close(weights.sum(0), torch.ones(2))
    torch.testing.assert_close(weights[1] / weights[0], torch.tensor([0.5, 2.0]).exp())


@pytest.mark.parametrize(
    ("solver", "adjoint"),
    [
        (adjsim.VelocityVerlet(0.1), adjsim.DirectAdjoint()),
        (adjsim.Splitting("BAB", 0.1, exact=True), adjsim.CheckpointAdjoint()),
        (adjsim.ImplicitMidpoint(0.1), adjsim.CheckpointAdjoint()),
        (adjsim.RungeKutta("rk4", 0.1), adjsim.DirectAdjoint()),
        (adjsim.ODESolver(), adjsim.DirectAdjoint()),
        (adjsim.ODESolver(), adjsim.BacksolveAdjoint()),
        (adjsim.Splitting("BAB", 0.1, exact=True), adjsim.ReversibleAdjoint()),
        (adjsim.VelocityVerlet(0.1), adjsim.ReversibleAdjoint()),
    ],
    ids=repr,
)
def test_every_run_says_what_was_reconstructed(solver, adjoint):
    """None before backward, and after it too where nothing is reconstructed."""
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    run = adjsim.simulate(
        dynamics, dynamics.init(*square()), [0.0, 0.3], solver=solver, adjoint=adjoint
    )
    assert run.stats["reconstruction_error"] is None
    run.final.position.sum().backward()
    reversible = isinstance(adjoint, adjsim.ReversibleAdjoint)
    assert (run.stats["reconstruction_error"] is not None) == reversible
    if reversible:
        # The start is the one state that a plain run stores; an exact run stores none.
        assert run.stats["checkpoints"] == (0 if solver.exact else 1)


def test_compiled_runs_and_stores_have_their_keys_from_the_start(tmp_path):
    dynamics = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.0)))
    run = adjsim.simulate(
        dynamics,
        dynamics.init(*square()),
        [0.0, 0.3],
        solver=adjsim.VelocityVerlet(0.1),
        adjoint=adjsim.ReversibleAdjoint(),
        compile=True,
        store=tmp_path,
    )
    assert run.stats["compiled_forward"] == "C++"
    assert run.stats["compiled_backward"] is None
    (source,) = run.stats["compiled_source"]
    assert Path(source).read_text().startswith("#include")
    assert run.stats["resumed_at"] is None


def test_names_of_a_trajectory_are_no_fields_of_a_state():
    ode = adjsim.ODE(lambda t, y: -y)
    solver = adjsim.RungeKutta("rk4", 0.1)
    run = adjsim.simulate(ode, ode.init(torch.ones(1)), [0.0, 0.1], solver=solver)
    own = {name for name in (*vars(run), "at") if not name.startswith("_")}
    assert own == OWN
    for name in own:
        state = namedtuple("Named", ["y", name])(torch.ones(1), torch.ones(1))
        with pytest.raises(ValueError, match=f"a field of a state may not be named {name}"):
            ode.init(state)
