"""Gradients of solve_ivp with problems in columns: against one call a column, against the steps
themselves, against central differences.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

import adjsim
from adjsim.ivp import column_solution
from adjsim.ivp.columns import COLUMN_METHODS
from tests.problems import slow_but

METHODS = ["RK45", "Rodas4"]
ADJOINTS = ["interpolate", "checkpoint"]
TIGHT = {"rtol": 1e-7, "atol": 1e-9}
# Local errors are below rtol; over some fifty steps, whose errors the equations amplify by less
# than ten, they sum to less than this.
CLOSE = {"rtol": 5e-5, "atol": 5e-6}


class Driven(nn.Module):
    """A damped, driven oscillator with a rate that depends on time."""

    def __init__(self, damping):
        super().__init__()
        self.damping = damping

    def forward(self, t, y, mu, drive):
        slope = mu * (1 - y[0] ** 2) * y[1] - y[0] - self.damping * y[1] * torch.cos(t)
        return torch.stack([y[1], slope + drive * torch.sin(2 * t)])


def inputs(columns: int = 3, **changed) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = {
        "y0": torch.tensor([[2.0], [0.1]]) + 0.3 * torch.randn(2, columns, generator=generator),
        "mu": torch.linspace(0.3, 4.0, columns),
        "damping": torch.tensor(0.4),
        "drive": torch.tensor(0.7),
        "t0": torch.linspace(-0.2, 0.1, columns),
        "t1": torch.linspace(1.2, 1.5, columns),
        "t_eval": torch.tensor([0.15, 0.6, 1.1]),
    }
    return {
        name: torch.as_tensor(changed.get(name, x)).clone().requires_grad_()
        for name, x in values.items()
    }


def solution(v: dict, method: str, output: str, adjoint: str = "interpolate", **options):
    """One kind of output, which has the shape (2, times, columns) or (2, times)."""
    found = adjsim.solve_ivp(
        Driven(v["damping"]),
        (v["t0"], v["t1"]),
        v["y0"],
        method,
        v["t_eval"] if output == "t_eval" else None,
        output == "dense",
        args=(v["mu"], v["drive"]),
        params=[v["damping"]],
        adjoint=adjoint,
        **{**TIGHT, **options},
    )
    # Not sorted: the order of the argument is that of the result.
    return found.sol(v["t_eval"].flip(0)) if output == "dense" else found.y


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def gradients(values: torch.Tensor, v: dict) -> dict[str, torch.Tensor]:
    total = (weights(*values.shape) * values).sum()
    found = torch.autograd.grad(total, list(v.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(v.items(), found, strict=True)
    }


@functools.cache
def one_by_one(output: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Values and gradients of one call of SciPy's RK45 for each column."""
    v, found = inputs(2), []
    for j in range(2):
        column = {
            name: v[name][..., j] if name in ("y0", "mu", "t0", "t1") else v[name] for name in v
        }
        states = solution(column, "RK45", output)
        found.append(states[:, [0, -1]] if output == "ends" else states)
    values = torch.stack(found, -1)
    return values.detach(), gradients(values, v)


@pytest.mark.parametrize(
    ("method", "adjoint", "output"),
    slow_but(
        lambda method, adjoint, output: (
            (method, adjoint, output) == ("RK45", "interpolate", "t_eval")
        ),
        [
            *itertools.product(METHODS, ["interpolate"], ["ends", "t_eval", "dense"]),
            *itertools.product(METHODS, ["checkpoint"], ["t_eval"]),
        ],
        marathon=lambda method, adjoint, output: (
            output == "ends" or (method == "Rodas4" and output == "dense")
        ),
    ),
)
def test_equal_to_one_call_a_column(method, adjoint, output):
    """With respect to the start, both ends, the read times, and to arguments and parameters."""
    v = inputs(2)
    values = solution(v, method, output, adjoint)
    known, grads = one_by_one(output)
    torch.testing.assert_close(values, known, **CLOSE)
    for name, found in gradients(values, v).items():
        assert grads[name].abs().max() > 1e-3 or (name == "t_eval") == (output == "ends")
        torch.testing.assert_close(found, grads[name], msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


def van_der_pol(t, y, mu):
    return torch.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])


@pytest.mark.parametrize(
    ("stiff", "end"), [(60.0, 0.6), pytest.param(200.0, 10.0, marks=pytest.mark.marathon)]
)
def test_one_stiff_column_among_mild_ones(stiff, end):
    """Each column takes its own steps: the stiff one does not shorten those of the others."""
    mu = torch.tensor([0.5, stiff, 2.0], requires_grad=True)
    y0 = torch.tensor([[2.0, 2.0, 1.0], [0.0, 0.0, 0.5]], requires_grad=True)
    times = [end / 10, end / 2, end]
    found = adjsim.solve_ivp(
        van_der_pol, (0, end), y0, "Rodas4", times, args=(mu,), rtol=1e-6, atol=1e-8
    )
    alone = adjsim.solve_ivp(
        van_der_pol, (0, end), y0[:, [0, 2]], "Rodas4", args=(mu[[0, 2]],), rtol=1e-6, atol=1e-8
    )
    assert torch.equal(found.steps[[0, 2]], alone.steps)
    by_mu, by_start = torch.autograd.grad((weights(2, 3, 3) * found.y).sum(), [mu, y0])
    for j in range(3):
        one, start = mu[j].detach().requires_grad_(), y0[:, j].detach().requires_grad_()
        options = {"rtol": 1e-7, "atol": 1e-9, "jac": "autodiff"}
        single = adjsim.solve_ivp(
            van_der_pol, (0, end), start, "Radau", times, args=(one,), **options
        )
        # The global error of Rodas4 at rtol = 1e-6 is 1e-5 where the phase of the third column
        # drifts.
        torch.testing.assert_close(found.y[..., j], single.y, rtol=1e-4, atol=1e-4)
        total = (weights(2, 3, 3)[..., j] * single.y).sum()
        singly = torch.autograd.grad(total, [one, start])
        torch.testing.assert_close(by_mu[j], singly[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(by_start[:, j], singly[1], rtol=1e-3, atol=1e-4)


@functools.cache
def robertson() -> tuple[torch.Tensor, torch.Tensor]:
    """The last state of Robertson's problem and its gradient, by SciPy's Radau."""
    k, options = rates(), {"rtol": 1e-9, "atol": [1e-11, 1e-15, 1e-11], "jac": "autodiff"}
    found = adjsim.solve_ivp(kinetics, (0, 40), [1.0, 0.0, 0.0], "Radau", [40.0], args=tuple(k),
                             **options)  # fmt: skip
    (found.y[:, -1] * torch.tensor([1.0, 1e4, -0.5])).sum().backward()
    return found.y[:, -1].detach(), torch.stack([x.grad for x in k])


def rates() -> list[torch.Tensor]:
    return [torch.tensor(x, requires_grad=True) for x in (0.04, 3e7, 1e4)]


def kinetics(t, y, k1, k2, k3):
    slow, fast, back = k1 * y[0], k2 * y[1] ** 2, k3 * y[1] * y[2]
    return torch.stack([-slow + back, slow - back - fast, fast])


@pytest.mark.marathon
def test_robertson_in_columns():
    """Rate constants over nine orders of magnitude, for which the third column is scaled."""
    k = rates()
    scaled = [x * torch.tensor([1.0, 1.0, 0.5]) for x in k]
    start = torch.tensor([[1.0], [0.0], [0.0]]).expand(3, 3)
    found = adjsim.solve_ivp(kinetics, (0, [40.0, 40.0, 80.0]), start, "Rodas4", args=tuple(scaled),
                             rtol=1e-7, atol=[1e-9, 1e-13, 1e-9])  # fmt: skip
    state, grad = robertson()
    # Half the rates for twice the time is the same problem.
    torch.testing.assert_close(found.y[:, -1], state[:, None].expand(3, 3), rtol=1e-5, atol=1e-9)
    for column in (0, 2):
        total = (found.y[:, -1, column] * torch.tensor([1.0, 1e4, -0.5])).sum()
        by_k = torch.stack(torch.autograd.grad(total, k, retain_graph=True))
        torch.testing.assert_close(by_k, grad, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_is_that_of_the_steps(method):
    """To rounding: the steps that were taken, written out, by autograd; and by differences."""
    v = inputs()
    found = adjsim.solve_ivp(
        Driven(v["damping"]), (0, 2), v["y0"], method, dense_output=True,
        args=(v["mu"], v["drive"]), params=[v["damping"]], rtol=1e-4, first_step=1.0,
    )  # fmt: skip
    attempts = found.sol.history.attempts
    assert len(attempts) > 8
    assert bool((found.rejections > 0).any())

    def stepped(v):
        """The same steps; a step of size zero stays."""
        y = v["y0"]
        for came in attempts:
            fun = Driven(v["damping"])
            y = COLUMN_METHODS[method](
                lambda t, y, fun=fun: fun(t, y, v["mu"], v["drive"]),
                came.t,
                came.h,
                y,
                None,
            ).end
        return torch.stack([v["y0"], y], 1)

    names = ["y0", "mu", "damping", "drive"]
    adjoint, direct = gradients(found.y, v), gradients(stepped(v), v)
    for name in names:
        torch.testing.assert_close(adjoint[name], direct[name], rtol=1e-12, atol=1e-13)
    along = {name: weights(*v[name].shape) for name in names}
    h, ends = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            moved = stepped({name: x + sign * h * along.get(name, 0 * x) for name, x in v.items()})
            ends.append((weights(*moved.shape) * moved).sum())
    slope = sum((adjoint[name] * along[name]).sum() for name in names)
    # Central differences with h = 1e-5 have errors of 1e-10 and roundings of 1e-11.
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * h), rtol=1e-6, atol=1e-7)


@functools.cache
def slope() -> float:
    """Central differences along a direction in all inputs, with new steps at each end."""
    h, ends = 1e-4, []
    for sign in (1, -1):
        moved = {name: (x + sign * h * weights(*x.shape)).detach() for name, x in inputs().items()}
        values = solution(moved, "RK45", "t_eval", rtol=1e-11, atol=1e-13)
        ends.append(float((weights(*values.shape) * values).sum()))
    return (ends[0] - ends[1]) / (2 * h)


@pytest.mark.marathon
@pytest.mark.parametrize("method", METHODS)
def test_central_differences(method):
    """The differences have errors of 1e-8 from h, and of 1e-7 from the tolerance over h."""
    v = inputs()
    found = gradients(solution(v, method, "t_eval", rtol=1e-9, atol=1e-11), v)
    along = sum(float((found[name] * weights(*x.shape)).sum()) for name, x in v.items())
    assert along == pytest.approx(slope(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("method", "segment"),
    slow_but(
        lambda method, segment: method == "RK45" and segment == 2,
        itertools.product(METHODS, [2, 64]),
    ),
)
def test_checkpoints_give_the_same_gradient(method, segment, monkeypatch):
    """With segments of two steps, segments are divided twice."""
    monkeypatch.setattr(column_solution, "SEGMENT_STEPS", segment)
    found = {}
    for adjoint in ADJOINTS:
        v = inputs()
        values = solution(v, method, "t_eval", adjoint, rtol=1e-4, atol=1e-5)
        found[adjoint] = gradients(values, v)
    for name, x in found["checkpoint"].items():
        torch.testing.assert_close(x, found["interpolate"][name], rtol=1e-12, atol=1e-14)


def test_checkpoints_bound_the_number_of_stored_states(monkeypatch):
    """At most twice the number of steps in a segment, whatever the number of steps."""
    monkeypatch.setattr(column_solution, "SEGMENT_STEPS", 2)
    kept = []
    steps = column_solution.CheckpointedSteps

    class Observed(steps):
        def __call__(self, state):
            super().__call__(state)
            kept.append(len(self.kept))

    monkeypatch.setattr("adjsim.ivp.columns.CheckpointedSteps", Observed)
    v = inputs()
    solution(v, "RK45", "ends", "checkpoint", rtol=1e-5)
    assert len(kept) > 20
    assert max(kept) == 4


@pytest.mark.parametrize(
    ("method", "adjoint"),
    slow_but(
        lambda method, adjoint: (method, adjoint) == ("RK45", "interpolate"),
        itertools.product(METHODS, ADJOINTS),
    ),
)
def test_a_batch_of_one_equals_one_state(method, adjoint):
    v = inputs(1)
    values = solution(v, method, "t_eval", adjoint)
    w = {name: x.detach()[..., 0] if name in ("y0", "mu", "t0", "t1") else x.detach() for name, x
         in v.items()}  # fmt: skip
    w = {name: x.clone().requires_grad_() for name, x in w.items()}
    single = solution(w, "RK45", "t_eval")
    # RK45 takes the same steps here and there.
    close = {"rtol": 1e-12, "atol": 1e-12} if method == "RK45" else CLOSE
    torch.testing.assert_close(values[..., 0], single, **close)
    known = gradients(single, w)
    for name, x in gradients(values, v).items():
        torch.testing.assert_close(x.reshape(known[name].shape), known[name], msg=name, **CLOSE)


@pytest.mark.parametrize("method", METHODS)
def test_backward_in_time_and_spans_of_length_zero(method):
    """y' = k y from t0 to t1, with y1 = y0 exp(k (t1 - t0)) and its derivatives."""
    k, y0 = torch.tensor([0.7, -0.4, 1.1]), torch.tensor([[1.3, 0.8, 2.0]])
    t0, t1 = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([1.0, -1.5, 0.5])
    v = [x.clone().requires_grad_() for x in (k, y0, t0, t1)]
    found = adjsim.solve_ivp(lambda t, y, k: k * y, (v[2], v[3]), v[1], method, args=(v[0],),
                             **TIGHT)  # fmt: skip
    exact = v[1] * torch.exp(v[0] * (v[3] - v[2]))
    torch.testing.assert_close(found.y[:, -1], exact, **CLOSE)
    ours = torch.autograd.grad((found.y[:, -1] * weights(1, 3)).sum(), v)
    known = torch.autograd.grad((exact * weights(1, 3)).sum(), v)
    for a, b in zip(ours, known, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert found.steps[2] == 0


@pytest.mark.parametrize("method", METHODS)
def test_rates_that_depend_on_time_alone(method):
    """An integral: no Jacobian, and no graph from the state."""
    a = torch.tensor([0.5, 2.0], requires_grad=True)
    found = adjsim.solve_ivp(lambda t, y: [a * torch.cos(a * t)], (0, 1), torch.zeros(1, 2), method,
                             [0.3, 1.0], params=[a], **TIGHT)  # fmt: skip
    t = torch.tensor([[0.3], [1.0]])
    torch.testing.assert_close(found.y[0], torch.sin(a * t).detach(), **CLOSE)
    (by_a,) = torch.autograd.grad(found.y.sum(), a)
    torch.testing.assert_close(by_a, (t * torch.cos(a * t)).sum(0).detach(), **CLOSE)
    still = adjsim.solve_ivp(lambda t, y: torch.zeros(1, 2), (0, 1), torch.ones(1, 2), method,
                             params=[a])  # fmt: skip
    assert torch.equal(still.y, torch.ones(1, 2, 2))


def test_a_shared_network_in_columns():
    """A module on columns, with the gradient with respect to its weights."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, t, y):
            return self.net(y.T).T if y.ndim == 2 else self.net(y)

    field, y0 = Field(), 2 * torch.randn(2, 4)
    adjsim.solve_ivp(field, (0, 2), y0, "RK45", **TIGHT).y[:, -1].square().sum().backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    for column in y0.T:
        adjsim.solve_ivp(field, (0, 2), column, "RK45", **TIGHT).y[:, -1].square().sum().backward()
    for x, p in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(x, p.grad, **CLOSE)


@pytest.mark.parametrize(
    ("method", "switch"),
    [
        ("RK45", "time"),
        ("Rodas4", "time"),
        ("RK45", "state"),
        ("Rodas4", "state"),
        ("RK45", "sliding"),
    ],
)
def test_a_jump_is_refused_as_in_a_single_call(method, switch):
    """y' = 1 before t = p or y = p, and 3 after: y(1.2) depends on p, and the steps do not. Where
    the rate is -1 after y = p, the solution slides.
    """
    p = torch.tensor([0.9, 0.5, 0.7], dtype=torch.float64, requires_grad=True)
    start = torch.zeros(1, 3, dtype=torch.float64)

    def fun(t, y, p):
        after = -1.0 if switch == "sliding" else 3.0
        return torch.where((t if switch == "time" else y[0]) < p, 1.0, after) + 0 * y

    with pytest.raises(ValueError, match=r"fun jumps at t = .* in column \d, where no event"):
        adjsim.solve_ivp(fun, (0, 1.2), start, method, args=(p,), **TIGHT)
    with torch.no_grad():
        adjsim.solve_ivp(fun, (0, 0.6), start, method, args=(p,))


@pytest.mark.parametrize("method", METHODS)
def test_jumps_at_a_fixed_time_and_steep_rates_are_not_refused(method):
    """y' = p before t = 0.4 and 3 p after has dy(1)/dp = 2.2; a switch of
    width 0.01 from -1 to 1 at t = p has -2.
    """
    p = torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True)
    start = torch.zeros(1, 2, dtype=torch.float64)

    def jump(t, y, p):
        return torch.where(t < 0.4, p, 3 * p) + 0 * y

    def switch(t, y, p):
        return torch.tanh(100 * (t - p)) + 0 * y

    for fun, answer in ((jump, 2.2), (switch, -2.0)):
        found = adjsim.solve_ivp(fun, (0, 1), start, method, args=(p,), **TIGHT)
        (by_p,) = torch.autograd.grad(found.y[0, -1].sum(), p)
        # The step across the jump is of first order: its error is a hundred times its estimate.
        assert by_p.tolist() == pytest.approx([answer] * 2, abs=1e-4)
