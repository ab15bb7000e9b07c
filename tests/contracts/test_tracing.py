"""Graphs of traced steps equal those of torch's own tracer."""

import contextlib
import gc
from itertools import pairwise

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

import adjsim
from adjsim.compiler import loops
from adjsim.compiler.refusals import CompileError
from adjsim.compiler.shapes import ELEMENTWISE, ShapeMode, common_result
from adjsim.compiler.tracing import graph_of
from tests import problems


def rows(graph):
    """Describe the operations of a graph, in order, by their arguments and results.

    The recorder leaves out detached copies, and has its constants where they are first read.
    """
    names, found = {}, []
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            names[node] = "constant"
        elif node.target is torch.ops.aten.detach.default and isinstance(node.args[0], Node):
            names[node] = names[node.args[0]]
        else:
            names[node] = f"%{len(found)}"
            args, kwargs = (
                repr(tree_leaves(map_arg(x, lambda x: names[x])))
                for x in (node.args, sorted(node.kwargs.items()))
            )
            results = [
                (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
                for x in tree_leaves(node.meta.get("val") if node.op != "output" else None)
            ]
            name = str(node.target) if node.op == "call_function" else node.op
            found.append((name, args, kwargs, results))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("own_loops")
@pytest.mark.parametrize("potential", [problems.POTENTIALS["lennard-jones"], problems.Cage])
def test_recorded_graphs_equal_those_of_torch(potential, monkeypatch):
    compared = []

    def both(function, *examples, decompositions=None):
        found = graph_of(function, *examples, decompositions=decompositions)
        make = make_fx(function, decompositions, "fake", _allow_non_fake_inputs=True)
        compared.append((rows(found), rows(make(*examples))))
        return found

    monkeypatch.setattr(loops, "graph_of", both)
    dynamics = adjsim.Langevin(potential(), 1.0, 1.0, 0.5)
    position = problems.square()[0]
    final = adjsim.simulate(
        dynamics, dynamics.init(position, 0 * position), [0.0, 0.1],
        solver=adjsim.Splitting("BAOAB", 0.01), adjoint=adjsim.ReversibleAdjoint(),
        compile=True, generator=1,
    ).final  # fmt: skip
    final.position.square().sum().backward()
    assert len(compared) >= 6
    for found, expected in compared:
        assert found == expected


OPERANDS = [
    lambda dtype: torch.ones(4, 5, 6, dtype=dtype)[1:, ::2, 1:],
    lambda dtype: torch.ones((), dtype=dtype),
    lambda dtype: torch.ones(3, dtype=dtype),
    lambda dtype: torch.ones(3, 4, dtype=dtype).mT,
    lambda dtype: torch.ones(8, 6, dtype=dtype)[::2, ::2],
    lambda dtype: torch.ones(4, 1, dtype=dtype),
    lambda dtype: torch.ones(2, 4, 3, dtype=dtype).permute(0, 2, 1),
    lambda dtype: torch.ones(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
]


def layouts(function, args):
    """Return shapes, strides and types of results on the CPU; None: torch refuses the call."""
    try:
        found = function(*args)
    except (TypeError, RuntimeError, IndexError):
        return None
    if isinstance(found, torch.Tensor):
        return found.shape, found.stride(), found.dtype
    return None


def common(function, args):
    """Return what a trace finds for an operation without evaluating it."""
    with ShapeMode() as mode:
        given = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, args)
        return common_result(function, given, {}, mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(str(x) for x in ELEMENTWISE))
def test_layouts_without_values_are_those_of_torch(name):
    packet = getattr(torch.ops.aten, name.removeprefix("aten."))
    made = [x(dtype) for dtype in (torch.float64, torch.float32, torch.int64) for x in OPERANDS]
    calls = (
        [[x] for x in made]
        + [[x, 1.0] for x in made]
        + [[x, y] for x in made[::2] for y in made[::3]]
    )
    calls += [[x, y, x] for x, y in pairwise(made)] + [[x > 0, x, y] for x, y in pairwise(made)]
    compared = 0
    for overload in ("default", "Tensor", "Scalar", "self", "Tensor_Scalar"):
        function = getattr(packet, overload, None)
        for args in calls if function else []:
            expected = layouts(function, args)
            if expected is not None and (found := common(function, args)) is not NotImplemented:
                assert layouts(lambda x: x, [found]) == expected, (function, args)
                compared += 1
    assert compared


@pytest.mark.parametrize("view", ["select", "slice", "t", "unbind", "split", "unsqueeze", "expand"])
def test_views_without_values_are_those_of_torch(view):
    for x in (torch.ones(0, 3)[:, 1:], torch.ones(4, 5)[1:, ::2], torch.ones(3, 4)[:, 2:].mT):
        args = {"t": [x], "unbind": [x, 1], "split": [x, 2, 1], "expand": [x, [2, *x.shape]]}
        given = args.get(view, [x, 1, 1] if view == "select" else [x, 1])
        function = getattr(torch.ops.aten, view)
        function = getattr(function, function.overloads()[0])
        found, expected = tree_leaves(common(function, given)), tree_leaves(function(*given))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert layouts(lambda x: x, [one]) == layouts(lambda x: x, [other])
            assert one.storage_offset() == other.storage_offset()


def test_the_default_dtype_is_that_of_the_trace():
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert common(torch.ops.aten.div.Tensor, [torch.tensor([1]), 3]).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("collects", [True, False])
def test_a_trace_leaves_the_collection_of_cycles_as_it_was(collects):
    ode, mistaken = adjsim.ODE(lambda t, y: -y), adjsim.ODE(lambda t, y: -y * float(y[0]))
    (gc.enable if collects else gc.disable)()
    try:
        for field, outcome in (
            (ode, contextlib.nullcontext()),
            (mistaken, pytest.raises(CompileError)),
        ):
            solver = adjsim.RungeKutta("rk4", 0.1)
            with outcome:
                adjsim.simulate(
                    field, field.init(torch.ones(2)), [0.0, 0.3], solver=solver, compile=True
                )
            assert gc.isenabled() == collects
    finally:
        gc.enable()
