"""The evaluation of forces, and of their products with cotangents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from adjsim.core.parameters import refuse_unknown
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.run_report import RunReport
from adjsim.potentials.base import ForceField, Forces
from adjsim.potentials.products import DeferredVJP, ParameterVJP, VJPSum


class LinearForce:
    """A force at a position, with one product, of the sum of the cotangents of its readers."""

    def __init__(self, evaluator: ForceEvaluator, position: Tensor, t: Any) -> None:
        self._evaluator, parameters = evaluator, list(evaluator.parameters.values())
        self.value, self._pullback = evaluator.forces.force_vjp(t, position, parameters)
        self.cotangent: Tensor | None = None

    def accumulate(self, cotangent: Tensor) -> None:
        """Add to the cotangent of the force."""
        self.cotangent = cotangent if self.cotangent is None else self.cotangent + cotangent

    def product(self) -> tuple[Tensor, list[DeferredVJP], dict[str, Tensor]]:
        """Take the product for the position; those for parameters are deferred, or by name."""
        cotangent, self.cotangent = self.cotangent, None
        assert cotangent is not None
        along, found = self._pullback(cotangent)
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
    """The force of one potential (None: no forces) for one run or sweep, once at each position.

    States are immutable, so the identity of a position tensor is its version. The last force is
    cached for its position, one that depends on time only where no time passes while the position
    stays (``one_time_per_position``). It is differentiated by the leaves ``parameters``. ``known``
    is a position with its force.
    """

    def __init__(
        self,
        potential: nn.Module | None,
        *,
        rounding: Rounding = UNROUNDED,
        one_time_per_position: bool = True,
        parameters: Mapping[str, Tensor] | None = None,
        known: tuple[Tensor, Tensor] | None = None,
        report: RunReport | None = None,
    ) -> None:
        self._forces = None if potential is None else Forces(potential, rounding)
        self.parameters = dict(parameters or {})
        self.report = RunReport() if report is None else report
        self._position, self._value = known if known is not None else (None, None)
        self._caches = one_time_per_position or not isinstance(potential, ForceField)
        self._linear: tuple[Tensor, LinearForce] | None = None

    @property
    def forces(self) -> Forces:
        """The forces of the potential; a TypeError without one."""
        if self._forces is None:
            raise TypeError("a term reads the force, and the dynamics has no potential.")
        return self._forces

    @property
    def potential(self) -> nn.Module:
        """The potential, as it is read."""
        return self.forces.potential

    def force(self, position: Tensor, t: Any) -> Tensor:
        """Evaluate the force at a position ``(*batch, atoms, dim)`` and a time."""
        if self._caches and self._linear is not None and self._linear[0] is position:
            return self._linear[1].value
        value = self.cached(position)
        if value is None:
            value = self.forces.force(t, position)
            self.count()
            count_backward(self.report, (value,))
            self._position, self._value = position, value
        return value

    def cached(self, position: Tensor) -> Tensor | None:
        """Return the force at a position if it is the last one that was evaluated."""
        return self._value if self._caches and self._position is position else None

    def linear(self, position: Tensor, t: Any) -> LinearForce:
        """Evaluate the force at a position and a time, ready to receive cotangents."""
        if not self._caches or self._linear is None or self._linear[0] is not position:
            self._linear = (position, LinearForce(self, position, t))
            self.count()
        return self._linear[1]

    def forget(self) -> None:
        """Drop the cached forces."""
        self._position = self._value = self._linear = None

    def count(self, passes: int = 1) -> None:
        """Add passes over the energy, or evaluations of a drift."""
        self.report.energy_evaluations += passes

    def refuse_unknown(self, output: Tensor, known: list[Tensor], what: str) -> None:
        """Refuse a value that depends on a tensor neither in ``known`` nor a parameter."""
        module = nn.Module() if self._forces is None else self._forces.potential
        refuse_unknown(output, module, [*self.parameters.values(), *known], what)


def count_backward(report: RunReport, values: Iterable[Tensor], passes: int = 1) -> None:
    """Count backpropagation through values, if there is any, as another pass, or as several."""

    # The hook refers to the report alone. A reference to the evaluator, which keeps the force,
    # would close a cycle through autograd's graph, which Python's garbage collector cannot see: the
    # graph of a whole run would never be freed.
    def count(grad: Tensor) -> None:
        report.energy_evaluations += passes

    tracked = next((x for x in values if x.requires_grad), None)
    if tracked is not None:
        tracked.register_hook(count)


def add_to(sums: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    """Add to an entry of a dictionary, which may be new."""
    sums[key] = sums[key] + value if key in sums else value
