"""Compiled loops of steps against the steps themselves: gradients to rounding, exact runs to the
last bit, nothing compiled twice."""

from __future__ import annotations

import os
import subprocess
import sys

import jaxtyping
import pytest
import torch
from torch import nn

import adjsim
from adjsim import ReversibleAdjoint, Splitting, TimeAverage
from adjsim.adjoints import CompileError
from adjsim.adjoints.direct import DirectAdjoint
from tests.gradients.test_table import agree, moment
from tests.problems import Case, parameter, slow_but, square, vector

# One step between saves, and several.
STEPS = [0, 1, 8, 15]


@pytest.fixture(autouse=True)
def _unchecked():
    """The type checks of the tests cannot be written down."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def gradients(case: Case, kind: str, compile: bool):
    dynamics = case.build()
    position, momentum = (x.requires_grad_() for x in square((16,) if kind == "replicas" else ()))
    inputs = {**dict(dynamics.named_parameters()), "position": position, "momentum": momentum}
    record = {"record": moment, "average": TimeAverage(moment, burn_in=5 * case.dt)}.get(kind)
    run = adjsim.simulate(
        dynamics,
        case.start(dynamics, position, momentum),
        torch.tensor(STEPS) * case.dt,
        solver=case.solver,
        adjoint=ReversibleAdjoint(),
        record=record,
        generator=torch.Generator().manual_seed(11),
        compile=compile,
    )
    if kind in ("saves", "replicas"):
        loss = sum(
            (1 + i) * moment([getattr(run, f)[i] for f in run.final._fields])
            for i in range(len(STEPS))
        )
    else:
        loss = run.record.sum() + 0.1 * moment(run.final)
    found = torch.autograd.grad(
        loss, list(inputs.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, found, strict=True)), run


def row(dynamics, scheme, potential, kind="saves", exact=False, mark="marathon"):
    marks = [getattr(pytest.mark, mark)] if mark else []
    return pytest.param(
        Case(dynamics, scheme, potential, exact),
        kind,
        marks=marks,
        id=f"{dynamics}-{potential}-{kind}-{exact}",
    )


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        row("hamiltonian", "BAB", "lennard-jones", mark="slow"),
        row("langevin", "BAOAB", "double-well", exact=True, mark=None),
        row("bussi", "BABR", "double-well", "average"),
        row("berendsen", "RBABR", "lennard-jones", "replicas", mark="slow"),
        row("hamiltonian", "ABA", "plain-module", "record"),
        row("hamiltonian", "BAB", "lennard-jones", "replicas"),
        row("chain-3", "NBABN", "double-well", mark="slow"),
        row("chain-3", "NBABN", "lennard-jones", "replicas"),
        row("generalised-2", "BAGAB", "lennard-jones", "replicas", exact=True),
        row("hamiltonian", "BA", "mixture"),
        row("langevin", "BAOAB", "lennard-jones", "average"),
        row("chain-1", "NBABN", "double-well", exact=True),
        row("generalised-2", "BAGAB", "cutoff", exact=True),
        row("esh", "EAE", "double-well"),
    ],
)
def test_loops_equal_steps(case, kind):
    plain, expected = gradients(case, kind, False)
    mine, found = gradients(case, kind, True)
    # Sums in another order; the generalised bath's rates cancel three digits.
    agree(mine, plain, 1e-12)
    if found.record is not None:
        torch.testing.assert_close(found.record, expected.record, rtol=1e-12, atol=1e-12)
    for a, b in zip(found.final, expected.final, strict=True):
        if case.exact:
            assert torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert found.stats["reconstruction_error"] <= (0.0 if case.exact else 1e-12)


def run_well(dynamics, compile, *, steps=40, seed=1, every=None):
    """A thermal particle in a double well."""
    start = dynamics.init(torch.ones(2, 1, 1), torch.zeros(2, 1, 1))
    times = [0.0, steps * 0.01] if every is None else torch.arange(0, steps + 1, every) * 0.01
    return adjsim.simulate(
        dynamics,
        start,
        times,
        solver=adjsim.BAOAB(0.01),
        adjoint=ReversibleAdjoint(),
        generator=torch.Generator().manual_seed(seed),
        compile=compile,
    )


@pytest.mark.usefixtures("own_loops")
def test_nothing_compiles_twice():
    """Another number of steps, seed, save times or value of a parameter: nothing is compiled, and
    the path is right. Loops that save frames are others than those that stop for them.
    """
    dynamics = adjsim.Langevin(
        adjsim.DoubleWell(parameter(0.7)), kT=parameter(0.5), friction=parameter(1.0)
    )
    first = run_well(dynamics, True, steps=43)
    first.final.position.sum().backward()
    assert first.stats["compile_seconds"] > 0
    run_well(dynamics, True, every=4).final.position.sum().backward()
    for change in ({"steps": 58}, {"seed": 7}, {"every": 5, "steps": 60}, {"kT": 0.9}):
        value = change.pop("kT", None)
        if value is not None:
            with torch.no_grad():
                dynamics.kT.fill_(value)
                dynamics.potential.barrier.fill_(value)
        run = run_well(dynamics, True, **change)
        plain = run_well(dynamics, False, **change)
        torch.testing.assert_close(run.final.position, plain.final.position, rtol=1e-12, atol=1e-12)
        mine, theirs = (
            torch.autograd.grad(r.final.position.square().sum(), list(dynamics.parameters()))
            for r in (run, plain)
        )
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        assert run.stats["compile_seconds"] == 0


class Two(nn.Module):
    """A sum of two potentials."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, position):
        return self.first(position) + self.second(position)


def tied():
    """One parameter under two names."""
    k = parameter(1.3)
    return adjsim.Hamiltonian(Two(adjsim.Harmonic(k), adjsim.DoubleWell(k))), k, None


def computed():
    """A number that is computed from what is to be learnt: a buffer with a graph."""
    raw = parameter(0.1)
    return adjsim.Hamiltonian(adjsim.LennardJones(raw.exp(), 0.95)), raw, None


def read_by_the_average():
    """A time average that depends on a parameter, in its value and in its gradient, and on a tensor
    that is none.
    """
    dynamics, weight = adjsim.Hamiltonian(adjsim.Harmonic(parameter(1.3))), torch.tensor([1.0, 0.5])
    average = TimeAverage(
        lambda state: dynamics.potential.k * (weight * state.position**2).sum(), burn_in=0.05
    )
    return dynamics, dynamics.potential.k, average


@pytest.mark.parametrize(
    "make", slow_but(lambda make: make is computed, [tied, computed, read_by_the_average])
)
def test_whatever_a_parameter_is_and_whoever_reads_it(make):
    found = []
    for compile in (False, True):
        dynamics, leaf, record = make()
        run = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.15],
            solver=adjsim.VelocityVerlet(0.01),
            adjoint=ReversibleAdjoint(),
            record=record,
            compile=compile,
        )
        loss = moment(run.final) if record is None else run.record
        found.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_a_number_that_changes_compiles_again():
    dynamics = adjsim.Hamiltonian(adjsim.LennardJones(1.0, 0.95, cutoff=2.0))
    ends = []
    for cutoff in (2.0, 1.3):
        dynamics.potential.cutoff = cutoff
        for compile in (False, True):
            with torch.no_grad():
                start = dynamics.init(*square())
                run = adjsim.simulate(
                    dynamics,
                    start,
                    [0.0, 0.06],
                    solver=adjsim.VelocityVerlet(0.01),
                    compile=compile,
                )
            ends.append(run.final.position)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ends[3], ends[2], rtol=1e-13, atol=1e-13)
    assert not torch.allclose(ends[0], ends[2])


def end_of(dynamics, compile):
    """Six steps, without a gradient."""
    with torch.no_grad():
        start = dynamics.init(*square())
        run = adjsim.simulate(
            dynamics, start, [0.0, 0.06], solver=adjsim.VelocityVerlet(0.01), compile=compile
        )
    return run.final.position


def test_numbers_in_a_list_that_change_compile_again():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = [1.0, {"quartic": 0.5}]

        def forward(self, position):
            return (self.weights[0] * position**2 + self.weights[1]["quartic"] * position**4).sum(
                (-1, -2)
            )

    dynamics = adjsim.Hamiltonian(Weighted())

    before = end_of(dynamics, True)
    dynamics.potential.weights[1]["quartic"] = 3.0
    torch.testing.assert_close(
        end_of(dynamics, True), end_of(dynamics, False), rtol=1e-13, atol=1e-13
    )
    assert not torch.allclose(end_of(dynamics, True), before)


@pytest.mark.parametrize("before", [False, True], ids=["first", "after-no-grad"])
def test_a_tensor_that_is_not_registered_is_refused(before):
    """Also where an earlier run, in which no gradient was asked for, has compiled its steps."""
    strength = torch.tensor(1.3, requires_grad=not before)

    class Captures(nn.Module):
        def forward(self, position):
            return (strength * position**2).sum((-1, -2))

    dynamics = adjsim.Hamiltonian(Captures())

    def run():
        start = dynamics.init(*square())
        solver, adjoint = adjsim.VelocityVerlet(0.01), ReversibleAdjoint()
        return adjsim.simulate(
            dynamics, start, [0.0, 0.06], solver=solver, adjoint=adjoint, compile=True
        )

    if before:
        with torch.no_grad():
            run()
        strength.requires_grad_()
    with pytest.raises((ValueError, CompileError), match="not registered"):
        run()


def test_a_constant_that_is_written_to_compiles_again():
    strength = torch.tensor(1.3)

    class Captures(nn.Module):
        def forward(self, position):
            return (strength * position**2).sum((-1, -2))

    dynamics = adjsim.Hamiltonian(Captures())

    before = end_of(dynamics, True)
    strength.mul_(2.0)
    torch.testing.assert_close(
        end_of(dynamics, True), end_of(dynamics, False), rtol=1e-13, atol=1e-13
    )
    assert not torch.allclose(end_of(dynamics, True), before)


def test_a_tensor_that_is_not_registered_is_refused_before_a_gradient_is_asked_for():
    strength = torch.tensor(1.3, requires_grad=True)

    class Captures(nn.Module):
        def forward(self, position):
            return (strength * position**2).sum((-1, -2))

    dynamics = adjsim.Hamiltonian(Captures())
    with torch.no_grad(), pytest.raises(CompileError, match="not registered"):
        adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.06],
            solver=adjsim.VelocityVerlet(0.01),
            compile=True,
        )


def test_buffers_of_an_exact_run_are_relieved_whoever_runs_it():
    """Friction so large that they are full after every few steps; nothing is saved on the way."""
    dynamics = adjsim.Langevin(adjsim.DoubleWell(parameter(0.7)), kT=0.5, friction=40.0)
    start = dynamics.init(torch.ones(2, 1, 1), torch.zeros(2, 1, 1))
    solver = Splitting("BAOAB", 0.02, exact=True)
    with torch.no_grad():
        plain, mine = (
            adjsim.simulate(
                dynamics,
                start,
                [0.0, 2.0],
                solver=solver,
                generator=torch.Generator().manual_seed(3),
                compile=compile,
            )
            for compile in (False, True)
        )
    assert plain.stats["buffer_bits"] * 100 > 62  # more than one holds
    for a, b in zip(mine.final, plain.final, strict=True):
        assert torch.equal(a, b)
    assert mine.stats["buffer_bits"] == plain.stats["buffer_bits"]


def test_a_force_in_time_compiles():
    class Drive(adjsim.ForceField):
        def __init__(self):
            super().__init__()
            self.k, self.amplitude = parameter(1.0), vector(0.3, 0.5)

        def forward(self, t, position):
            return self.amplitude * torch.sin(3.0 * torch.as_tensor(t)) - self.k * position

    found = []
    for compile in (False, True):
        dynamics = adjsim.Hamiltonian(Drive(), parameter(1.4))
        run = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.5, 0.8],
            solver=Splitting("BAB", 0.01),
            adjoint=ReversibleAdjoint(),
            compile=compile,
        )
        found.append(torch.autograd.grad(moment(run.final), list(dynamics.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_forward_alone_with_any_adjoint():
    dynamics = adjsim.Hamiltonian(adjsim.DoubleWell(parameter(0.7)))
    start = dynamics.init(*square())
    with torch.no_grad():
        plain, mine = (
            adjsim.simulate(
                dynamics, start, [0.0, 0.1, 0.33], solver=adjsim.VelocityVerlet(0.01), compile=c
            )
            for c in (False, True)
        )
    torch.testing.assert_close(mine.position, plain.position, rtol=1e-13, atol=1e-13)


def test_what_does_not_go_is_refused():
    dynamics = adjsim.Hamiltonian(adjsim.DoubleWell(parameter(0.7)))
    start = dynamics.init(*square())
    with pytest.raises(TypeError, match="solvers of fixed steps"):
        adjsim.simulate(dynamics, start, [0.0, 0.1], solver=adjsim.ODESolver(), compile=True)


def test_a_run_that_diverges_is_refused():
    dynamics = adjsim.Hamiltonian(adjsim.DoubleWell())
    start = dynamics.init(torch.full((2, 3), 1e40, dtype=torch.float64), torch.zeros(2, 3))
    with pytest.raises(
        FloatingPointError, match=r"reached NaN or infinity in step \d+ .*smaller forces"
    ):
        adjsim.simulate(
            dynamics, start, [0.0, 0.1], solver=adjsim.VelocityVerlet(0.01), compile=True
        )


def test_a_record_may_read_a_parameter_past_its_module():
    """As a constant of the compiled code the parameter would have no gradient."""
    gradients = []
    for compile in (True, False):
        k = parameter(1.3)
        dynamics = adjsim.Hamiltonian(adjsim.Harmonic(k))
        run = adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.15],
            solver=adjsim.VelocityVerlet(0.01),
            adjoint=ReversibleAdjoint() if compile else DirectAdjoint(),
            record=TimeAverage(lambda state, k=k: k * (state.position**2).sum()),
            compile=compile,
        )
        gradients.append(torch.autograd.grad(run.record, k)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def test_a_potential_that_looks_at_values_is_named():
    class Branching(nn.Module):
        def forward(self, position):
            return (position**2).sum((-1, -2)) * (
                2.0 if float(position.detach().sum()) > 0 else 1.0
            )

    dynamics = adjsim.Hamiltonian(Branching())
    with pytest.raises(CompileError, match=r"test_compiled.py:\d+ .*use torch's functions"):
        adjsim.simulate(
            dynamics,
            dynamics.init(*square()),
            [0.0, 0.1],
            solver=adjsim.VelocityVerlet(0.01),
            adjoint=ReversibleAdjoint(),
            compile=True,
        )


REMEMBERED = """
import sys, torch, adjsim

class Wave(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.k = torch.nn.Parameter(torch.tensor(1.3))

    def forward(self, position):
        return (self.k * torch.cos({number} * position)).sum((-1, -2))

torch.set_default_dtype(torch.float64)
dynamics, found = adjsim.Hamiltonian(Wave()), []
for compile in (False, True):
    start = dynamics.init(torch.full((1, 1), 0.3), torch.full((1, 1), 0.2))
    run = adjsim.simulate(dynamics, start, [0.0, 0.4], solver=adjsim.VelocityVerlet(0.05),
                          adjoint=adjsim.ReversibleAdjoint(), compile=compile)
    found.append(torch.autograd.grad(run.final.position.sum(), dynamics.potential.k)[0])
torch.testing.assert_close(*found, rtol=1e-12, atol=0)
print(run.stats["compiled_forward"])
"""


@pytest.mark.marathon
def test_another_process_remembers_a_loop_and_not_another_one(tmp_path):
    """A number that is in the body of a loop alone decides; that the gradients are right is checked
    in the process.
    """
    kept = []
    for number in (1.0, 2.0, 2.0):
        code = REMEMBERED.format(number=number)
        environment = {**os.environ, "ADJSIM_CACHE": str(tmp_path)}
        out = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == "C++"
        kept.append(len(list(tmp_path.glob("*.so"))))
    # One forward and one backward, of each number.
    assert kept == [2, 4, 4]


@pytest.mark.parametrize(
    "adjoint",
    [
        adjsim.DirectAdjoint(),
        pytest.param(adjsim.CheckpointAdjoint(), marks=pytest.mark.slow),
    ],
)
def test_a_saved_value_costs_the_same_however_many_there_are(adjoint):
    dynamics = adjsim.Langevin(adjsim.Harmonic(parameter(1.0)), kT=1.0, friction=1.0)
    start = dynamics.init(torch.zeros(2, 1, 1, dtype=torch.float64), generator=0)

    def calls(saves):
        """Count the items that generators of the adjoints give; other calls depend on the time."""
        count = 0

        def profile(frame, event, _):
            nonlocal count
            code = frame.f_code
            inside = code.co_name == "<genexpr>" and "adjoints" in code.co_filename
            count += event == "call" and inside

        sys.setprofile(profile)
        try:
            ends = 0.01 * torch.arange(saves + 1)
            run = adjsim.simulate(
                dynamics, start, ends, solver=adjsim.BAOAB(0.01), adjoint=adjoint, generator=0,
                compile=True, record=lambda state: state.position,
            )  # fmt: skip
            run.record.square().sum().backward()
        finally:
            sys.setprofile(None)
        return count

    calls(50)
    few, some, many = (calls(n) for n in (50, 100, 200))
    # The ratio is 2 where each costs the same, and nearly 4 where each looks through the others.
    assert many - some < 3 * (some - few)
