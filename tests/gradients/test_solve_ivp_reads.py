"""What a run reads: as it was at the start, by detached stand-ins, and refused where it has changed
or was not declared.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

import adjsim

ADJOINTS = ["interpolate", "checkpoint", "backsolve"]
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def leaf(x):
    return torch.tensor(x, requires_grad=True)


class Decay(nn.Module):
    """y' = -scale k y, with k a parameter, a buffer and a plain attribute."""

    def __init__(self, k=0.7):
        super().__init__()
        self.k = nn.Parameter(torch.tensor(k))
        self.register_buffer("shift", torch.tensor(0.0))
        self.scale = 1.0

    def forward(self, t, y):
        return -self.scale * self.k * y + self.shift


@pytest.mark.parametrize("method", ["RK45", "Radau", "BDF", "LSODA"])
@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_a_solution_keeps_the_attributes_that_it_has_read(adjoint, method):
    module = Decay()
    found = adjsim.solve_ivp(module, (0, 1), [1.0], method, adjoint=adjoint, **TIGHT)
    module.scale = 1.5
    found.y[0, -1].backward()
    assert float(module.k.grad) == pytest.approx(-np.exp(-0.7), rel=1e-6)


@pytest.mark.parametrize("method", ["RK45", "Radau", "BDF", "LSODA"])
@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_a_change_that_a_solution_cannot_keep_is_refused(adjoint, method, monkeypatch):
    class Scaled(Decay):
        factor = 1.0

        def forward(self, t, y):
            return self.factor * super().forward(t, y)

    module = Scaled()
    found = adjsim.solve_ivp(module, (0, 1), [1.0], method, adjoint=adjoint, **TIGHT)
    monkeypatch.setattr(Scaled, "factor", 1.5)
    with pytest.raises(RuntimeError, match="fun has changed since the forward solution"):
        found.y[0, -1].backward()


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_a_random_module_is_refused(adjoint):
    net = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    found = adjsim.solve_ivp(
        lambda t, y: net(y), (0, 0.1), [1.0], params=net, rtol=1e-2, adjoint=adjoint, max_step=0.05
    )
    with pytest.raises(RuntimeError, match="random numbers"):
        found.y[0, -1].backward()
    net.eval()
    adjsim.solve_ivp(lambda t, y: net(y), (0, 1), [1.0], params=net, rtol=1e-6, adjoint=adjoint).y[
        0, -1
    ].backward()


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_a_replaced_parameter_or_buffer_changes_nothing(adjoint):
    """A run has read its tensors: what the module holds afterwards is another's."""
    module = Decay()
    k = module.k
    found = adjsim.solve_ivp(module, (0, 1), [1.0], adjoint=adjoint, **TIGHT)
    k.data = torch.tensor(5.0)
    module.k = nn.Parameter(torch.tensor(3.0))
    module.shift = torch.tensor(2.0)
    found.y[0, -1].backward()
    assert float(k.grad) == pytest.approx(-np.exp(-0.7), rel=1e-7)
    assert module.k.grad is None
    assert float(module.k) == 3.0
    assert float(module.shift) == 2.0


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_a_parameter_or_buffer_that_is_written_to_is_one_of_the_next_solution(adjoint):
    module = Decay()
    found = adjsim.solve_ivp(module, (0, 1), [1.0], adjoint=adjoint, **TIGHT)
    module.shift += 1
    with torch.no_grad():
        module.k.mul_(3.0)
    found.y[0, -1].backward()
    assert float(module.k.grad) == pytest.approx(-np.exp(-0.7), rel=1e-7)


@pytest.mark.parametrize("later", [200, 2000])
def test_a_replay_that_differs_is_refused(later):
    """A function that changes while it is solved again, after its rates have been compared."""

    class Counted:
        calls, limit = 0, float("inf")

        def __call__(self, t, y, k):
            Counted.calls += 1
            return -k * y * (1.001 if Counted.calls > Counted.limit else 1.0)

    k = leaf(0.7)
    found = adjsim.solve_ivp(
        Counted(),
        (0, 20),
        [1.0],
        "RK23",
        [20.0],
        args=(k,),
        adjoint="checkpoint",
        rtol=1e-9,
        atol=1e-9,
        adjoint_rtol=1e-2,
    )
    Counted.limit = Counted.calls + later
    with pytest.raises(RuntimeError, match="fun has changed since"):
        found.y[0, -1].backward()


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("kind", ["parameter", "captured", "argument", "history"])
def test_a_hook_runs_once(kind, adjoint):
    """One that doubles the gradient gives exactly twice."""
    grads = []
    for hooked in (False, True):
        module = Decay()
        k = {"parameter": module.k, "history": leaf(0.7) * 1.0}.get(kind, leaf(0.7))
        calls = []
        if hooked:
            k.register_hook(lambda g, calls=calls: (calls.append(1), 2 * g)[1])
        if kind == "parameter":
            found = adjsim.solve_ivp(module, (0, 1), [1.0], adjoint=adjoint, rtol=1e-6)
        elif kind == "argument":
            found = adjsim.solve_ivp(
                lambda t, y, k: -k * y, (0, 1), [1.0], args=(k,), adjoint=adjoint, rtol=1e-6
            )
        else:
            found = adjsim.solve_ivp(
                lambda t, y, k=k: [-k * y[0]], (0, 1), [1.0], params=[k], adjoint=adjoint, rtol=1e-6
            )
        grads.append(torch.autograd.grad(found.y[0, -1], k)[0])
        assert len(calls) == hooked
    assert float(grads[1]) == 2 * float(grads[0]) != 0


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_functional_call_may_have_ended(adjoint):
    """A hypernetwork: the gradient reaches the tensors of the call, though the module has its own
    again by then.
    """

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 2)

        def forward(self, y0):
            rate = lambda t, y: self.net(y)  # noqa: E731
            return adjsim.solve_ivp(
                rate, (0, 1), y0, params=self.net, adjoint=adjoint, rtol=1e-8, atol=1e-10
            ).y[:, -1]

    module = Wrapped()
    own = {name: x.detach().clone() for name, x in module.named_parameters()}
    source = leaf(0.3)
    weights = {name: x * source for name, x in own.items()}
    torch.func.functional_call(module, weights, (torch.tensor([1.0, -0.5]),)).sum().backward()
    assert all(x.grad is None for x in module.parameters())

    def value(s):
        with torch.no_grad():
            again = {name: x * s for name, x in own.items()}
            return float(
                torch.func.functional_call(module, again, (torch.tensor([1.0, -0.5]),)).sum()
            )

    assert float(source.grad) == pytest.approx(
        (value(0.3 + 1e-4) - value(0.3 - 1e-4)) / 2e-4, rel=1e-5
    )


def test_a_module_that_reads_its_parameters_by_a_list():
    """An LSTM: every parameter that the result depends on has a gradient."""
    cell = nn.LSTM(2, 2)
    found = adjsim.solve_ivp(
        lambda t, y: cell(y[None])[0][0], (0, 1), [1.0, -0.5], params=cell, rtol=1e-6
    )
    found.y[:, -1].sum().backward()
    assert all(
        float(x.grad.abs().sum()) > 0
        for name, x in cell.named_parameters()
        if not name.startswith("weight_hh")
    )


def test_two_threads_and_one_module():
    """Two ways back at once, of runs whose tensors the module no longer has."""
    module, runs = Decay(), {}
    for k in (0.5, 0.9):
        module.k = nn.Parameter(torch.tensor(k))
        runs[k] = module.k, adjsim.solve_ivp(module, (0, 1), [1.0], **TIGHT).y[0, -1]
    grads = {}
    ready = threading.Barrier(2)

    def work(k):
        tensor, last = runs[k]
        ready.wait()
        grads[k] = [
            float(torch.autograd.grad(last, tensor, retain_graph=True)[0]) for _ in range(5)
        ]

    threads = [threading.Thread(target=work, args=(k,)) for k in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, found in grads.items():
        assert found == pytest.approx([-np.exp(-k)] * 5, rel=1e-6)
    assert float(module.k) == 0.9


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("method", ["RK45", "BDF"])
@pytest.mark.parametrize("where", ["time", "region"])
def test_a_tensor_that_is_read_late_is_named(where, method, adjoint):
    """However little of the way it is read on, with parameters declared and without."""
    late = leaf(1.0)
    for declared in ([], [leaf(1.0)]):
        y0 = leaf([1.0])

        def fun(t, y, declared=declared):
            inside = 0.6 < t < 0.7 if where == "time" else y[0] < 0.5
            return -y * (late if inside else 1.0) * (declared[0] if declared else 1.0)

        found = adjsim.solve_ivp(
            fun, (0, 1), y0, method, params=declared, adjoint=adjoint, rtol=1e-6
        )
        with pytest.raises(ValueError, match="fun reads 'late'"):
            found.y[0, -1].backward()


# NumPy.


def of_numpy(t, y, k):
    out = y.copy()
    out[0], out[1] = y[1], -k * np.sin(y[0])
    return out


def test_numpy_without_a_gradient():
    """Functions, events and Jacobians of arrays are given arrays, and the values are SciPy's."""

    def event(t, y, k):
        return np.min(y) + 0.2

    def jac(t, y, k):
        return np.array([[0.0, 1.0], [-k * np.cos(y[0]), 0.0]])

    found = adjsim.solve_ivp(
        of_numpy, (0, 2), [1.0, 0.0], "Radau", events=event, args=(2.0,), jac=jac, dense_output=True
    )
    known = adjsim.solve_ivp(
        lambda t, y, k: torch.stack([y[1], -k * torch.sin(y[0])]),
        (0, 2),
        [1.0, 0.0],
        "Radau",
        args=(2.0,),
        jac="autodiff",
    )
    torch.testing.assert_close(found.y, known.y, rtol=1e-12, atol=1e-12)
    assert len(found.t_events[0]) == 1
    assert found.sol(0.5).shape == (2,)
    with torch.no_grad():
        assert adjsim.solve_ivp(of_numpy, (0, 2), leaf([1.0, 0.0]), args=(2.0,)).y.shape[0] == 2


def test_numpy_where_a_gradient_is_asked_for():
    y0 = leaf([1.0, 0.5])
    rows = [
        ({"fun": of_numpy, "args": (2.0,)}, "fun computes with NumPy"),
        ({"fun": lambda t, y: [y[1], -np.sin(y[0])]}, "fun computes with NumPy"),
        (
            {"fun": lambda t, y: -y, "events": lambda t, y: np.min(y) - 0.3},
            "event 0, which .* computes with NumPy",
        ),
        (
            {"fun": lambda t, y: -y, "events": lambda t, y: np.sin(y[0]) - 0.3},
            "event 0 computes with NumPy",
        ),
    ]
    for arguments, message in rows:
        with pytest.raises(TypeError, match=message + ".*no gradient flows through NumPy"):
            adjsim.solve_ivp(t_span=(0, 1), y0=y0, rtol=1e-6, **arguments)
    with pytest.raises(TypeError, match=r"autodiff.*computes with NumPy"):
        adjsim.solve_ivp(of_numpy, (0, 1), [1.0, 0.5], "Radau", args=(2.0,), jac="autodiff")


def test_errors_of_a_function_are_its_own():
    def fails(t, y):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        adjsim.solve_ivp(fails, (0, 1), [1.0])


def test_inference_mode():
    """No gradient, the same values; resets, which need derivatives of their own, work as well."""
    floor = lambda t, y, g: y[0]  # noqa: E731
    floor.direction, floor.reset = -1, lambda t, y, g: torch.stack([y[0], -0.9 * y[1]])
    run = lambda g: adjsim.solve_ivp(  # noqa: E731
        lambda t, y, g: torch.stack([y[1], -g]),
        (0, 1),
        torch.ones(2),
        events=floor,
        args=(g,),
        rtol=1e-6,
    )
    with torch.inference_mode():
        inside = run(leaf(9.81)), run(torch.tensor(9.81))
    with torch.no_grad():
        outside = run(torch.tensor(9.81))
    for found in inside:
        assert torch.equal(found.y, outside.y)
        assert not found.y.requires_grad


class Rows(list):
    """A list of the user's own class."""


@pytest.mark.parametrize(
    "fun",
    [
        lambda rates: lambda t, y: [rates[0], rates[1] * y[0]],
        lambda rates: lambda t, y: torch.stack(Rows([rates[0], rates[1] * y[0]])),
        lambda rates: lambda t, y: torch.stack(Rows(rates)) * torch.stack([y[0] / y[0], y[0]]),
    ],
    ids=["returned", "computed", "declared"],
)
def test_declared_tensors_in_lists_have_their_gradients(fun):
    """y0' = a, y1' = b y0 from 1 and 0: at t = 1, y1 = b (1 + a / 2)."""
    a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.7, -0.3))
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    run = adjsim.solve_ivp(fun((a, b)), (0.0, 1.0), start, params=[a, b], **TIGHT)
    run.y[1, -1].backward()
    torch.testing.assert_close(torch.stack([a.grad, b.grad]).tolist(), [-0.15, 1.35])


@pytest.mark.parametrize("batch_first", [False, True])
def test_modules_among_the_arguments_have_their_gradients(batch_first):
    """y' = y M, as the same module gives it that is the function itself."""
    y = torch.tensor([[1.0, 0.5], [0.3, -0.2]], dtype=torch.float64)
    net = nn.Linear(2, 2, dtype=torch.float64)

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, t, y, *args):
            return (args or [self.net])[0](y)

    found = []
    for fun, args in (
        (Field(), ()),
        (Field(), (net,)),
        (lambda t, y, net: net(y), (net,)),
    ):
        sol = adjsim.solve_ivp(
            fun, (0, 1), y if batch_first else y[0], t_eval=[1.0], args=args,
            batch_first=batch_first, rtol=1e-6,
        )  # fmt: skip
        found.append(torch.autograd.grad(sol.y.square().sum(), [net.weight, net.bias]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)
