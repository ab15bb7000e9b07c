"""Kernels of a GPU, which Triton compiles.

In exact runs, whose contributions are rounded before they are summed, products are not contracted
with sums, so that every kernel rounds the same number.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from adjsim.compiler import UnprintableError
from adjsim.core.layout import outside_tracing
from adjsim.core.lists_in_loops import listed_rows
from adjsim.core.neighbour_list import NearestImages
from adjsim.potentials.pairs.kernels.kernel import (
    ATOM,
    FUNCTION,
    NO_BOX,
    NUMBER,
    PRODUCT,
    SLOPES,
    TABLE,
    TILTED,
    Kernel,
    KernelSpec,
    PairInputs,
)
from adjsim.potentials.pairs.kernels.tiles import arguments_of, printed_formulas, source_of

# The pairs of a tile, its most columns, and the pairs of each warp of 32 threads. With two pairs a
# thread the sums of a product take 156 of 255 registers, so that three programs share a processor.
TILE, COLUMNS, EACH_WARP = 256, 128, 64
# The atoms whose neighbours a program sums, one for each thread.
LISTED_ROWS, THREADS = 64, 32


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


class TritonKernel(Kernel):
    """A kernel of a GPU, compiled by Triton when it is made."""

    by, slower_than_loops, lists_need_cutoff, sums_tables = ", by Triton", False, True, False

    def __init__(
        self, spec: KernelSpec, functions: Any, slope: Any, lookups: Sequence[int] = ()
    ) -> None:
        assert not lookups, "check() refuses gradients of functions"
        super().__init__(spec, source_of(spec, *functions), slope)
        try:
            with outside_tracing(), torch.no_grad():
                self(self._trial())
        # Triton raises errors of many classes: for a language that changes, an old card, or where
        # the C compiler of its launcher is missing. Each is the reason why torch sums the pairs.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            raise UnprintableError(
                f"Triton failed: {type(error).__name__}: {lines[-1][:200]}"
            ) from error

    def _trial(self) -> PairInputs:
        """Return the inputs of two atoms, by which the program is compiled, loaded and run."""
        spec = self.spec
        real: dict[str, Any] = {"dtype": spec.dtype, "device": spec.device}
        whole: dict[str, Any] = {"dtype": torch.int64, "device": spec.device}
        shapes = {NUMBER: (), TABLE: (2, 2), ATOM: (2,)}
        position = torch.zeros(1, 2, spec.dim, **real)
        position[:, 1] = 1.0
        rows = torch.eye(spec.dim, **real)
        return PairInputs(
            position=position,
            vector=position if spec.mode == PRODUCT else None,
            weight=torch.ones(1, **real),
            operands=[
                torch.ones(shapes.get(kind, (1, 1, length)), **real)
                for kind, length in zip(spec.kinds, spec.lengths, strict=True)
            ],
            box=None if spec.image == NO_BOX else rows if spec.image == TILTED else rows.sum(0),
            species=torch.zeros(2, **whole) if spec.has_species else None,
            exclusions=torch.arange(2, **whole)[None] if spec.excluded else None,
            spacing=torch.ones((), **real) if spec.rounds else None,
        )

    @staticmethod
    def tile_of(atoms: int, listed: bool) -> tuple[int, int]:
        if listed:
            return min(LISTED_ROWS, _power_of_two(atoms)), 1
        columns = min(COLUMNS, _power_of_two(atoms))
        return min(TILE // columns, _power_of_two(atoms)), columns

    @staticmethod
    def check(spec: KernelSpec) -> None:
        reasons = {
            "Triton is not installed": not has_triton(),
            "systems have boxes of their own": spec.strained is not None,
            "the gradient of a table is asked for": any(
                spec.kinds[k] in (TABLE, FUNCTION) for k in spec.gradients
            ),
        }
        reason = next((words for words, holds in reasons.items() if holds), None)
        if reason is not None:
            raise UnprintableError(reason)

    @staticmethod
    def printed(graph: GraphModule, spec: KernelSpec, chosen: Sequence[int] | None = None) -> Any:
        return printed_formulas(graph, spec, chosen)

    @functools.cached_property
    def program(self) -> Any:
        """The function of Triton."""
        # Triton reads the source of a function where tracebacks find it.
        name, lines = f"<adjsim {self.name}>", self.source.splitlines(keepends=True)
        linecache.cache[name] = len(self.source), None, lines, name
        found: dict[str, Any] = {"__name__": name}
        exec(compile(self.source, name, "exec"), found)
        return found["pairs"]

    @property
    def options(self) -> dict[str, Any]:
        """How it is compiled, beside the types of its arguments."""
        assert self.spec.tile is not None
        rows, columns = self.spec.tile
        return {
            "ROWS": rows,
            "COLUMNS": columns,
            "num_warps": max(1, rows * columns // (THREADS if columns == 1 else EACH_WARP)),
            "enable_fp_fusion": not self.spec.rounds,
        }

    def computed(self, shape: torch.Size, given: PairInputs) -> list[Tensor]:
        spec, flat = self.spec, given.position
        systems, atoms, _ = flat.shape
        results: dict[str, Tensor] = {
            f"to_{name}": flat.new_empty(flat.shape[: 2 if name == "energy" else 3])
            for name in spec.outputs
        }
        rows = {f"to_gradient{k}": flat.new_empty(systems, atoms) for k in spec.gradients}
        spacing, near, finite = given.spacing, dict[str, Tensor](), None
        if spec.skin is not None:
            assert spec.cutoff is not None
            listed = NearestImages(spec.cutoff, spec.skin, given.box, given.exclusions)
            neighbours, starts, finite = listed_rows(listed, flat)
            near = {"neighbours": neighbours, "starts": starts}
        known: dict[str, Any] = {
            **given._asdict(),
            **{f"operand{k}": x for k, x in enumerate(given.operands)},
            **(_by_atom(given.exclusions, atoms) if spec.excluded and not near else {}),
            **near,
            **results,
            **rows,
            "atoms": atoms,
            "kinds": next((len(x) for x in given.operands if x.ndim == 2), 1),
            "spacing_step": int(spacing is not None and spacing.numel() > 1),
            **_strides("position", flat),
            **({} if given.vector is None else _strides("vector", given.vector)),
        }
        tensors, numbers = arguments_of(spec)
        blocks = -(-atoms // self.options["ROWS"])
        with torch.cuda.device_of(flat):
            self.program[(systems * blocks,)](
                *(known[name] for name in (*tensors, *numbers)), **self.options
            )
        if finite is not None:
            # Systems that are not finite have no pairs.
            lost = flat.new_zeros(systems).masked_fill_(~finite, torch.nan)
            for x in (*results.values(), *rows.values()):
                x += lost.reshape(-1, *[1] * (x.ndim - 1))
        found = [
            0.5 * x.sum(-1).reshape(shape[:-2]) if name == "to_energy" else x.reshape(shape)
            for name, x in results.items()
        ]
        for k, row in zip(spec.gradients, rows.values(), strict=True):
            if spec.mode == SLOPES:
                assert given.weight is not None
                row = 0.5 * given.weight.reshape(-1, 1) * row
            total = row.sum(0) if spec.kinds[k] == ATOM else row.sum()
            found.append(total.reshape(given.operands[k].shape))
        return found


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _by_atom(exclusions: Any, atoms: int) -> dict[str, Tensor]:
    """Sort exclusions by atoms: the atoms excluded from pairs with each, and where they start."""
    pairs = torch.cat([exclusions, exclusions.flip(-1)])
    first, second = pairs[pairs[:, 0].argsort()].unbind(-1)
    own = torch.arange(atoms + 1, device=first.device)
    starts = torch.searchsorted(first.contiguous(), own)
    return {"excluded": second.contiguous(), "starts": starts}


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return dict(
        zip((f"{name}_{part}" for part in ("system", "atom", "axis")), x.stride(), strict=True)
    )
