"""Stiff initial value problems: the time of each method, forward and backward, by the state's size.

    python benchmarks/kinetics.py

Robertson's problem (3 species), HIRES (8) and POLLU (20), and reactions that diffuse along a line
(the Brusselator in n/2 cells), each with ten read times and a gradient to all rate constants.
Columns are the time of the values alone, and that of the gradient as a multiple of it, by the clock
of this process: minima of three.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch

import adjsim

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chemistry import HIRES_RATES, HIRES_START, POLLU_START, hires, pollu, pollu_rates

METHODS = ("BDF", "Radau", "LSODA", "DOP853")
LONGEST = 5.0


def robertson(t, y, k):
    slow, fast, back = k[0] * y[0], k[1] * y[1] ** 2, k[2] * y[1] * y[2]
    return torch.stack([-slow + back, slow - back - fast, fast])


def line(t, y, k):
    u, v = y.chunk(2)
    cells, autocatalysis = len(u), u**2 * v

    def spread(x):
        padded = torch.cat([x[:1], x, x[-1:]])
        return k[2] * cells**2 * (padded[2:] - 2 * x + padded[:-2])

    return torch.cat(
        [
            k[0] - (k[1] + 1) * u + autocatalysis + spread(u),
            k[1] * u - autocatalysis + spread(v),
        ]
    )


def problems():
    yield robertson, torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.04, 3e7, 1e4]), 40.0
    yield hires, HIRES_START, HIRES_RATES, 321.8122
    yield pollu, POLLU_START, pollu_rates(), 60.0
    for cells in (20, 50):
        x = torch.arange(cells) / cells
        start = torch.cat([1 + torch.sin(2 * math.pi * x) / 2, torch.full((cells,), 3.0)])
        yield line, start, torch.tensor([1.0, 3.0, 0.02]), 10.0


def measured(method, fun, start, rates, end):
    """Return the time of the values and that of the gradient, or nothing if it takes too long."""
    times, found = torch.linspace(end / 10, end, 10), []
    begin = time.process_time()

    def impatient(t, y, k):
        if time.process_time() - begin > LONGEST:
            raise TimeoutError
        return fun(t, y, k)

    for _ in range(3):
        k, begin = rates.clone().requires_grad_(), time.process_time()
        options = {} if method == "DOP853" else {"jac": "autodiff"}
        settings = {"t_eval": times, "rtol": 1e-6, "atol": 1e-9, "args": (k,), **options}
        try:
            with torch.no_grad():
                adjsim.solve_ivp(impatient, (0, end), start, method, **settings)
        except TimeoutError:
            return None
        values = time.process_time() - begin
        y = adjsim.solve_ivp(fun, (0, end), start, method, **settings).y
        begin = time.process_time()
        y.sum().backward()
        found.append((values, time.process_time() - begin))
    return tuple(min(x) for x in zip(*found, strict=True))


def main():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print(f"{'problem':>10} {'species':>7}" + "".join(f"{method:>18}" for method in METHODS))
    for fun, start, rates, end in problems():
        cells = []
        for method in METHODS:
            found = measured(method, fun, start, rates, end)
            text = f"> {LONGEST:.0f} s" if found is None else ""
            cells.append(text or f"{found[0]:.3f} s, {found[1] / found[0]:.1f} x")
        print(f"{fun.__name__:>10} {len(start):>7}" + "".join(f"{x:>18}" for x in cells))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
