"""Potentials whose parameters are functions of time: actuators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adjsim.core.derived import has_values, own_tensors, replaced
from adjsim.core.layout import is_tracing, materialise_contiguous
from adjsim.core.parameters import check_numbers, refuse_unknown
from adjsim.core.reading import read
from adjsim.core.rounding import UNROUNDED, Rounding
from adjsim.core.typing import Energies, Positions
from adjsim.potentials.base import ForceField, force, force_vjp, with_energy
from adjsim.potentials.evaluated import as_module
from adjsim.potentials.products import ParameterVJP, Pullback, Tensors, VJPSum


class Actuated(ForceField):
    """The force of a potential whose parameters follow signals, ``F(t, q) = -dU/dq (q; x(t))``.

    Muscles are rest shapes or rest lengths that depend on time::

        Actuated(NeoHookean(mesh, 1e5, 0.3, rest_stretch=torch.ones(3)), rest_stretch=signal)
        Actuated(HarmonicBond(index, 10.0, length=1.0), length=signal)

    Gradients reach the numbers of the signals and the other parameters of the potential, in closed
    form where the potential has one. The energy is not conserved, since actuators do work.

    A value outside of the range of its parameter stops a run at the step where it is reached. A
    condition between several numbers, such as a radius within the reach of a list of neighbours, is
    checked in each step that is not compiled, and at the start of each compiled run.

    Args:
        potential: an energy module. The parameters that signals replace are numbers without a
            gradient; their values are not read.
        signals: for each parameter, by its name in the potential, a module that maps a time to a
            value, such as a :class:`Signal`, of a shape that broadcasts to that of the parameter.

    Raises:
        TypeError: a potential without an energy, a signal that is not a module.
        ValueError: no signals, a name that is no parameter of the potential itself, a parameter
            that is None or requires grad, a value of another shape.
    """

    def __init__(self, potential: nn.Module, **signals: nn.Module) -> None:
        super().__init__()
        self.potential = with_energy(potential)
        if not signals:
            raise ValueError(
                "Actuated needs a signal for at least one parameter, such as length=signal."
            )
        self.signals = nn.ModuleDict({name: as_module(name, x) for name, x in signals.items()})
        self.validate()
        with torch.no_grad():
            self._values(0.0)

    def forward(self, t: Any, position: Positions) -> Positions:
        return self.force(t, position)

    def energy(self, t: Any, position: Positions) -> Energies:
        """Compute the energy of the potential at a time, ``(*batch,)``."""
        return self._driven(self._values(t))(position)

    def force(self, t: Any, position: Positions, rounding: Rounding = UNROUNDED) -> Positions:
        return force(self._driven(self._values(t)), position, rounding=rounding)

    def force_vjp(
        self, t: Any, position: Positions, parameters: Tensors, rounding: Rounding = UNROUNDED
    ) -> tuple[Tensor, Pullback]:
        with torch.enable_grad():
            values = self._values(t)
        for name, x in values.items():
            what = f"the signal of {name} of {type(self.potential).__name__}"
            refuse_unknown(x, self, parameters, what)
        leaves = {name: x.detach().requires_grad_(x.requires_grad) for name, x in values.items()}
        wanted = [name for name, x in values.items() if x.requires_grad]
        known = [*parameters, *(leaves[name] for name in wanted)]
        value, inner = force_vjp(self._driven(leaves), position, known, rounding=rounding)

        def pullback(v: Tensor) -> tuple[Tensor, ParameterVJP]:
            along, found = inner(v)
            grads = found if isinstance(found, list) else found.gradient(known)
            direct, cotangents = grads[: len(parameters)], grads[len(parameters) :]
            driven = [values[n] for n, x in zip(wanted, cotangents, strict=True) if x is not None]
            if not driven or not parameters:
                return along, direct
            given = [x for x in cotangents if x is not None]
            through = torch.autograd.grad(driven, list(parameters), given, allow_unused=True)
            return along, VJPSum((direct, list[Tensor | None](through)))

        return value, pullback

    def validate(self) -> None:
        """Refuse to replace a parameter that is trained."""
        for name in self.signals:
            if self._replaced(name).requires_grad:
                raise ValueError(
                    f"{name} of {type(self.potential).__name__} requires grad, and a signal "
                    "replaces it: give the potential a number, and train the signal."
                )

    def _replaced(self, name: str) -> Tensor:
        """Return the parameter of the potential that a signal replaces."""
        potential, kind = self.potential, type(self.potential).__name__
        # Buffers that are not saved, such as volumes, follow from the arguments.
        derived, own = potential._non_persistent_buffers_set, own_tensors(potential)
        numbers = {k: x for k, x in own.items() if x.is_floating_point() and k not in derived}
        if name in numbers:
            return numbers[name]
        if getattr(potential, name, False) is None:
            raise ValueError(
                f"{name} of {kind} is None: give it a number of the shape of the signal, such as "
                "torch.ones(...), which the signal replaces."
            )
        raise ValueError(
            f"{name} is no parameter of {kind} that a signal can replace; these are "
            f"{', '.join(numbers) or 'none'}. For a part of a sum actuate the part: "
            "Actuated(part, ...) + rest."
        )

    def _values(self, t: Any) -> dict[str, Tensor]:
        """Compute the values of the signals at a time."""
        values: dict[str, Tensor] = {}
        for name, signal in self.signals.items():
            x, shape = signal(t), self._replaced(name).shape
            try:
                x = x.expand(shape)
            except RuntimeError as error:
                raise ValueError(
                    f"the signal of {name} gives shape {tuple(x.shape)}, and {name} of "
                    f"{type(self.potential).__name__} has shape {tuple(shape)}: give the "
                    "potential a value of the shape of the signal."
                ) from error
            rule = vars(self.potential).get("_rules", {}).get(name)
            if rule is not None and not has_values():
                # NaN stops a compiled loop, and its steps are then repeated one by one.
                x = rule.marked(x)
            values[name] = materialise_contiguous(x) if is_tracing() else x
        return values

    def _driven(self, values: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of the potential with these values of its parameters."""
        twin = replaced(read(self.potential), values)
        if has_values():
            check_numbers(twin)
        return twin
