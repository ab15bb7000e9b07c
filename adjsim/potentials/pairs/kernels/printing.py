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
from adjsim.potentials.pairs.kernels.kernel import (
    ENERGY,
    FORCE,
    KERNELS,
    PRODUCT,
    table_size,
    text,
    thread_count,
)
from adjsim.potentials.pairs.kernels.operator import pairs


class PairCall(Call):
    """The evaluation of a kernel.

    Args:
        args: the arguments of :func:`~adjsim.potentials.pairs.kernels.operator.pairs`, as values.
        outputs: examples of its outputs.
        store: stores a value.
    """

    def __init__(
        self, args: Sequence[Any], outputs: Sequence[torch.Tensor], store: Callable[..., None]
    ) -> None:
        position, vector, weight, operands, box, species, exclusions, spacing, name = args
        self.kernel = KERNELS[name]
        self.batch, (self.atoms, self.dim) = position.shape[:-2], position.shape[-2:]
        self._store = store
        self.systems = torch.Size(self.batch).numel()
        self.position, self.vector = self._field(position), self._field(vector)
        rest = [weight, box, spacing, *operands]
        self.weight, self.box, self.spacing, *self.operands = map(self._dense, rest)
        self.species, self.exclusions = self._dense(species), self._dense(exclusions)
        dtypes = {x.dtype for x in (position, vector, *rest) if x is not None}
        integers = {x.dtype for x in (species, exclusions) if x is not None}
        if dtypes != {self.kernel.spec.dtype} or not integers <= {torch.int64}:
            raise UnprintableError("pairs of mixed types")
        numbers = [self.species, self.exclusions]
        used = [self.position, self.vector, self.weight, self.box, self.spacing, *numbers]
        self.inputs = tuple(x for x in (*used, *self.operands) if x is not None)
        self.outputs = tuple(map(self.output, outputs))
        self.addresses = (self.kernel.address, *self.kernel.list_addresses)
        self.declarations = f"#define REAL {TYPES[self.kernel.spec.dtype]}\n{text('call.h')}"

    def lines(self, functions: Sequence[str]) -> list[str]:
        layout = self.kernel.spec
        outputs = iter(self.outputs)
        pairs_of_atoms = self.systems * self.atoms * (self.atoms if layout.skin is None else 64)
        members = {
            "systems": self.systems,
            "atoms": self.atoms,
            "dim": self.dim,
            "threads": thread_count(pairs_of_atoms),
            "image": layout.image,
            "position": self._view(self.position),
            "vector": self._view(self.vector),
            "force": self._view(next(outputs) if layout.mode in (FORCE, PRODUCT) else None),
            "product": self._view(next(outputs) if layout.mode == PRODUCT else None),
            "box": _pointer(self.box),
            "spacing": _pointer(self.spacing),
            "spacing_step": int(self.spacing is not None and self.spacing.numel > 1),
            "weight": _pointer(self.weight),
            "energy": _pointer(next(outputs) if layout.mode == ENERGY else None),
            "operands": "operands",
            "gradients": "gradients",
            "species": _pointer(self.species),
            "kinds": table_size(layout, self.operands),
            "cutoff": repr(layout.cutoff or 0.0),
            "skin": repr(layout.skin or 0.0),
            "acquire": f"(void* (*)(const Call*, int64_t, const List**)){functions[1]}",
            "release": f"(void (*)(void*)){functions[2]}",
            "exclusions": _pointer(self.exclusions),
            "excluded": 0 if self.exclusions is None else self.exclusions.shape[0],
        }
        return [
            "{",
            f"const REAL* operands[] = {{{_list(self.operands)}}};",
            f"REAL* gradients[] = {{{_list(outputs)}}};",
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

    def _view(self, value: Value | None) -> str:
        if value is None:
            return "View{}"
        address = address_of(value)
        assert address is not None
        system = self._system_stride(address)
        if system is None:
            raise UnprintableError("pairs of systems that are not evenly spaced")
        strides = ", ".join(str(x) for x in (system, *address.strides[-2:]))
        return f"View{{(REAL*){address.pointer}, {strides}}}"


def _pointer(value: Value | None) -> str:
    return "nullptr" if value is None else pointer_to(value)


def _list(values: Iterable[Value | None]) -> str:
    return ", ".join([*map(_pointer, values), "nullptr"])


CALLS[pairs._opoverload] = PairCall
