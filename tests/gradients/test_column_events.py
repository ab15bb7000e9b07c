"""Events, terminal events and resets of problems in columns, each with its own times: against one
call a column, against closed forms, against central differences.
"""

from __future__ import annotations

import pytest
import torch

import adjsim
from adjsim.ivp import column_solution

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
LOOSE = {"rtol": 1e-8, "atol": 1e-10}
READS = [0.3, 0.9, 1.2]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def floor_of(e, reset=True):
    def floor(t, y, *args):
        return y[0]

    floor.direction = -1
    if reset:
        floor.reset = lambda t, y, *args: torch.stack([y[0], -e * y[1]])
    return floor


def top(t, y, *args):
    return y[1] + 0.1 * t


def fall(t, y, g):
    return torch.stack([y[1], -g - 0.1 * y[1] * (1 + y[0] ** 2)])


def bounce(height, e, g, method="RK45", **options):
    """Balls with drag, whose restitution is captured by the reset."""
    start = torch.stack([height, torch.zeros_like(height)])
    settings = {"t_eval": READS, **TIGHT, **options}
    return adjsim.solve_ivp(
        fall, (0.0, 1.2), start, method, events=[floor_of(e), top], args=(g,), **settings
    )


def weighted(states, times, at) -> torch.Tensor:
    """A sum of all states, event times and states at events, by columns."""
    loss = (states * torch.arange(1, 1 + states.numel()).reshape(states.shape).sin()).sum()
    for k, (of_event, states_of) in enumerate(zip(times, at, strict=True)):
        for j, (t, y) in enumerate(zip(of_event, states_of, strict=True)):
            count = torch.arange(len(t)) + 1.0 + j
            loss = loss + (count * t).sum() + (k + 1) * (count[:, None] * y).sum()
    return loss


def loss_of(found) -> torch.Tensor:
    return weighted(found.y, found.t_events, found.y_events)


def inputs() -> list[torch.Tensor]:
    return [tensor(0.7, 1.0, 1.3), tensor(0.6, 0.7, 0.9), tensor(9.81)]


@pytest.mark.slow
def test_equal_to_one_call_a_column():
    """Two bounces and more of some balls, one of others; events that end nothing between them."""
    height, e, g = inputs()
    found = bounce(height, e, g)
    singles = [bounce(height[j], e[j], g[0]) for j in range(3)]
    assert [len(x) for x in found.t_events[0]] == [len(x.t_events[0]) for x in singles]
    assert len(found.t_events[0][0]) > 1
    states = torch.stack([x.y for x in singles], -1)
    torch.testing.assert_close(found.y, states, rtol=0, atol=2e-9)
    times, at = (
        [[getattr(x, name)[k] for x in singles] for k in range(2)]
        for name in ("t_events", "y_events")
    )
    grads = torch.autograd.grad(loss_of(found), [height, e, g])
    known = torch.autograd.grad(weighted(states, times, at), [height, e, g])
    for x, y in zip(grads, known, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_central_differences_and_checkpoints(monkeypatch):
    monkeypatch.setattr(column_solution, "SEGMENT_STEPS", 8)
    given = inputs()
    grads = {
        adjoint: torch.autograd.grad(loss_of(bounce(*given, adjoint=adjoint, **LOOSE)), given)
        for adjoint in ("interpolate", "checkpoint")
    }
    for x, y in zip(*grads.values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    along = [torch.cos(torch.arange(len(x)) + 1.0).double() for x in given]
    slope = sum(float((x * d).sum()) for x, d in zip(grads["checkpoint"], along, strict=True))
    h = 1e-5
    with torch.no_grad():
        ends = [
            loss_of(bounce(*[x + s * h * d for x, d in zip(given, along, strict=True)],
                           **TIGHT))
            for s in (1, -1)
        ]  # fmt: skip
    assert float(ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("method", ["RK45", "Rodas4"])
def test_a_terminal_event_ends_its_column_alone(method):
    """A fall from the height h ends at t = sqrt(2 h / g) with the speed -sqrt(2 h g)."""
    height, g = tensor(0.5, 9.0, 1.0), torch.tensor(9.81, dtype=torch.float64)
    floor = floor_of(None, reset=False)
    floor.terminal = True

    def solve(**settings):
        start = torch.stack([height, torch.zeros_like(height)])
        fun = lambda t, y: torch.stack([y[1], 0 * y[1] - g])  # noqa: E731
        return adjsim.solve_ivp(fun, (0, 1), start, method, events=floor, **TIGHT, **settings)

    found = solve(dense_output=True)
    ends = (2 * height.detach() / g).sqrt()
    ends[1] = 1.0
    assert found.status.tolist() == [1, 0, 1]
    torch.testing.assert_close(found.t[1].detach(), ends, rtol=1e-9, atol=0)
    (by_height,) = torch.autograd.grad(found.y[1, -1].sum(), height, retain_graph=True)
    known = -(g / (2 * height.detach())).sqrt()
    known[1] = 0.0
    torch.testing.assert_close(by_height, known, rtol=1e-8, atol=1e-12)
    (by_height,) = torch.autograd.grad(found.t[1].sum(), height, retain_graph=True)
    known = 1 / (2 * height.detach() * g).sqrt()
    known[1] = 0.0
    torch.testing.assert_close(by_height, known, rtol=1e-8, atol=1e-12)
    assert [len(x) for x in found.t_events[0]] == [1, 0, 1]
    assert found.y_events[0][0].shape == (1, 2)
    # After its end a column has no state.
    assert found.sol(0.99).isnan().any(0).tolist() == [True, False, True]
    later = solve(t_eval=[0.3, 0.9])
    assert later.y[0].isnan().tolist() == [[False] * 3, [True, False, True]]
    (by_height,) = torch.autograd.grad(later.y[0].nan_to_num().sum(), height)
    torch.testing.assert_close(by_height, torch.tensor([1.0, 2.0, 1.0]).double())


def test_a_terminal_count_ends_a_column_after_its_resets():
    height, e, g = inputs()
    floor = floor_of(e)
    floor.terminal = 2
    start = torch.stack([height, torch.zeros_like(height)])
    found = adjsim.solve_ivp(fall, (0.0, 1.2), start, events=floor, args=(g,), **TIGHT)
    single = adjsim.solve_ivp(
        fall, (0.0, 1.2), start[:, 0], events=floor_of_column(e[0], 2), args=(g[0],), **TIGHT
    )
    assert [len(x) for x in found.t_events[0]] == [2, 2, 1]
    torch.testing.assert_close(found.t[1, 0], single.t[-1], rtol=1e-9, atol=0)
    torch.testing.assert_close(found.y[:, 1, 0], single.y[:, -1], rtol=1e-8, atol=1e-10)


def floor_of_column(e, count):
    floor = floor_of(e)
    floor.terminal = count
    return floor


@pytest.mark.parametrize("method", ["RK45", "Rodas4"])
@pytest.mark.parametrize("span", [(0.0, 2.0), (2.0, 0.0)])
def test_a_jump_of_fun_is_marked_by_an_event(method, span):
    """y' = 1 below c and 2 above: y(T) = y0 + 2 T - (c - y0) moves with c by -1, by y0 by 2."""
    c, start = tensor(1.0, 0.5, 7.0), tensor(0.1, 0.2, 0.3)
    sign = 1.0 if span[1] > span[0] else -1.0

    def gears(t, y, c):
        return sign * torch.where(y < c, 1.0, 2.0).to(y)

    def shift(t, y, c):
        return y[0] - c

    shift.reset = lambda t, y, c: y
    found = adjsim.solve_ivp(
        gears, span, start[None], method, events=shift, args=(c,), rtol=1e-8, atol=1e-10
    )
    end = start + 4 - (c - start)
    torch.testing.assert_close(found.y[0, -1, :2], end[:2], rtol=1e-6, atol=0)
    grads = torch.autograd.grad(found.y[0, -1].sum(), [c, start])
    assert grads[0].tolist() == pytest.approx([-1, -1, 0], abs=1e-6)
    assert grads[1].tolist() == pytest.approx([2, 2, 1], abs=1e-6)


def test_a_reset_without_effect_in_single_precision_by_default():
    """The side on which a piece starts is a sign of the smallest number of double precision."""
    torch.set_default_dtype(torch.float32)
    wall = lambda t, y: y[0] - 0.5  # noqa: E731
    wall.reset = lambda t, y: y
    start = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    found = adjsim.solve_ivp(lambda t, y: -y, (0, 1), start, events=wall)
    assert [len(x) for x in found.t_events[0]] == [1, 0]


def test_events_read_tensors_with_a_graph_and_modules():
    raw, net = tensor(0.0, 1.0, 0.5), torch.nn.Linear(1, 1).double()
    torch.nn.init.constant_(net.weight, -0.2)
    torch.nn.init.constant_(net.bias, 0.4)
    e = torch.sigmoid(raw)
    height = inputs()[0].detach()
    floor = floor_of(e)
    floor.reset = lambda t, y: torch.stack([y[0], -e * y[1] * net(y[1:].T)[:, 0].sigmoid()])
    start = torch.stack([height, torch.zeros_like(height)])
    settings = {"events": floor, **TIGHT}
    fun = lambda t, y: torch.stack([y[1], 0 * y[1] - 9.81])  # noqa: E731
    found = adjsim.solve_ivp(fun, (0.0, 0.6), start, **settings)
    found.y[0, -1].sum().backward()
    # The graph of e has not been freed.
    e.sum().backward()
    known = raw.grad, net.weight.grad
    assert all(bool(x.any()) for x in known)
    raw.grad, net.weight.grad = None, None
    for j in range(3):
        e = torch.sigmoid(raw)[j]
        floor.reset = lambda t, y, e=e: torch.stack([y[0], -e * y[1] * net(y[1:])[0].sigmoid()])
        adjsim.solve_ivp(fun, (0.0, 0.6), start[:, j], **settings).y[0, -1].backward()
    torch.sigmoid(raw).sum().backward()
    for x, y in zip((raw.grad, net.weight.grad), known, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("high", [50.0, 20.0])
def test_no_derivative_of_an_event_is_needed_where_it_does_not_happen(high):
    """A ball so high that the roots are NaN, or have an infinite derivative."""
    e, g, height = tensor(0.1), tensor(9.81), torch.tensor([1.0, high], dtype=torch.float64)

    def fall(t, y, e, g):
        return torch.stack([y[1], torch.where(y[0] < 10, -g, 0 * g) + 0 * y[1]])

    def floor(t, y, e, g):
        return y[0] * (1 + (20 - y[0]).sqrt() * g)

    floor.direction = -1
    floor.reset = lambda t, y, e, g: torch.stack([y[0], -e * (20 - y[0]).sqrt() * y[1]])
    grads = []
    for columns in (height, height[:1]):
        start = torch.stack([columns, 0 * columns])
        found = adjsim.solve_ivp(fall, (0, 0.5), start, events=floor, args=(e, g), rtol=1e-6)
        grads.append(torch.autograd.grad(found.y[:, -1, 0].sum(), [e, g]))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


def constant(rate):
    return lambda t, y: torch.full_like(y, rate)


@pytest.mark.slow
def test_what_has_no_derivative_or_no_solution_is_refused():
    start = torch.tensor([[3.0, 1.0]], dtype=torch.float64, requires_grad=True)

    def touch(t, y):
        return (t - 0.5) ** 2 + y[0] - 1

    settings = {"rtol": 1e-6, "atol": 1e-8}
    with pytest.raises(adjsim.GrazingError, match=r"column 1 touches event 0 near t = 0\.5"):
        adjsim.solve_ivp(constant(0.0), (0, 1), start, events=touch, max_step=0.3, **settings)
    with torch.no_grad():
        adjsim.solve_ivp(constant(0.0), (0, 1), start, events=touch, max_step=0.3, **settings)

    def wall(t, y):
        return y[0] - 1.5

    wall.reset = lambda t, y: y
    slide = lambda t, y: torch.where(y < 1.5, 1.0, -1.0).to(y)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"column 0 slides along event 0 from t = 1\.5"):
        adjsim.solve_ivp(slide, (0, 2), start[:, :1], events=wall, **settings)
    wall.reset = lambda t, y: torch.full_like(y, 1.5)
    with pytest.raises(RuntimeError, match="leaves column 0 at rest on the event"):
        adjsim.solve_ivp(
            lambda t, y: torch.where(y == 1.5, 0.0, -1.0).to(y), (0, 2), start[:, :1],
            events=wall, **settings,
        )  # fmt: skip
    ball = floor_of(torch.tensor(0.5))
    with pytest.raises(RuntimeError, match=r"accumulate at t = 1\.\d+ in column 1 \(Zeno\)"):
        adjsim.solve_ivp(
            lambda t, y: torch.stack([y[1], 0 * y[1] - 9.81]), (0.0, 2.0),
            torch.tensor([[9.0, 1.0], [0.0, 0.0]]).double(), events=ball, **settings,
        )  # fmt: skip
    with pytest.raises(ValueError, match="column 1 starts at event 0, which has a reset"):
        adjsim.solve_ivp(constant(1.0), (0, 1), start.detach() + 0.5, events=wall)
    wall.reset = lambda t, y: y[:, :1]
    with pytest.raises(ValueError, match=r"reset returned shape \(1, 1\) for a state of shape"):
        adjsim.solve_ivp(constant(1.0), (0, 1), start, events=wall)


def test_a_jump_before_an_event_is_refused():
    """The event ends the step that crosses the jump, and marks another surface."""
    c = tensor(0.4)

    def jump(t, y, c):
        return torch.where(y < c, 1.0, 3.0).to(y)

    def later(t, y, c):
        return y[0] - 0.9

    later.reset = lambda t, y, c: y
    with pytest.raises(ValueError, match=r"fun jumps at t = 0\.\d+, y = .* in column 0, where no"):
        adjsim.solve_ivp(jump, (0, 1), tensor(0.0)[None], events=later, args=(c,), rtol=1e-6)


def test_float32_and_spans_of_their_own():
    height = torch.tensor([0.5, 1.0], dtype=torch.float32)
    floor = floor_of(0.8)
    found = adjsim.solve_ivp(
        lambda t, y: torch.stack([y[1], 0 * y[1] - 9.81]), (0.0, torch.tensor([0.4, 0.6])),
        torch.stack([height, 0 * height]), events=floor, rtol=1e-6, atol=1e-7,
    )  # fmt: skip
    assert found.y.dtype == found.t_events[0][0].dtype == torch.float32
    times = torch.cat(found.t_events[0])
    torch.testing.assert_close(times, (2 * height / 9.81).sqrt(), rtol=1e-5, atol=0)


@pytest.mark.slow
def test_rows_of_times_and_states_take_one_backward_run(monkeypatch):
    runs, backward = [], column_solution.ColumnSolution._backward

    def counted(*given):
        runs.append(1)
        return backward(*given)

    monkeypatch.setattr(column_solution.ColumnSolution, "_backward", counted)
    wanted = [x.requires_grad_() for x in inputs()]
    found = bounce(*wanted)
    values = torch.cat(
        [*found.t_events[0], found.y[:, -1].flatten(), found.y_events[1][0].flatten()]
    )
    single = [torch.autograd.grad(x, wanted, retain_graph=True) for x in values]
    runs.clear()
    rows = torch.autograd.grad(values, wanted, torch.eye(len(values)), is_grads_batched=True)
    assert len(runs) == 1
    for one, other in zip(zip(*single, strict=True), rows, strict=True):
        torch.testing.assert_close(other, torch.stack(one), rtol=1e-12, atol=1e-14)
