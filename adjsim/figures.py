"""Figures of comparisons, with one panel for each quantity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from adjsim.compare import NOTHING_TO_PLOT, Comparison, norm_of, short_name
from adjsim.estimators import GradientEstimate

MARKERS = "osD^v<>P"


@dataclass
class Panel:
    """One panel: its title, quantity, error bar, scale, and exact values."""

    title: str
    number: Callable[[GradientEstimate], float | None]
    error: Callable[[GradientEstimate], float] | None = None
    scale: str = "linear"
    exact: dict[float, float] = field(default_factory=dict)


def plot_sweep(
    comparisons: Mapping[float, Comparison],
    axis: str = "horizon",
    exact: Mapping[float, Mapping[str, float]] | None = None,
) -> Figure:
    """Plot gradient (with two standard errors), error, time and memory of each method.

    Args:
        comparisons: by their value on the x-axis, such as the horizon or the number of replicas.
        axis: label of the x-axis, with its unit if it has one. The axis of "replicas" is
            logarithmic.
        exact: exact gradients, by value on the x-axis and by parameter, drawn as a line.

    Raises:
        ValueError: no method gave an estimate.
    """
    if not any(comparison.estimates for comparison in comparisons.values()):
        raise ValueError(NOTHING_TO_PLOT)
    estimates = [e for comparison in comparisons.values() for e in comparison.estimates.values()]
    names = list(
        dict.fromkeys(name for comparison in comparisons.values() for name in comparison.estimates)
    )
    parameters = list(estimates[0].grad)
    panels = [_gradient(key, parameters, estimates, exact or {}) for key in parameters]
    for key in parameters:
        error = _error_of(key)
        if any(error(e) > 0 for e in estimates):
            panels.append(
                Panel(f"standard error of d/d {short_name(key, parameters)}", error, scale="log")
            )
    errors = [e.diagnostics["reconstruction_error"] for e in estimates]
    if any(error is not None and error > 1e-6 for error in errors):
        title = "reconstruction error (0: exact)"
        panels.append(Panel(title, lambda e: e.diagnostics["reconstruction_error"], scale="symlog"))
    panels.append(Panel("time / s", lambda e: e.diagnostics["seconds"], scale="from zero"))
    panels.append(
        Panel("peak memory / MB", lambda e: e.diagnostics["peak_memory"] / 1e6, scale="from zero")
    )
    figure = Figure(figsize=(3.4 * len(panels), 3.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if axis == "replicas":
            axes.set_xscale("log")
        axes.set_xlabel(axis)
        _draw(axes, panel, comparisons, names)
        if axis == "replicas":
            axes.set_xticks(list(comparisons), [f"{x:g}" for x in comparisons])
            axes.xaxis.set_minor_locator(NullLocator())
    figure.axes[0].legend(fontsize="small")
    return figure


def _gradient(
    key: str,
    parameters: list[str],
    estimates: list[GradientEstimate],
    exact: Mapping[float, Mapping[str, float]],
) -> Panel:
    title, number, error = (
        f"gradient d/d {short_name(key, parameters)}",
        norm_of(key),
        _error_of(key),
    )
    sizes = [abs(number(e)) for e in estimates if number(e) != 0]
    # In chaos the gradient grows by orders of magnitude, and its size matters more than its sign.
    if sizes and max(sizes) > 1e3 * min(sizes) and not any(error(e) > 0 for e in estimates):
        return Panel(f"|{title}|", lambda e: abs(number(e)), scale="log")
    return Panel(
        title, number, error, exact={x: grads[key] for x, grads in exact.items() if key in grads}
    )


def _draw(
    axes: Axes, panel: Panel, comparisons: Mapping[float, Comparison], names: list[str]
) -> None:
    for i, name in enumerate(names):
        found = [(x, c.estimates[name]) for x, c in comparisons.items() if name in c.estimates]
        points = [(x, value, e) for x, e in found if (value := panel.number(e)) is not None]
        xs, values = [x for x, _, _ in points], [value for _, value, _ in points]
        bars = [2 * panel.error(e) for _, _, e in points] if panel.error is not None else []
        style: dict[str, Any] = {
            "marker": MARKERS[i % len(MARKERS)],
            "color": f"C{i}",
            "label": name,
        }
        if any(bar > 0 for bar in bars):
            # Shifted, since error bars at one place would hide each other.
            shift = 0.02 * (i - (len(names) - 1) / 2)
            span = max(comparisons) - min(comparisons) or 1.0
            xs = [
                x * math.exp(3 * shift) if axes.get_xscale() == "log" else x + shift * span
                for x in xs
            ]
            axes.errorbar(xs, values, bars, capsize=2, ms=4, lw=1, **style)
        else:
            axes.plot(xs, values, ms=11 - 2.2 * (i % 4), mfc="none", mew=1.4, **style)
    if panel.exact:
        line: dict[str, Any] = {"color": "k", "ls": "--", "lw": 1, "label": "exact"}
        xs = sorted(panel.exact)
        if len({panel.exact[x] for x in xs}) == 1:
            axes.axhline(panel.exact[xs[0]], **line)
        else:
            axes.plot(xs, [panel.exact[x] for x in xs], **line)
    axes.set_title(panel.title)
    if panel.scale == "log":
        axes.set_yscale("log")
    elif panel.scale == "symlog":
        axes.set_yscale("symlog", linthresh=1e-16)
        axes.set_ylim(bottom=-1e-17)
    elif panel.scale == "from zero":
        axes.set_ylim(bottom=0)


def _error_of(key: str) -> Callable[[GradientEstimate], float]:
    """Return a function that computes the largest standard error over a parameter's entries.

    It returns NaN where there is no standard error.
    """
    return lambda estimate: float(estimate.grad_stderr[key].abs().max())
