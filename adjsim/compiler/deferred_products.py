"""Products that each iteration adds to a part of the carry, such as the gradient of a weight::

    C_n = C_{n-1} + A_n^T B_n

An iteration stores the factors A and B, and the products of several iterations are added together,
``C += [A_1; A_2; ...]^T [B_1; B_2; ...]``, which reads and writes C once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from adjsim.compiler.nests import PARALLEL_WORK
from adjsim.compiler.products import padded
from adjsim.compiler.teams import pragma
from adjsim.compiler.tracing import inserted
from adjsim.compiler.values import TYPES, Buffer, make_buffer, row_major

_ATEN = torch.ops.aten
# Sums of fewer rows or columns are computed where they are read.
SMALLEST = 8
# The inner length from which products of several iterations are added, and that of an iteration
# beyond which its factors would need more memory than the products save.
ENOUGH, LONGEST = 64, 256
# Rows of a product that a thread computes at a time.
BLOCK = 96
_VIEWS = frozenset(
    {
        _ATEN.view.default,
        _ATEN._unsafe_view.default,
        _ATEN.clone.default,
        _ATEN.transpose.int,
        _ATEN.permute.default,
        _ATEN.t.default,
        _ATEN.unsqueeze.default,
    }
)


class _Term(NamedTuple):
    """A matrix product that is added to others, and the views of it, the first of them first."""

    product: Any
    views: tuple[Node, ...]

    @property
    def kind(self) -> Any:
        """What the products of one sum have in common."""
        left, value = (x.meta["val"] for x in (self.product.args[0], self.product))
        views = [(x.target, x.args[1:]) for x in self.views]
        return *value.shape, left.shape[1], value.dtype, repr(views)


class DeferredProduct(NamedTuple):
    """The sum of ``terms`` products that each iteration adds to the part ``number`` of the carry.

    ``left`` and ``right`` are the shapes of the factors of a term: A ``(copies or 1, inner, rows)``
    and B ``(copies or 1, inner, columns)``, with a product for each of the copies.
    """

    number: int
    terms: int
    left: tuple[int, int, int]
    right: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def inner(self) -> int:
        """The length over which a product sums."""
        return self.left[1]

    @property
    def most(self) -> int:
        """The number of iterations whose products are added together."""
        return max(1, ENOUGH // (self.terms * self.inner))

    @property
    def pitch(self) -> int:
        """The length in memory of the rows of B, whole vectors."""
        return padded(self.right[2], self.dtype)

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers in memory of the factors of a term, by the name of their memory."""
        return {"lefts": math.prod(self.left), "rights": math.prod(self.right[:2]) * self.pitch}

    def is_shared(self, threads: int) -> bool:
        """Whether threads share the rows of the products."""
        copies = max(self.left[0], self.right[0])
        work = copies * self.left[2] * self.right[2] * self.inner * self.terms * self.most
        return threads > 1 and work >= PARALLEL_WORK

    def factors(self) -> list[Buffer]:
        """Return the buffers of the factors of an iteration, A and B of each term."""
        copies, inner, _ = self.right
        strides = (self.pitch * inner if copies > 1 else 0, self.pitch if inner > 1 else 0, 1)
        left = make_buffer("", self.dtype, self.left, row_major(self.left), fill=False)
        right = Buffer("", self.dtype, self.right, strides)
        return [
            replace(buffer, name=f"{name}{self.number}_{k}")
            for k in range(self.terms)
            for name, buffer in (("left", left), ("right", right))
        ]

    def stored(self) -> list[Buffer]:
        """Return the buffers of all factors that wait."""
        count = self.terms * self.most
        return [
            Buffer(f"{name}{self.number}", self.dtype, (count * size,), (1,))
            for name, size in self.sizes.items()
        ]

    def before_loop(self, total: str, threads: int) -> list[str]:
        """Print the function that adds the products that wait to the sum ``total``."""
        n, kind, shared = self.number, TYPES[self.dtype], self.is_shared(threads)
        (of_left, inner, rows), (of_right, _, columns) = self.left, self.right
        copies, terms = max(of_left, of_right), f"{self.terms} * waiting{n}"
        left, right = self.sizes.values()
        # Where the factors of all terms lie as those of one, it is one product.
        if inner == 1:
            lengths, terms, steps = terms, "1", (left, right)
        elif copies == 1:
            lengths, terms, steps = f"{inner} * {terms}", "1", (rows, self.pitch)
        else:
            lengths, steps = f"{inner}", (rows, self.pitch)
        at = [inner * rows if of_left > 1 else 0, inner * self.pitch if of_right > 1 else 0]
        if inner == 1 and copies == of_left:
            copies, rows = 1, copies * rows
        blocks = -(-rows // BLOCK)
        factors = [
            f"{rows} - m < {BLOCK} ? {rows} - m : {BLOCK}, {columns}, {lengths}",
            f"lefts{n} + {left} * e + {at[0]} * r + m, 1, {steps[0]}",
            f"rights{n} + {right} * e + {at[1]} * r, {steps[1]}, 1",
            f"{total} + {columns} * ({rows} * r + m), {columns}, 1",
        ]
        return [
            f"int64_t waiting{n} = 0;",
            *([f"Team adding{n};"] if shared else []),
            f"const auto add{n} = [&] {{",
            *([f"adding{n}.begun = omp_get_wtime();"] if shared else []),
            *pragma(threads if shared else 1, f"adding{n}"),
            f"for (int64_t b = 0; b < {copies * blocks}; ++b) {{",
            f"const int64_t r = b / {blocks}, m = b % {blocks} * {BLOCK};",
            f"for (int64_t e = 0; e < {terms}; ++e) products::product<{kind}, true>(",
            f"{', '.join(factors)}, nullptr, 0);",
            "}",
            *([f"adding{n}.iterated();"] if shared else []),
            f"waiting{n} = 0;",
            "};",
        ]

    def before_iteration(self) -> list[str]:
        """Print the addresses of the factors of an iteration."""
        n, kind = self.number, TYPES[self.dtype]
        places = [(*memory, k) for k in range(self.terms) for memory in self.sizes.items()]
        return [
            f"{kind}* {buffer.name} = {name}{n} + {size} * ({self.terms} * waiting{n} + {k});"
            for buffer, (name, size, k) in zip(self.factors(), places, strict=True)
        ]

    def after_iteration(self) -> str:
        """Print the sum of products, once there are enough."""
        return f"if (++waiting{self.number} == {self.most}) add{self.number}();"

    def after_loop(self) -> str:
        """Print the sum of the last products."""
        return f"if (waiting{self.number}) add{self.number}();"


def defer_products(body: GraphModule, carry: int) -> list[DeferredProduct]:
    """Take out of a graph the products that are all that it adds to a part of the carry.

    The graph no longer returns these parts, and returns the factors A and B of each product after
    its last output.
    """
    (output,) = body.graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])
    before = body.graph.find_nodes(op="placeholder")[1 : 1 + carry]
    found, kept, factors = list[DeferredProduct](), list[Node](), list[Node]()
    for number, (given, made) in enumerate(zip(before, results[1 : 1 + carry], strict=True)):
        terms = _added(given, made) if results.count(made) == 1 else []
        with body.graph.inserting_before(output):
            pairs = _factors(body, terms) if terms else []
        if not pairs:
            kept.append(made)
            continue
        a, b = (x.meta["val"] for x in pairs[0])
        shapes = tuple(a.shape), tuple(b.shape)
        found.append(DeferredProduct(number, len(pairs), *shapes, a.dtype))
        factors += [x for pair in pairs for x in pair]
    output.args = ([results[0], *kept, *results[1 + carry :], *factors],)
    body.recompile()
    return found


def _added(given: Node, made: Node) -> list[_Term]:
    """Return the products that an iteration adds to a part of the carry, if nothing else."""
    if made.target is _ATEN.clone.default and len(made.users) == 1:
        made = made.all_input_nodes[0]
    summands = _summands(made)
    if summands.count(given) != 1 or len(given.users) != 1:
        return []
    terms = [_term(x) for x in summands if x is not given]
    found = [x for x in terms if x is not None]
    if len(found) < len(terms) or len({x.kind for x in found}) != 1:
        return []
    product = found[0].product
    length = len(found) * product.args[0].meta["val"].shape[1]
    return found if min(product.meta["val"].shape) >= SMALLEST and length <= LONGEST else []


def _summands(node: Node) -> list[Node]:
    """Return the values that a nest of sums adds, in order."""
    values = [x.meta["val"] for x in node.all_input_nodes]
    like = node.meta["val"]
    is_sum = (
        node.target is _ATEN.add.Tensor
        and not node.kwargs
        and len(node.users) == 1
        and len(values) == 2
        and all((x.shape, x.dtype) == (like.shape, like.dtype) for x in values)
    )
    return [y for x in node.all_input_nodes for y in _summands(x)] if is_sum else [node]


def _term(node: Node) -> _Term | None:
    """Return the matrix product of which a summand is a view or a copy, which it alone reads."""
    views = list[Node]()
    while node.target in _VIEWS and len(node.users) == 1:
        views.insert(0, node)
        node = node.all_input_nodes[0]
    is_product = node.target is _ATEN.mm.default and len(node.users) == 1
    return _Term(node, tuple(views)) if is_product else None


def _factors(body: GraphModule, terms: Sequence[_Term]) -> list[tuple[Node, Node]]:
    """Return the factors of products whose sum lies in memory as the views of the products."""
    pairs, views = [term.product.args for term in terms], terms[0].views
    rows, columns = terms[0].product.meta["val"].shape
    left = [_of_copies(body, a) for a, _ in pairs]
    right = [_alone(body, b) for _, b in pairs]
    if len({x.meta["val"].shape for x in left}) > 1:
        left = [_alone(body, inserted(body, _ATEN.t.default, a)) for a, _ in pairs]
    if _are_dense(views, torch.empty(rows, columns, device="meta")):
        return list(zip(left, right, strict=True))
    copies, _, length = left[0].meta["val"].shape
    # Of each copy the transpose, (B^T A)^T.
    turned = torch.empty(copies, columns, length, device="meta").mT
    if copies == 1:
        turned = turned[0]
    elif views and tuple(views[0].meta["val"].shape) == (copies, length, columns):
        views = views[1:]
    else:
        return []
    return list(zip(right, left, strict=True)) if _are_dense(views, turned) else []


def _are_dense(views: Sequence[Node], product: Tensor) -> bool:
    """Whether views of a product in this memory have the order of the memory."""
    for view in views:
        target: Any = view.target
        if target is _ATEN.clone.default:
            continue
        try:
            of_memory = target is _ATEN._unsafe_view.default
            product = (_ATEN.view.default if of_memory else target)(product, *view.args[1:])
        except RuntimeError:
            return False
    return product.is_contiguous()


def _alone(body: GraphModule, x: Any) -> Node:
    """Return a matrix as that of one copy."""
    return inserted(body, _ATEN.unsqueeze.default, x, 0)


def _of_copies(body: GraphModule, x: Any) -> Node:
    """Return the transpose of a matrix as ``(copies, inner, rows)``.

    Under vmap a matrix is a copy of a tensor ``(copies, rows, inner)``, which is read in place.
    """
    if x.target in (_ATEN.view.default, _ATEN._unsafe_view.default):
        source = x.args[0]
        source = source.args[0] if source.target is _ATEN.clone.default else source
        value = source.meta["val"]
        if value.ndim == 3 and value.shape[-1] == x.meta["val"].shape[1]:
            return inserted(body, _ATEN.transpose.int, source, 1, 2)
    return _alone(body, inserted(body, _ATEN.t.default, x))
