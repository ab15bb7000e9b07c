"""The call of a kernel from a printed loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from adjsim.compiler.calls import (
    CALLS,
    Address,
    Call,
    address_of,
    dense_copy,
    in_order,
    pointer_to,
)
from adjsim.compiler.values import TYPES, UnprintableError, Value
from adjsim.potentials.pairs.kernels.kernel import KERNELS, OUTPUTS, PairInputs, pairs, text


class PairCall(Call):
    """The evaluation of a kernel, with the arguments of the operator as values."""

    def __init__(
        self, args: Sequence[Any], outputs: Sequence[torch.Tensor], store: Callable[..., None]
    ) -> None:
        *given, name = args
        x: Any = PairInputs(*given)
        self.kernel, self._store, self.batch = KERNELS[name], store, x.position.shape[:-2]
        reals = [x.position, x.vector, x.weight, x.box, x.spacing, *x.operands]
        dtypes = {value.dtype for value in reals if value is not None}
        integers = {value.dtype for value in (x.species, x.exclusions) if value is not None}
        if dtypes != {self.kernel.spec.dtype} or not integers <= {torch.int64}:
            raise UnprintableError("pairs of mixed types")
        fields: list[Any] = [self._field(value) for value in x[:2]]
        stored: list[Any] = [self._dense(value) for value in (x.weight, *x[4:], *x.operands)]
        (position, vector), (weight, box, species, exclusions, spacing, *operands) = fields, stored
        numbers = box, species, exclusions, spacing
        self.arguments: Any = PairInputs(position, vector, weight, operands, *numbers)
        found = (position, vector, weight, *numbers, *operands)
        self.inputs = tuple(value for value in found if value is not None)
        self.outputs = tuple(map(self.output, outputs))
        self.addresses = (self.kernel.address, *self.kernel.list_addresses)
        self.declarations = f"#define REAL {TYPES[self.kernel.spec.dtype]}\n{text('call.h')}"

    def lines(self, functions: Sequence[str]) -> list[str]:
        spec, x = self.kernel.spec, self.arguments
        names = OUTPUTS[spec.mode]
        results = dict(zip(names, self.outputs, strict=False))
        fields = {"position": x.position, "vector": x.vector, **results}
        energy = fields.pop("energy", None)
        pointers = {
            "box": x.box,
            "spacing": x.spacing,
            "weight": x.weight,
            "energy": energy,
            "species": x.species,
            "exclusions": x.exclusions,
        }
        members = {
            **spec.numbers(torch.Size(self.batch).numel(), x),
            **{name: self._view(y) for name, y in fields.items() if y is not None},
            **{name: pointer_to(y) for name, y in pointers.items() if y is not None},
            "operands": "operands",
            "gradients": "gradients",
            "acquire": f"(void* (*)(const Call*, int64_t, const List**)){functions[1]}",
            "release": f"(void (*)(void*)){functions[2]}",
        }
        return [
            "{",
            f"const REAL* operands[] = {{{_list(x.operands)}}};",
            f"REAL* gradients[] = {{{_list(self.outputs[len(names) :])}}};",
            "Call call = {};",
            *(f"call.{name} = {value};" for name, value in members.items()),
            f"const int status = ((int (*)(const Call*)){functions[0]})(&call);",
            "if (status) *refused = status;",
            "}",
        ]

    def _field(self, value: Value | None) -> Value | None:
        """Store a field ``(*batch, atoms, dim)`` so that its batch axes are one."""
        if value is None:
            return None
        address = address_of(value)
        if address is None or self._system_stride(address) is None:
            value = dense_copy(value, value.strides)
            self._store(value, fill=False)
        return value

    def _dense(self, value: Value | None) -> Value | None:
        """Store a value with its axes in order."""
        return None if value is None else in_order(value, self._store)

    def _system_stride(self, address: Address) -> int | None:
        """Return the distance of systems in memory; None if it is not the same for all."""
        axes = [(n, address.strides[a]) for a, n in enumerate(self.batch) if n > 1]
        for (_, outer), (n, inner) in pairwise(axes):
            if outer != n * inner:
                return None
        return axes[-1][1] if axes else 0

    def _view(self, value: Value) -> str:
        address = address_of(value)
        assert address is not None
        system = self._system_stride(address)
        if system is None:
            raise UnprintableError("pairs of systems that are not evenly spaced")
        strides = ", ".join(str(x) for x in (system, *address.strides[-2:]))
        return f"View{{(REAL*){address.pointer}, {strides}}}"


def _list(values: Iterable[Value]) -> str:
    return ", ".join([*map(pointer_to, values), "nullptr"])


CALLS[pairs._opoverload] = PairCall
