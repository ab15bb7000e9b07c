"""Figures of comparisons, with one panel for each quantity, and of fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, NullLocator

from adjsim.estimators import GradientEstimate
from adjsim.estimators.compare import NOTHING_TO_PLOT, Comparison, norm_of, short_name
from adjsim.estimators.fit.fit import Fit

__all__ = ["plot_fit", "plot_sweep"]

MARKERS = "osD^v<>P"


@dataclass
class Panel:
    """One panel: its title, quantity and label with units, error bar, and scale."""

    title: str
    label: str
    number: Callable[[GradientEstimate], float | None]
    error: Callable[[GradientEstimate], float] | None = None
    scale: str = "linear"

    def bar(self, estimate: GradientEstimate) -> float:
        """Return two standard errors, or zero where there are none."""
        return 0.0 if self.error is None else 2 * self.error(estimate)


COSTS = [
    Panel("time", "time / s", lambda e: e.diagnostics["seconds"], scale="from zero"),
    Panel(
        "peak memory",
        "growth of memory / MB",
        lambda e: e.diagnostics["peak_memory"] / 1e6,
        scale="from zero",
    ),
]
RECONSTRUCTION = Panel(
    "reconstruction error",
    "relative error (0: exact)",
    lambda e: e.diagnostics["reconstruction_error"],
    scale="symlog",
)


def plot_sweep(
    comparisons: Mapping[float, Comparison], axis: str = "horizon", units: str = ""
) -> Figure:
    """Plot gradient (with two standard errors), error, time and memory of each method.

    Args:
        comparisons: by the quantity in which they differ, such as the horizon or the number of
            replicas. One comparison is drawn with a row for each method.
        axis: the name of this quantity, and its unit if it has one. "replicas" are drawn on a
            logarithmic axis.
        units: the units of the gradients, for their labels.

    Raises:
        ValueError: no method gave an estimate.
    """
    estimates = [e for comparison in comparisons.values() for e in comparison.estimates.values()]
    if not estimates:
        raise ValueError(NOTHING_TO_PLOT)
    parameters, unit = list(estimates[0].grad), f" ({units})" if units else ""
    panels = [_gradient(key, parameters, estimates, unit) for key in parameters]
    for key in parameters:
        error = _error_of(key)
        # Rows show the errors as bars, whose lengths are easy to compare.
        if len(comparisons) > 1 and any(error(e) > 0 for e in estimates):
            name = f"standard error of d/d {short_name(key, parameters)}"
            panels.append(Panel(name, f"standard error{unit}", error, scale="log"))
    lost = map(RECONSTRUCTION.number, estimates)
    if any(error is not None and error > 1e-6 for error in lost):
        panels.append(RECONSTRUCTION)
    panels += COSTS
    if len(comparisons) == 1:
        ((x, comparison),) = comparisons.items()
        return _rows(panels, f"{axis} = {x:g}", comparison)
    return _curves(panels, axis, comparisons)


def plot_fit(
    found: Fit,
    r: Sequence[float],
    title: str = "",
    densities: Sequence[Mapping[str, Any]] = (),
) -> Figure:
    """Plot the measured and the simulated radial distribution function, and their difference.

    Bands and bars are two standard errors.

    Args:
        found: the fit of the radial distribution function.
        r: its distances, in angstrom; none: densities alone are drawn.
        densities: records of densities, with the ``temperature`` (K) and the ``unit``, and the
            ``measured``, ``start`` and ``fitted`` ones with their errors, ``measured_stderr`` and
            so on. They are drawn against the temperature.
    """
    both = len(r) > 0 and len(densities) > 0
    size = (10.4 if both else 6.4, 5.2 if len(r) > 0 else 3.8)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(h_pad=0.06))
    beside = ["densities"] * (len(densities) > 0)
    rows: list[Any] = [[name] * (len(r) > 0) + beside for name in ("g", "difference")]
    axes = figure.subplot_mosaic(rows, height_ratios=[3, 1])
    if len(r) > 0:
        _draw_curves(axes["g"], axes["difference"], found, r)
    if len(densities) > 0:
        _draw_densities(axes["densities"], densities)
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_curves(top: Axes, bottom: Axes, found: Fit, r: Sequence[float]) -> None:
    simulated, measured = found.simulated.numpy(), found.target.numpy()
    band = 2 * found.simulated_stderr.numpy()
    if len(found.history) > 1:
        first = found.history[0].simulated.numpy()
        top.plot(r, first, color="0.6", ls="--", lw=1, label="simulated, start")
    bottom.axhline(0.0, color="0.7", lw=0.8)
    for axes, curve, label in (
        (top, simulated, "simulated, fit (± 2 standard errors)"),
        (bottom, simulated - measured, None),
    ):
        axes.fill_between(r, curve - band, curve + band, color="C0", alpha=0.3, lw=0)
        axes.plot(r, curve, color="C0", label=label)
    top.plot(r, measured, "k.", ms=5, label="measured")
    top.set(ylabel="g(r)")
    top.sharex(bottom)
    top.tick_params(labelbottom=False)
    top.legend(fontsize="small")
    bottom.set(xlabel="r / angstrom", ylabel="simulated\n- measured")


def _draw_densities(axes: Axes, densities: Sequence[Mapping[str, Any]]) -> None:
    for name, label, color, marker in (
        ("start", "simulated, start", "0.6", "s"),
        ("fitted", "simulated, fit", "C0", "o"),
        ("measured", "measured", "k", "."),
    ):
        x, y, errors = (
            [entry[key] for entry in densities] for key in ("temperature", name, f"{name}_stderr")
        )
        bars = [2 * error for error in errors]
        axes.errorbar(x, y, bars, ls="", capsize=3, label=label, color=color, marker=marker)
    axes.set(xlabel="temperature / K", ylabel=f"density / ({densities[0]['unit']})")
    axes.legend(fontsize="small")


def _assigned(
    panels: list[Panel],
    size: tuple[float, float],
    margin: tuple[float, float] = (0.0, 0.0),
    w_pad: float | None = None,
    **options: Any,
) -> tuple[Figure, list[tuple[Axes, Panel]]]:
    """Make a figure with axes of this size for each panel. On a page three columns can be read."""
    across = 2 if len(panels) in (2, 4) else min(len(panels), 3)
    down = math.ceil(len(panels) / across)
    figsize = (margin[0] + size[0] * across, margin[1] + size[1] * down)
    figure = Figure(figsize=figsize, layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=w_pad))
    every = list(figure.subplots(down, across, squeeze=False, **options).flat)
    for axes in every[len(panels) :]:
        axes.remove()
    return figure, list(zip(every, panels, strict=False))


def _curves(panels: list[Panel], axis: str, comparisons: Mapping[float, Comparison]) -> Figure:
    """Draw each panel against the quantity in which the comparisons differ."""
    figure, assigned = _assigned(panels, (3.6, 3.4), w_pad=0.1)
    for axes, panel in assigned:
        if axis == "replicas":
            axes.set_xscale("log")
        axes.set(xlabel=axis, ylabel=panel.label, title=panel.title)
        _draw(axes, panel, comparisons)
        if axis == "replicas":
            axes.set_xticks(list(comparisons), [f"{x:g}" for x in comparisons])
            axes.xaxis.set_minor_locator(NullLocator())
    figure.axes[0].legend(fontsize="small")
    return figure


def _rows(panels: list[Panel], title: str, comparison: Comparison) -> Figure:
    """Draw each panel of one comparison, with a row for each method, in the order of the table."""
    rows = comparison.ordered()
    kinds = [estimate.estimand for _, estimate in rows]
    borders = [i for i in range(1, len(rows)) if kinds[i] != kinds[i - 1]]
    labels = [f"{name} ({e.estimand})" if borders else name for name, e in rows]
    figure, assigned = _assigned(panels, (3.2, 1.0 + 0.36 * len(rows)), (1.4, 0.8), sharey=True)
    figure.suptitle(title)
    for axes, panel in assigned:
        ends: list[float] = []
        for i, (_, estimate) in enumerate(rows):
            value, error = panel.number(estimate), panel.bar(estimate)
            if value is None:
                continue
            bar = error if math.isfinite(error) else 0.0
            axes.errorbar(value, i, xerr=bar or None, ms=6, mfc="none", capsize=3, **_style(i))
            ends += [value - bar, value + bar]
        for i in borders:
            axes.axhline(i - 0.5, color="0.8", lw=0.8, zorder=0)
        axes.set(title=panel.title, xlabel=panel.label, ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), labels)
        if panel.scale == "log":
            axes.set_xscale("log")
        elif panel.scale == "symlog":
            axes.set_xscale("symlog", linthresh=1e-16)
            axes.set_xlim(-3e-17, 10 * max(1.0, *ends))
            axes.set_xticks([0, 1e-15, 1e-10, 1e-5, 1])
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            _readable(axes, ends, panel.scale == "from zero")
    return figure


def _readable(axes: Axes, ends: list[float], from_zero: bool) -> None:
    """Set few ticks, without an offset, and limits wide enough to hide rounding errors."""
    prune = "upper" if from_zero else "both"
    axes.xaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2, prune=prune))
    if from_zero:
        axes.set_xlim(0, 1.1 * max(ends, default=1.0) or 1.0)
    elif ends:
        low, high = min(ends), max(ends)
        size = max(abs(low), abs(high))
        if high - low < 1e-4 * size:
            axes.set_xlim(low - 1e-3 * size, high + 1e-3 * size)
    if ends and 1e-3 < max(abs(end) for end in ends) < 1e5:
        axes.ticklabel_format(axis="x", useOffset=False, style="plain")


def _style(i: int, **more: Any) -> dict[str, Any]:
    return {"marker": MARKERS[i % len(MARKERS)], "color": f"C{i}", **more}


def _gradient(
    key: str, parameters: list[str], estimates: list[GradientEstimate], unit: str
) -> Panel:
    slope, number, error = f"d/d {short_name(key, parameters)}", norm_of(key), _error_of(key)
    title = f"gradient {slope}"
    sizes = [abs(number(e)) for e in estimates if number(e) != 0]
    noisy = any(error(e) > 0 for e in estimates)
    # In chaos the gradient grows by decades, and its size matters more than its sign.
    if sizes and max(sizes) > 1e3 * min(sizes) and not noisy:
        return Panel(f"|{title}|", f"|{slope}|{unit}", lambda e: abs(number(e)), scale="log")
    label = f"{slope}\n± 2 standard errors" if noisy else slope
    return Panel(title, f"{label}{unit}", number, error)


def _draw(axes: Axes, panel: Panel, comparisons: Mapping[float, Comparison]) -> None:
    names = list(dict.fromkeys(name for c in comparisons.values() for name in c.estimates))
    for i, name in enumerate(names):
        found = [(x, c.estimates[name]) for x, c in comparisons.items() if name in c.estimates]
        points = [(x, value, e) for x, e in found if (value := panel.number(e)) is not None]
        xs, values = [x for x, _, _ in points], [value for _, value, _ in points]
        bars = [panel.bar(e) for _, _, e in points]
        style = _style(i, label=name)
        if any(bar > 0 for bar in bars):
            # Shifted, since error bars at one place would hide each other.
            shift = 0.02 * (i - (len(names) - 1) / 2)
            if axes.get_xscale() == "log":
                xs = [x * math.exp(3 * shift) for x in xs]
            else:
                span = max(comparisons) - min(comparisons) or 1.0
                xs = [x + shift * span for x in xs]
            axes.errorbar(xs, values, bars, capsize=2, ms=4, lw=1, **style)
        else:
            axes.plot(xs, values, ms=11 - 2.2 * (i % 4), mfc="none", mew=1.4, **style)
    if panel.scale == "log":
        axes.set_yscale("log")
    elif panel.scale == "symlog":
        axes.set_yscale("symlog", linthresh=1e-16)
        axes.set_ylim(bottom=-1e-17)
    elif panel.scale == "from zero":
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _error_of(key: str) -> Callable[[GradientEstimate], float]:
    """Return a function that computes the largest standard error over a parameter's entries."""
    return lambda estimate: float(estimate.grad_stderr[key].abs().max())
