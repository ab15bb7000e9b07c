"""The evaluation of forces, and of their products with cotangents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.parameters import refuse_unknown
from adjsim.core.rounding import UNROUNDED_BOTH, Roundings
from adjsim.core.run_report import RunReport
from adjsim.potentials.base import ForceField, Forces
from adjsim.potentials.points import ForcesAt
from adjsim.potentials.products import DeferredVJP, ParameterVJP, VJPSum

# The fields of a state that forces depend on, and the forces along them: F, and W of a strain.
Point = Sequence[Tensor]
FORCE, STRAIN_FORCE = 0, 1


class LinearForce:
    """The forces at a point, with one product, of the sums of the cotangents of their readers."""

    def __init__(self, evaluator: ForceEvaluator, point: Point, t: Any) -> None:
        self._evaluator, parameters = evaluator, list(evaluator.parameters.values())
        self.values, self._pullback = evaluator.forces.vjp(t, point, parameters)
        self._cotangents: dict[int, Tensor] = {}

    @property
    def waits(self) -> bool:
        """Whether the product of cotangents is still to be taken."""
        return bool(self._cotangents)

    def accumulate(self, which: int, cotangent: Tensor) -> None:
        """Add to the cotangent of one of the forces."""
        add_to(self._cotangents, which, cotangent)

    def product(self) -> tuple[tuple[Tensor, ...], list[DeferredVJP], dict[str, Tensor]]:
        """Take the products for the point; those for parameters are deferred, or by name."""
        given, self._cotangents = self._cotangents, {}
        along, found = self._pullback(
            *(
                given[k] if k in given else torch.zeros_like(value)
                for k, value in enumerate(self.values)
            )
        )
        self._evaluator.count()
        deferred: list[DeferredVJP] = []
        grads: dict[str, Tensor] = {}
        for part in _flat(found):
            if isinstance(part, DeferredVJP):
                deferred.append(part)
                continue
            for name, grad in zip(self._evaluator.parameters, part, strict=True):
                if grad is not None:
                    add_to(grads, name, grad)
        return along, deferred, grads


def _flat(found: ParameterVJP) -> Iterator[DeferredVJP | list[Tensor | None]]:
    if isinstance(found, VJPSum):
        for term in found.terms:
            yield from _flat(term)
    else:
        yield found


class ForceEvaluator:
    """The forces of one potential (None: no forces) for one run or sweep, once at each point.

    A point is a position, or a position and the strain of its box. States are immutable, so the
    identity of a tensor is its version. The last forces are cached for their point, those that
    depend on time only where no time passes while the position stays (``one_time_per_position``).
    They are differentiated by the leaves ``parameters``. ``known`` is a point with its forces.
    """

    def __init__(
        self,
        potential: nn.Module | None,
        *,
        roundings: Roundings = UNROUNDED_BOTH,
        one_time_per_position: bool = True,
        parameters: Mapping[str, Tensor] | None = None,
        known: tuple[Point, tuple[Tensor, ...]] | None = None,
        report: RunReport | None = None,
    ) -> None:
        self._forces = None
        if potential is not None:
            self._forces = ForcesAt(Forces(potential, roundings.force), roundings)
        self.parameters = dict(parameters or {})
        self.report = RunReport() if report is None else report
        self._last = known
        self.caches = one_time_per_position or not isinstance(potential, ForceField)
        self._linear: tuple[Point, LinearForce] | None = None
        # The passes in autograd's graph whose backpropagation no hook counts yet.
        self._uncounted = 0

    @property
    def forces(self) -> ForcesAt:
        """The forces of the potential; a TypeError without one."""
        if self._forces is None:
            raise TypeError("a term reads the force, and the dynamics has no potential.")
        return self._forces

    @property
    def potential(self) -> nn.Module:
        """The potential, as it is read."""
        return self.forces.potential

    def values(self, point: Point, t: Any) -> tuple[Tensor, ...]:
        """Evaluate the forces at a point and a time."""
        if self.caches and self._linear is not None and _same(self._linear[0], point):
            return self._linear[1].values
        values = self.cached(point)
        if values is None:
            values = self.forces.values(t, point)
            self.count()
            self.record()
            self._last = point, values
        return values

    def cached(self, point: Point) -> tuple[Tensor, ...] | None:
        """Return the forces at a point if they are the last ones that were evaluated."""
        last = self._last
        return last[1] if self.caches and last is not None and _same(last[0], point) else None

    def linear(self, point: Point, t: Any) -> LinearForce:
        """Evaluate the forces at a point and a time, ready to receive cotangents."""
        if not self.caches or self._linear is None or not _same(self._linear[0], point):
            self._linear = (point, LinearForce(self, point, t))
            self.count()
        return self._linear[1]

    def forget(self) -> None:
        """Drop the cached forces."""
        self._last = self._linear = None

    def count(self, passes: int = 1) -> None:
        """Add passes over the energy, or evaluations of a drift."""
        self.report.energy_evaluations += passes

    def record(self, passes: int = 1) -> None:
        """Note passes of a run, if autograd may go back through them."""
        if torch.is_grad_enabled():
            self._uncounted += passes

    def count_backward(self, values: Iterable[Tensor]) -> None:
        """Count backpropagation through values as the passes noted since the last call."""
        passes, self._uncounted = self._uncounted, 0
        if passes:
            count_backward(self.report, values, passes)

    def refuse_unknown(self, output: Tensor, known: list[Tensor], what: str) -> None:
        """Refuse a value that depends on a tensor neither in ``known`` nor a parameter."""
        module = nn.Module() if self._forces is None else self._forces.potential
        refuse_unknown(output, module, [*self.parameters.values(), *known], what)


def _same(one: Point, other: Point) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def count_backward(report: RunReport, values: Iterable[Tensor], passes: int = 1) -> None:
    """Count backpropagation through any of the values as another pass, or as several."""

    # The hook refers to the report alone. A reference to the evaluator, which keeps the force,
    # would close a cycle through autograd's graph, which Python's garbage collector cannot see: the
    # graph of a whole run would never be freed.
    def count(grad: Tensor) -> None:
        report.energy_evaluations += passes

    tracked = [x for x in values if x.requires_grad]
    if len(tracked) == 1:
        tracked[0].register_hook(count)
    elif tracked:
        torch.autograd.graph.register_multi_grad_hook(tracked, count, mode="any")


def add_to(sums: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    """Add to an entry of a dictionary, which may be new."""
    sums[key] = sums[key] + value if key in sums else value
