r"""
solve_ivp: from differentiating the solver to the adjoint
=========================================================

Van der Pol's oscillator, :math:`y'' = \mu (1 - y^2) y' - y`, starts from (y, y') = (2,
0), with :math:`\mu = 5`. What is the derivative of y at t = 10 with respect to
:math:`\mu`? The answer, -0.631501703, is known. A direct approach writes the solver in
PyTorch and differentiates through its steps. The result is right, but every step stays
in memory. An adjoint method solves one more equation backward and stores less. The
choice of adjoint matters: nearby solutions of the oscillator converge so strongly that
an adjoint which integrates the state backward fails.

This example compares the time, memory and error of backpropagation through
torchdiffeq's solver, of torchdiffeq's adjoint, and of the adjoints of
:func:`~adjsim.solve_ivp`. All use the same method of Dormand and Prince at the same
tolerances.
"""

# sphinx_gallery_thumbnail_number = 2

import multiprocessing
import time
import warnings

import matplotlib.pyplot as plt
import torch
from torchdiffeq import odeint, odeint_adjoint

import adjsim
from adjsim.estimators.memory import PeakMemory

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)  # two numbers are too few to share between threads

MU, END, KNOWN = 5.0, 10.0, -0.631501703
RTOLS = [1e-3, 1e-6]


def field(t, y, mu):
    return torch.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])


# %%
# The solution
# ------------
#
# SciPy solves the equation, so the steps are SciPy's. They are ten times shorter where
# the solution turns.

with torch.no_grad():
    solution = adjsim.solve_ivp(
        field, (0, END), [2.0, 0.0], args=(torch.tensor(MU),), rtol=1e-6, atol=1e-9
    )

fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
axes[0].plot(solution.t, solution.y[0], ".-", ms=4)
axes[0].set(
    xlabel="t (no unit)",
    ylabel="y (no unit)",
    title="the solution, at the solver's steps",
)
axes[1].semilogy(solution.t[1:], solution.t.diff(), ".-", ms=4, color="C1")
axes[1].set(xlabel="t (no unit)", ylabel="length of the step (no unit)")
plt.show()

# %%
# Five ways to its gradient
# -------------------------


class Oscillator(torch.nn.Module):
    """The equation for torchdiffeq, whose adjoint finds only the parameters of a
    module.
    """

    def __init__(self):
        super().__init__()
        self.mu = torch.nn.Parameter(torch.tensor(MU))

    def forward(self, t, y):
        return field(t, y, self.mu)


def by_torchdiffeq(solve):
    def gradient(rtol):
        oscillator = Oscillator()
        times = torch.tensor([0.0, END])
        solve(
            oscillator,
            torch.tensor([2.0, 0.0]),
            times,
            rtol=rtol,
            atol=rtol / 1000,
            method="dopri5",
        )[-1, 0].backward()
        return float(oscillator.mu.grad)

    return gradient


def by_solve_ivp(adjoint):
    def gradient(rtol):
        mu = torch.tensor(MU, requires_grad=True)
        found = adjsim.solve_ivp(
            field,
            (0, END),
            [2.0, 0.0],
            t_eval=[END],
            args=(mu,),
            adjoint=adjoint,
            rtol=rtol,
            atol=rtol / 1000,
        )
        found.y[0, -1].backward()
        return float(mu.grad)

    return gradient


WAYS = {
    "differentiating torchdiffeq's solver": by_torchdiffeq(odeint),
    "torchdiffeq's adjoint": by_torchdiffeq(odeint_adjoint),
    'solve_ivp, "interpolate"': by_solve_ivp("interpolate"),
    'solve_ivp, "checkpoint"': by_solve_ivp("checkpoint"),
    'solve_ivp, "backsolve"': by_solve_ivp("backsolve"),
}

# %%
# Time, memory and error
# ----------------------
#
# Each measurement runs in a process of its own, forked from this one. The child process
# measures the growth of its own resident set, since Python's tracemalloc does not see
# tensors.


def measure(gradient, rtol, answers):
    for warm in ("differentiating torchdiffeq's solver", 'solve_ivp, "checkpoint"'):
        WAYS[warm](1e-3)  # code and allocators in place, and inherited pages copied
    word, begun = "", time.perf_counter()
    with PeakMemory(torch.device("cpu")) as memory:
        try:
            value = gradient(rtol)
        except (
            AssertionError,
            RuntimeError,
        ) as error:  # what torchdiffeq and solve_ivp raise when steps vanish
            value, word = float("nan"), str(error)
    answers.put((value, time.perf_counter() - begun, memory.bytes, word))


def apart(gradient, rtol):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=measure, args=(gradient, rtol, answers))
    child.start()
    found = answers.get(timeout=120)
    child.join()
    return found


warnings.filterwarnings(
    "ignore", "a gradient at rtol"
)  # a loose tolerance is tried here on purpose
results = {
    name: [apart(gradient, rtol) for rtol in RTOLS] for name, gradient in WAYS.items()
}

for name, rows in results.items():
    print(name)
    for rtol, (value, seconds, size, word) in zip(RTOLS, rows, strict=True):
        error = f"error {abs(value - KNOWN):.1e}" if value == value else word[:60]
        print(f"   rtol {rtol:.0e}: {seconds:6.2f} s, {size / 1e6:6.1f} MB, {error}")

# %%
# Backpropagation is as accurate as the forward solution that it differentiates. It
# stores every step with all its stages, so its memory grows with the number of steps.
# The adjoints that integrate the state backward (torchdiffeq's and "backsolve") either
# fail, which is the better case, or return a wrong number. The adjoints that read the
# forward solution ("interpolate" and "checkpoint") are right: the error is below 0.05
# at a relative tolerance of 1e-3, and below 1e-5 at 1e-6. At the tighter one they take
# less time than backpropagation, and a small part of its memory.

fig, axes = plt.subplots(1, 3, figsize=(11, 4.2), layout="constrained")
for i, (name, rows) in enumerate(results.items()):
    values, seconds, sizes, _ = zip(*rows, strict=True)
    errors = [abs(value - KNOWN) for value in values]
    came = [k for k, value in enumerate(values) if value == value]
    axes[0].loglog(RTOLS, errors, "o-", color=f"C{i}", label=name)
    axes[1].loglog(
        [RTOLS[k] for k in came], [seconds[k] for k in came], "o-", color=f"C{i}"
    )
    axes[2].semilogx(
        [RTOLS[k] for k in came], [sizes[k] / 1e6 for k in came], "o-", color=f"C{i}"
    )
axes[0].set(ylabel="error of the gradient (no unit)", title="error")
axes[1].set(ylabel="seconds, forward and backward", title="time")
axes[2].set(ylabel="MB", title="growth of the resident set")
for ax in axes:
    ax.set_xlabel("relative tolerance")
    ax.invert_xaxis()
fig.legend(loc="outside lower center", ncols=3)
plt.show()

for name in ('solve_ivp, "interpolate"', 'solve_ivp, "checkpoint"'):
    errors = [abs(row[0] - KNOWN) for row in results[name]]
    assert errors[0] < 5e-2
    assert errors[-1] < 1e-5
    assert results[name][-1][2] < results["differentiating torchdiffeq's solver"][-1][2]
for name in ("torchdiffeq's adjoint", 'solve_ivp, "backsolve"'):
    assert not any(
        abs(row[0] - KNOWN) < 1e-2 for row in results[name]
    )  # NaN where it failed
