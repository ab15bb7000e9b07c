"""Operations that vmap takes row by row become one operation on all rows, with the same values."""

import pytest
import torch
from torch.nn import functional

from adjsim.compiler.batched import batch_rows
from adjsim.compiler.decompositions import decompositions
from adjsim.compiler.repetitions import merge_repetitions
from adjsim.compiler.tracing import graph_of
from adjsim.core.rows import vmap_rows

ROWS = 9
ACTIVATIONS = {
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
}


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def batched(function, *inputs):
    """The graph of a function with its rows taken together, and the number of its operations."""
    graph = graph_of(lambda *x: list(function(*x)), *inputs, decompositions=decompositions(False))
    merge_repetitions(graph)
    batch_rows(graph)
    return graph, len(graph.graph.nodes)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_of_activations_are_taken_together(name):
    x, cotangents = numbers(4, 5), numbers(ROWS, 4, 5, seed=1)

    def pull(x, cotangents):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ACTIVATIONS[name](x)
        return vmap_rows(
            lambda row: torch.autograd.grad(y, x, row, retain_graph=True), [cotangents]
        )

    graph, count = batched(pull, x, cotangents)
    assert count < 40
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default)
    (found,), (expected,) = graph(x, cotangents), pull(x, cotangents)
    # Torch has formulas of its own for some.
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


OTHERS = {
    "reversed": lambda x, y: [x[k].sin() for k in reversed(range(ROWS))],
    "a part": lambda x, y: [x[k].sin() for k in range(ROWS - 1)],
    "of columns": lambda x, y: [x[:, k].sin() for k in range(4)],
    "of other operations": lambda x, y: [x[k].sin() if k else x[k].cos() for k in range(ROWS)],
    "of other numbers": lambda x, y: [x[k] * (k + 1) for k in range(ROWS)],
    "of other types": lambda x, y: [x[k] * (1 if k else True) for k in range(ROWS)],
    "sums": lambda x, y: [x[k].sum(0) for k in range(ROWS)],
    "with fewer axes": lambda x, y: [x[k] * y[k] for k in range(ROWS)],
    "of one row": lambda x, y: [x[0].sin() for k in range(ROWS)],
    "and a row": lambda x, y: [x[k] * x[0] for k in range(ROWS)],
    "of two tensors": lambda x, y: [x[k] * x[k].exp() + 2 * x[k] for k in range(ROWS)],
    "and common numbers": lambda x, y: [torch.add(x[k], y[1:2], alpha=2) for k in range(ROWS)],
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_stacks_have_their_values(kind, axis):
    x, y = numbers(ROWS, ROWS, 4), numbers(ROWS, 4, seed=2)

    def stack(x, y):
        return [torch.stack(OTHERS[kind](x, y), axis)]

    graph, _ = batched(stack, x, y)
    torch.testing.assert_close(graph(x, y), stack(x, y), rtol=0, atol=0)
