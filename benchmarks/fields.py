"""Any vector field: time and error of this library against others, one thread, one run.

Each case is a function that returns rows of a table. `columns`: van der Pol's oscillator with 1,000
values of mu in the columns of one call of solve_ivp, against a loop over solve_ivp with one call a
column, forward and with the gradient with respect to all mu. The loop runs over every 100th column,
and its time is scaled to all columns. `lorenz`: 1e5 exact steps of Lorenz and their gradient.
`ode`, `sde`: the gradient of a neural ODE and SDE, against torchdiffeq, torchsde and diffrax.
`memory`: the growth of the resident set with the steps of a neural ODE, in fresh processes. These
three are in networks.py. `stiff`: implicit steps against diffrax, in stiff.py. `rows`: 25 rows of
cotangents over one backward run, in rows.py.
Run: python benchmarks/fields.py [case ...]
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import torch
from networks import LONG, SHORT, memory, neural_ode, neural_sde
from rich.console import Console
from rich.table import Table
from rows import rows
from stiff import stiff
from torch import Tensor, nn

import adjsim

COLUMNS, SAMPLED = 1_000, 10
# The methods of the columns and of the loop, the largest mu, the time span and the tolerance.
VAN_DER_POL = [("RK45", "RK45", 5.0, 10.0, 1e-6), ("Rodas4", "Radau", 50.0, 40.0, 1e-6)]
TARGET = 0.02


def van_der_pol(t: Tensor, y: Tensor, mu: Tensor) -> Tensor:
    return torch.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])


def solve(mu: Tensor, y0: Tensor, method: str, end: float, rtol: float, gradient: bool) -> Tensor:
    """Return the last states, or the gradient of their first components with respect to mu."""
    mu = mu.clone().requires_grad_(gradient)
    jacobian = {"jac": "autodiff"} if method == "Radau" else {}
    found = adjsim.solve_ivp(
        van_der_pol, (0, end), y0, method, [end], args=(mu,), rtol=rtol, atol=rtol / 100, **jacobian
    )
    return torch.autograd.grad(found.y[0, -1].sum(), mu)[0] if gradient else found.y[:, -1]


def columns() -> list[list[str]]:
    """Rows of method, kind, seconds of the columns and of the loop, ratio, largest difference."""
    rows, sample = [], list(range(0, COLUMNS, COLUMNS // SAMPLED))
    for (method, single, largest, *settings), gradient in itertools.product(
        VAN_DER_POL, (False, True)
    ):
        mu = torch.logspace(-1, 0, COLUMNS) * largest
        y0 = torch.tensor([[2.0], [0.0]])
        begin = time.perf_counter()
        found = solve(mu, y0.expand(2, COLUMNS), method, *settings, gradient)
        middle = time.perf_counter()
        known = [solve(mu[j], y0[:, 0], single, *settings, gradient) for j in sample]
        seconds, looped = middle - begin, (time.perf_counter() - middle) * COLUMNS / SAMPLED
        singly = torch.stack(known, -1)
        rows.append(
            [
                f"{method} ({single}), mu up to {largest:g}",
                "gradient" if gradient else "forward",
                f"{seconds:.2f}",
                f"{looped:.0f}",
                f"{seconds / looped:.4f} (target {TARGET})",
                f"{float((found[..., sample] - singly).abs().max() / singly.abs().max()):.1e}",
            ]
        )
    return rows


class Lorenz(nn.Module):
    """The equations of Lorenz (1963)."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor([10.0, 28.0, 8 / 3]))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        (x, v, z), (sigma, rho, beta) = y.unbind(-1), self.numbers.unbind()
        return torch.stack([sigma * (v - x), x * (rho - z) - v, x * v - beta * z], -1)


LORENZ_STEPS, LORENZ_TARGET = 100_000, 2.0


def lorenz() -> list[list[str]]:
    """Rows of seconds, difference of the recovered start, bits a step and entry."""
    net = Lorenz()
    dynamics, solver = adjsim.ODE(net), adjsim.Coupled("rk4", 0.005, rate=21.0, exact=True)
    rows: list[list[str]] = []
    for _ in range(4):
        begin = time.process_time()
        run = adjsim.simulate(
            dynamics,
            dynamics.init(torch.tensor([1.0, 1.0, 25.0])),
            [0.0, LORENZ_STEPS * solver.dt],
            solver=solver,
            adjoint=adjsim.ReversibleAdjoint(),
            compile=True,
        )
        torch.autograd.grad(run.final.y.sum(), net.numbers)
        seconds, stats = time.process_time() - begin, run.stats
        error, bits = stats["reconstruction_error"], stats["buffer_bits"]
        rows.append([f"{seconds:.2f} (target {LORENZ_TARGET})", f"{error:.1g}", f"{bits:.5f}"])
    # The first run compiles.
    return [min(rows[1:])]


CASES: dict[str, tuple[list[str], Callable[[], list[list[str]]]]] = {
    "lorenz": (["seconds", "error of recovered start", "bits a step and entry"], lorenz),
    "ode": (
        ["dtype", "", "ms", "of torchdiffeq's best", "of diffrax's best", "error of gradient"],
        neural_ode,
    ),
    "sde": (["dtype", "", "ms", "of torchsde's best", "error of gradient"], neural_sde),
    "stiff": (["", "", "ms", "of diffrax's best", "difference of gradient"], stiff),
    "rows": (["", "", "25 rows over one (one)", "compiled"], rows),
    "memory": (["", f"{SHORT} steps, MiB", f"{LONG} steps, MiB"], memory),
    "columns": (
        ["method (of the loop)", "", "one call, s", "loop, s", "ratio", "largest difference"],
        columns,
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name in sys.argv[1:] or CASES:
        header, case = CASES[name]
        table = Table(*header, title=name)
        for row in case():
            table.add_row(*row)
        Console().print(table)


if __name__ == "__main__":
    main()
