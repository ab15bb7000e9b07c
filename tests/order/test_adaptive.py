"""Coupled steps chosen by their error: order, sizes, save times, time averages and errors."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy.integrate import RK23, RK45, solve_ivp
from torch import Tensor, nn

import adjsim
from adjsim import DirectAdjoint, Hamiltonian, NoseHooverChain, ReversibleAdjoint, TimeAverage
from adjsim.core.step_control import next_factor
from adjsim.core.tableaus import TABLEAUS, Tableau
from adjsim.dynamics.fields.ode import ODE
from adjsim.solvers.reversible.coupled import Coupled
from adjsim.solvers.runge_kutta.adaptive_steps import Adaptive, StepTimes
from tests.flows import DrivenPendulum, Linear, Lorenz

PAIRS = {"bogacki-shampine": RK23, "dormand-prince": RK45}
START = [1.0, 0.5]


class VanDerPol(nn.Module):
    def __init__(self, mu: float = 5.0) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.tensor(mu, dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        x, v = y.unbind(-1)
        return torch.stack([v, self.mu * (1 - x * x) * v - x], -1)


class Power(nn.Module):
    """dy/dt = y^2, whose solution from 1 is infinite at t = 1."""

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return y * y


@torch.no_grad()
def run(field, start, ts, dt, method="dormand-prince", record=None, **settings):
    dynamics = ODE(field)
    y = torch.tensor(start, dtype=torch.float64)
    solver = Coupled(method, dt, **settings)
    return adjsim.simulate(dynamics, dynamics.init(y), ts, solver=solver, record=record)


@torch.no_grad()
def reference(field, start, ts):
    def rate(t, y):
        return field(torch.tensor(t, dtype=torch.float64), torch.from_numpy(y)).numpy()

    found = solve_ivp(
        rate, (ts[0], ts[-1]), start, t_eval=ts, method="DOP853", rtol=1e-12, atol=1e-13
    )
    return torch.from_numpy(found.y.T)


@pytest.mark.parametrize("method", PAIRS)
def test_error_weights_are_those_of_scipy(method):
    pair, tableau = PAIRS[method], TABLEAUS[method]
    # SciPy's weights have the opposite sign.
    np.testing.assert_allclose(tableau.error, -pair.E, atol=1e-15)
    assert tableau.error_order == pair.error_estimator_order == tableau.order - 1


def test_error_weights_of_a_tableau_are_checked():
    heun = Tableau([[], [1]], [0.5, 0.5], error=[-0.5, 0.5])
    assert heun.error_order == 1
    with pytest.raises(ValueError, match="error has 1 weights; it must have one for each of the 2"):
        Tableau([[], [1]], [0.5, 0.5], error=[0.0])
    with pytest.raises(ValueError, match=r"their sum zero; got the sum 0\.5"):
        Tableau([[], [1]], [0.5, 0.5], error=[0.0, 0.5])


@pytest.mark.parametrize("most", [1.0, 10.0])
def test_numbers_and_tensors_have_one_controller(most):
    """h' / h = min(most, max(0.2, 0.9 e^(-1/5))); steps to NaN and infinity are shortened most."""
    errors = [0.0, 1e-40, 1e-4, 0.5, 2.0, 1e9, math.inf, math.nan]
    formula = [10.0, 10.0, 0.9 * 1e-4**-0.2, 0.9 * 2**0.2, 0.9 * 0.5**0.2, 0.2, 0.2, 0.2]
    expected = [min(most, x) for x in formula]
    assert [next_factor(x, 5, most) for x in errors] == pytest.approx(expected, rel=1e-14)
    found = next_factor(torch.tensor(errors, dtype=torch.float64), 5, torch.tensor(most))
    assert found.tolist() == pytest.approx(expected, rel=1e-14)


@functools.cache
def pendulum_end():
    return reference(DrivenPendulum(), START, [0.0, 4.0])[-1]


def error_of(made):
    return float((made.final.y - pendulum_end()).norm())


@pytest.mark.parametrize("method", PAIRS)
def test_error_falls_with_the_tolerance(method):
    """An error of order q + 1 in a step of order p = q + 1 is proportional to the tolerance."""
    tolerances, ts = (1e-4, 1e-6), [0.0, 4.0]
    runs = [run(DrivenPendulum(), START, ts, Adaptive(x, x), method, rate=1.0) for x in tolerances]
    errors = list(map(error_of, runs))
    # At coarse steps the next power of the step adds to the error: a factor of two.
    assert errors[1] < 2 * errors[0] * tolerances[1] / tolerances[0], errors
    # Tens of steps, each with an error of about the tolerance, that a pendulum hardly amplifies.
    assert errors[1] < 30 * tolerances[1], errors


@pytest.mark.parametrize("method", PAIRS)
def test_order_of_steps_of_varying_size(method):
    """Chosen steps, each cut into two, four and eight."""
    tolerance, ts = (1e-3 if method == "bogacki-shampine" else 1e-5), [0.0, 4.0]
    chosen = run(DrivenPendulum(), START, ts, Adaptive(tolerance, tolerance), method, rate=1.0)
    times, errors = chosen.stats["step_times"], []
    for _ in range(3):
        middle = (times[1:] + times[:-1]) / 2
        times = torch.cat([times, middle]).sort().values
        errors.append(
            error_of(run(DrivenPendulum(), START, ts, StepTimes(times), method, rate=1.0))
        )
    # The next power of the step, at the two shorter sizes: a tenth of the order.
    order = math.log2(errors[1] / errors[2])
    assert order == pytest.approx(TABLEAUS[method].order, rel=0.1), errors


@pytest.mark.parametrize("method", PAIRS)
def test_sizes_are_close_to_those_of_scipy(method):
    """From the same first step, with the same norm and controller."""
    field = DrivenPendulum()

    @torch.no_grad()
    def rate(t, y):
        return field(torch.tensor(t, dtype=torch.float64), torch.from_numpy(y)).numpy()

    tolerance = 1e-5
    found = solve_ivp(rate, (0.0, 6.0), START, method=PAIRS[method], rtol=tolerance, atol=tolerance)
    made = run(field, START, [0.0, 6.0], Adaptive(tolerance, tolerance), method, rate=1.0)
    ours = made.stats["step_times"].numpy()
    # The copies differ by errors of the tolerance, and the two last steps share the time left.
    np.testing.assert_allclose(ours[:5], found.t[:5], rtol=1e-2)
    assert len(ours) == pytest.approx(len(found.t), abs=2)


def test_steps_end_at_save_times_on_no_grid():
    """Two of them are closer than any step, and the run starts at a later time."""
    ts = [3.0, 3.0 + math.pi / 7, 3.5, 3.5 + 1e-9, 5.1]
    made = run(DrivenPendulum(), START, ts, Adaptive(1e-9, 1e-9), rate=1.0)
    times = made.stats["step_times"]
    assert times[0] == 3.0
    assert all(t in times.tolist() for t in ts)
    assert len(times) == made.stats["steps"] + 1
    torch.testing.assert_close(made.y, reference(DrivenPendulum(), START, ts), rtol=0, atol=1e-8)
    # The short step does not make the next ones short.
    after = times[times > 3.5 + 1e-9][:2]
    assert float(after[0]) - 3.5 > 0.01


def test_van_der_pol_counts_rejected_steps():
    """Its steps differ by more than ten, and the solution is that of SciPy."""
    made = run(VanDerPol(), [2.0, 0.0], [0.0, 10.0], Adaptive(1e-6, 1e-6), rate=30.0)
    exact = reference(VanDerPol(), [2.0, 0.0], [0.0, 10.0])
    sizes = made.stats["step_times"].diff()
    assert made.stats["rejected"] > 0
    assert float(sizes.max() / sizes.min()) > 10
    torch.testing.assert_close(made.y, exact, rtol=0, atol=1e-4)


def test_a_batch_shares_its_steps():
    """The norm is the largest over the batch, so its most demanding system sets the steps."""
    field, tolerance = Linear(-1.0), Adaptive(1e-6, 1e-9)
    alone = run(field, [[1.0]], [0.0, 2.0], tolerance, rate=2.0)
    both = run(field, [[1.0], [0.0]], [0.0, 2.0], tolerance, rate=2.0)
    assert torch.equal(alone.stats["step_times"], both.stats["step_times"])
    assert torch.equal(alone.y[:, 0], both.y[:, 0])


class Two(NamedTuple):
    fast: Tensor
    slow: Tensor


class Separate(nn.Module):
    def forward(self, t: Tensor, y: Two) -> Two:
        return Two(-5 * y.fast, -0.1 * y.slow)


@torch.no_grad()
def test_states_of_several_fields_and_of_matter():
    dynamics = ODE(Separate())
    start = dynamics.init(Two(torch.ones(1).double(), torch.ones(2).double()))
    solver = Coupled("dormand-prince", Adaptive(1e-8, 1e-10), rate=10.0)
    found = adjsim.simulate(dynamics, start, [0.0, 1.0], solver=solver).final
    assert float(found.fast) == pytest.approx(math.exp(-5.0), rel=1e-6)
    torch.testing.assert_close(
        found.slow, torch.full_like(found.slow, math.exp(-0.1)), rtol=1e-7, atol=0
    )
    matter = Hamiltonian(adjsim.Harmonic())
    start = matter.init(*(torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, 1).double()))
    made = adjsim.simulate(matter, start, [0.0, 0.5], solver=solver)
    # Ten steps, each with an error of at most 1e-8.
    assert made.final.position.flatten().tolist() == pytest.approx([math.cos(0.5)] * 2, abs=1e-7)


def test_time_average_is_weighted_by_the_trapezoidal_rule():
    """With a burn_in in the middle of a step, across which the function is interpolated."""
    times, burn_in = [0.0, 0.1, 0.3, 0.6, 1.0], 0.2
    frames = run(Linear(-1.0), [1.0], times, StepTimes(times), rate=2.0).y[:, 0]
    mean = run(
        Linear(-1.0), [1.0], [0.0, 1.0], StepTimes(times), rate=2.0,
        record=TimeAverage(lambda state: state.y, burn_in),
    )  # fmt: skip
    middle = (frames[1] + frames[2]) / 2
    points = torch.cat([middle[None], frames[2:]])
    exact = torch.trapezoid(points, torch.tensor([0.2, 0.3, 0.6, 1.0]).double()) / 0.8
    torch.testing.assert_close(mean.record[0], exact, rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match="burn_in = 1 leaves nothing of a run of 1 to average"):
        run(
            Linear(-1.0), [1.0], [0.0, 1.0], StepTimes(times), rate=2.0,
            record=TimeAverage(lambda state: state.y, 1.0),
        )  # fmt: skip


def test_rate_is_estimated_along_the_steps():
    made = run(Linear(-20.0), [1.0], [0.0, 1.0], Adaptive(1e-7, 1e-12))
    # 1.5 times 20, rounded up to two digits: the steps' own contraction is slightly above 20.
    assert made.stats["rate"] == pytest.approx(30.5, abs=0.5)
    assert float(made.y[-1]) == pytest.approx(math.exp(-20.0), abs=1e-9)


def test_blow_up_names_the_step_and_the_time():
    with pytest.raises(FloatingPointError, match=r"error of step \d+ \(t = 1\) is .* blows up"):
        run(Power(), [1.0], [0.0, 2.0], Adaptive(1e-6, 1e-6), rate=1.0)
    # Steps that are given end in numbers that are not finite, and name the step likewise.
    with pytest.raises(FloatingPointError, match=r"in step \d+ \(t = "):
        run(Power(), [1.0], [0.0, 40.0], StepTimes(torch.arange(41.0)), rate=1.0)


@pytest.mark.slow
def test_copies_that_move_apart_name_a_rate():
    with pytest.raises(FloatingPointError, match=r"moved apart .* in step \d+ .* Use rate="):
        run(Lorenz(), [1.0, 1.0, 1.0], [0.0, 30.0], Adaptive(1e-3, 1e-3), rate=3.0)


@pytest.mark.usefixtures("unchecked")
def test_refusals():
    with pytest.raises(ValueError, match="use a method with an error estimate, 'bogacki-shampine'"):
        Coupled("rk4", Adaptive())
    with pytest.raises(ValueError, match="rtol must be positive; got 0"):
        Adaptive(0.0)
    with pytest.raises(TypeError, match="first must be a number"):
        Adaptive(first="small")
    with pytest.raises(ValueError, match="times must be finite and increase; the smallest step is"):
        StepTimes([0.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="at least one step; got shape"):
        StepTimes([0.0])
    with pytest.raises(ValueError, match=r"ts\[1\] = 0\.25 is not the end of a step; .* 0 and"):
        run(Linear(-1.0), [1.0], [0.0, 0.25], StepTimes([0.0, 0.5]), rate=1.0)
    dynamics = ODE(Linear(-1.0))
    start = dynamics.init(torch.ones(1, dtype=torch.float64))
    solver = Coupled("dormand-prince", Adaptive(), rate=1.0)
    for adjoint in (DirectAdjoint(), ReversibleAdjoint()):
        with pytest.raises(TypeError, match=r"compile=True is not for Coupled.*Adaptive"):
            adjsim.simulate(
                dynamics, start, [0.0, 1.0], solver=solver, adjoint=adjoint, compile=True
            )
    with pytest.raises(TypeError, match="steps of one size are needed here"):
        _ = solver.dt
    with pytest.raises(RuntimeError, match="Adaptive read the numbers of the start"):
        torch.func.grad(
            lambda y: adjsim.simulate(
                dynamics, dynamics.init(y), [0.0, 1.0], solver=solver
            ).final.y.sum()
        )(start.y)


@torch.no_grad()
def test_an_estimator_of_fixed_steps_refuses_adaptive_ones():
    dynamics = NoseHooverChain(adjsim.Harmonic(nn.Parameter(torch.tensor(1.0))))
    simulation = adjsim.Simulation(
        dynamics,
        lambda replicas, generator: dynamics.init(
            torch.zeros(replicas, 2, 1, dtype=torch.float64), generator=generator
        ),
        [0.0, 0.1],
        solver=Coupled("dormand-prince", Adaptive(), rate=1.0),
    )
    with pytest.raises(TypeError, match="steps of one size are needed here"):
        adjsim.ScoreFunction()(
            simulation, TimeAverage(lambda s: s.position.sum((-1, -2))), replicas=32, generator=0
        )
