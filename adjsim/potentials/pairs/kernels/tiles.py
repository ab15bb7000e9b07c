"""Sums over all pairs in tiles, for a GPU: printed from formulas as programs of Triton.

A program sums the pairs of some atoms i, the rows of its tiles, with all atoms j, the columns, of
which it takes one tile after another::

    F_i = sum_j -2 u'(s_ij) d_ij,     and the other sums of :mod:`adjsim.potentials.pairs.dense`

Each pair is visited at both of its atoms, so no two programs add to one number: sums have the same
bits in every run, and the memory is that of the atoms.

With a neighbour list the columns are the neighbours of each atom, in the order of their numbers.
Tiles have one column then, so each atom sums its neighbours in this order. A pair beyond the cutoff
adds zero, so sums have the same bits whatever the list holds beside the pairs within the cutoff.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule

from adjsim.compiler import TRITON, print_formulas, triton_type
from adjsim.potentials.pairs.kernels.kernel import (
    ATOM,
    FUNCTION,
    NO_BOX,
    NUMBER,
    ORTHOGONAL,
    PRODUCT,
    TABLE,
    TILTED,
    KernelSpec,
)

# The loops over all atoms, and over the neighbours of each.
ALL = (
    "for start in range(0, atoms, COLUMNS):",
    "    j = start + tl.arange(0, COLUMNS)[None, :]",
    "    is_column = j < atoms",
)
LISTED = (
    "for start in range(0, most, COLUMNS):",
    "    place = start + tl.arange(0, COLUMNS)[None, :]",
    "    is_column = place < count",
    "    j = tl.load(neighbours + begin + place, mask=is_column, other=0) - system * atoms",
)
# Adding this number, and subtracting it, rounds to an integer.
_SHIFT = {torch.float64: 1.5 * 2.0**52, torch.float32: 1.5 * 2.0**23}


def arguments_of(spec: KernelSpec) -> tuple[list[str], list[str]]:
    """Return the names of a program's arguments: of tensors, and of numbers."""
    fields = ("position", "vector") if spec.mode == PRODUCT else ("position",)
    used = {
        "box": spec.image != NO_BOX,
        "species": TABLE in spec.kinds and spec.has_species,
        "spacing": spec.rounds,
        "neighbours": spec.skin is not None,
        "excluded": spec.excluded and spec.skin is None,
        "starts": spec.excluded or spec.skin is not None,
    }
    tensors = [
        *fields,
        *(name for name in used if used[name]),
        *(f"operand{k}" for k in range(len(spec.kinds))),
        *(f"to_{name}" for name in spec.outputs),
        *(f"to_gradient{k}" for k in spec.gradients),
    ]
    strides = (f"{field}_{part}" for field in fields for part in ("system", "atom", "axis"))
    return tensors, ["atoms", "kinds", "spacing_step", *strides]


def printed_formulas(
    graph: GraphModule, spec: KernelSpec, chosen: Sequence[int] | None
) -> tuple[list[str], list[str]]:
    """Print the chosen formulas of a trace as statements, and the expressions of their values."""

    def inputs() -> Iterator[str]:
        yield "s"
        for k, kind in enumerate(spec.kinds):
            yield f"operand{k}" if kind == FUNCTION else f"p{k}"
            if kind == ATOM:
                yield f"q{k}"

    return print_formulas(graph, spec.dtype, chosen, inputs(), TRITON)


def source_of(spec: KernelSpec, formulas: list[str], values: list[str]) -> str:
    """Write the source of a program around its formulas."""
    real, axes = triton_type(spec.dtype), range(spec.dim)
    shift = f"tl.full([1, 1], {_SHIFT[spec.dtype]!r}, {real})"
    # What is computed before the loop over tiles, in the loop, and what a pair adds to each sum.
    once: list[str] = []
    each: list[str] = []
    adds: dict[str, str] = {}

    def differences(name: str, field: str) -> None:
        for a in axes:
            first = f"{field} + system * {field}_system + {a} * {field}_axis"
            row, column = (f"{first} + {x} * {field}_atom" for x in "ij")
            once.append(f"{field}{a} = tl.load({row}, mask=is_row, other=0.0)")
            other = f"tl.load({column}, mask=is_column, other=0.0)"
            each.append(f"{name}{a} = {field}{a} - {other}")

    differences("d", "position")
    if spec.image != NO_BOX:
        once.append(f"shift = {shift}")
    if spec.image == ORTHOGONAL:
        for a in axes:
            once += [f"length{a} = tl.load(box + {a})", f"inverse{a} = 1 / length{a}"]
            turns = f"(d{a} * inverse{a} + shift) - shift"
            each.append(f"d{a} = d{a} - length{a} * ({turns})")
    elif spec.image == TILTED:
        _move_in_tilted_box(spec.dim, once, each)
    each.append(f"s = {' + '.join(f'd{a} * d{a}' for a in axes)}")
    _load_operands(spec, once, each)
    each += [*formulas, "is_pair = (i != j) & is_row & is_column"]
    if spec.cutoff is not None:
        once.append(f"cutoff = tl.full([1, 1], {spec.cutoff**2!r}, {real})")
        each.append("is_pair = is_pair & (s < cutoff)")
    if spec.excluded or spec.skin is not None:
        # Neighbours of atom i, or atoms excluded from pairs with it, are number starts[i] to
        # starts[i + 1] of a list. Neighbours are numbered one system after another.
        own = "i" if spec.skin is None else "system * atoms + i"
        once += [
            f"begin = tl.load(starts + {own}, mask=is_row, other=0)",
            f"count = tl.load(starts + {own} + 1, mask=is_row, other=0) - begin",
            "most = tl.max(count)",
        ]
    if spec.excluded and spec.skin is None:
        each += [
            "for k in range(0, most):",
            "    is_pair &= j != tl.load(excluded + begin + k, mask=k < count, other=-1)",
        ]
    sums, factor = list(values), ""
    if "force" in spec.outputs:
        each.append(f"weight = -2 * tl.where(is_pair, {sums.pop(0)}, 0.0)")
        parts = {a: f"weight * d{a}" for a in axes}
        if spec.rounds:
            once.append(f"grid = tl.load(spacing + system * spacing_step) * {shift}")
            parts = {a: f"({part} + grid) - grid" for a, part in parts.items()}
        adds |= {f"force{a}": part for a, part in parts.items()}
    if "product" in spec.outputs:
        differences("w", "vector")
        each.append(f"dw = {' + '.join(f'd{a} * w{a}' for a in axes)}")
        each.append(f"curvature = -4 * tl.where(is_pair, {sums.pop(0)}, 0.0) * dw")
        adds |= {f"product{a}": f"curvature * d{a} + weight * w{a}" for a in axes}
        factor = "-dw * "
    fields = {name: name.rstrip("012") for name in adds}
    numbers = [x for x in spec.outputs if x == "energy"]
    for name, x in zip([*numbers, *(f"gradient{k}" for k in spec.gradients)], sums, strict=True):
        adds[name] = f"tl.where(is_pair, {factor}{x}, 0.0)"

    def stored(name: str) -> str:
        place = f"to_{name} + system * atoms + i"
        if name in fields:
            place = f"to_{fields[name]} + (system * atoms + i) * {spec.dim} + {name[-1]}"
        return f"tl.store({place}, tl.sum({name}, 1)[:, None], mask=is_row)"

    tensors, others = arguments_of(spec)
    return "\n".join(
        [
            "import triton",
            "import triton.language as tl",
            "from triton.language.extra import libdevice",
            "",
            # The first call, before a CUDA graph is captured, compiles what later calls run.
            f"@triton.jit(do_not_specialize={others}, do_not_specialize_on_alignment={tensors})",
            f"def pairs({', '.join([*tensors, *others])}, ROWS: tl.constexpr,"
            " COLUMNS: tl.constexpr):",
            "    blocks = tl.cdiv(atoms, ROWS)",
            "    system = tl.cast(tl.program_id(0) // blocks, tl.int64)",
            "    i = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)[:, None]",
            "    is_row = i < atoms",
            *(f"    {line}" for line in once),
            *(f"    {name} = tl.zeros([ROWS, COLUMNS], {real})" for name in adds),
            *(f"    {line}" for line in (ALL if spec.skin is None else LISTED)),
            *(f"        {line}" for line in each),
            *(f"        {name} += {part}" for name, part in adds.items()),
            *(f"    {stored(name)}" for name in adds),
            "",
        ]
    )


def _move_in_tilted_box(dim: int, once: list[str], each: list[str]) -> None:
    """Write the statements that move differences to nearest images, as those of ``rows.cpp``."""
    axes = range(dim)
    once += [f"row{a}{b} = tl.load(box + {a * dim + b})" for a in axes for b in axes]
    normals = [["1"]] if dim == 1 else [["row11", "-row10"], ["-row01", "row00"]]
    if dim == 3:
        others = [((x + 1) % 3, (x + 2) % 3) for x in axes]
        normals = [
            [f"(row{p}{d} * row{q}{e} - row{p}{e} * row{q}{d})" for d, e in others]
            for p, q in others
        ]
    once.append(f"size = {' + '.join(f'row0{b} * {normals[0][b]}' for b in axes)}")
    once += [f"fraction{a}{b} = {normals[a][b]} / size" for a in axes for b in axes]
    for a in axes:
        total = " + ".join(f"d{b} * fraction{a}{b}" for b in axes)
        each.append(f"turns{a} = ({total} + shift) - shift")
    moved = (" + ".join(f"turns{a} * row{a}{b}" for a in axes) for b in axes)
    each += [f"d{b} = d{b} - ({x})" for b, x in enumerate(moved)]


def _load_operands(spec: KernelSpec, once: list[str], each: list[str]) -> None:
    """Write the statements that load the operands of pairs."""
    if TABLE in spec.kinds:
        for lines, place, within in ((once, "i", "is_row"), (each, "j", "is_column")):
            species = f"tl.load(species + {place}, mask={within}, other=0)"
            lines.append(f"kind_{place} = {species if spec.has_species else place}")
            lines.append(f"known_{place} = (kind_{place} >= 0) & (kind_{place} < kinds)")
    for k, kind in enumerate(spec.kinds):
        if kind == NUMBER:
            once.append(f"p{k} = tl.load(operand{k})")
        elif kind == TABLE:
            # A species without a row has no number.
            entry = f"operand{k} + kind_i * kinds + kind_j, mask=known_i & known_j"
            each.append(f'p{k} = tl.load({entry}, other=float("nan"))')
        elif kind == ATOM:
            once.append(f"p{k} = tl.load(operand{k} + i, mask=is_row, other=0.0)")
            each.append(f"q{k} = tl.load(operand{k} + j, mask=is_column, other=0.0)")
