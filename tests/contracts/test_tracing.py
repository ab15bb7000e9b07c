"""Graphs of traced steps equal those of torch's own tracer."""

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

import adjsim
from adjsim.compiler import loops
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
