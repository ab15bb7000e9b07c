"""Tensors that a compiled step saves for its backward pass.

The backward pass over a step needs the numbers that autograd saves when it runs the step, such as
the activations of a network. A loop that stores only the state before each step computes them
again, with a quarter of the matrix products of a network's gradient. Where few steps are stored at
a time, the loop stores what autograd saves too, and the backward pass reads it.

Forward and backward loops trace the same step, so autograd saves the same tensors in the same
order. A tensor is worth its memory if a matrix product or a function such as tanh precedes it;
others, such as products of saved tensors, are computed again from the saved ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

from adjsim.compiler import multiplications, present_recorder
from adjsim.core.state import State, detached
from adjsim.solvers.base import StepContext, StepPlan
from adjsim.solvers.stochastic.drift_move import DriftMove

# Largest number of steps that are stored at a time for the steps to save tensors.
MOST_STEPS = 100
# Largest number of entries that a step saves: a megabyte of float64.
MOST_ENTRIES = 2**17
# Multiplications for an entry from which on it is saved, and those that a function such as tanh
# takes the time of.
WORTH = 32


def keeps_activations(plan: StepPlan) -> bool:
    """Return whether the steps evaluate a vector field, which may be a network."""
    return any(isinstance(move, DriftMove) for _, move in plan.moves)


class _Saved(NamedTuple):
    """A tensor that autograd saves, the number of its changes in place, and that of its row."""

    tensor: Tensor
    version: int
    number: int | None


class SavedTensors:
    """The saved tensors of one step, while it is traced.

    In a forward loop, ``rows`` are those that it is to store. In a backward loop, ``saved_tensors``
    are those that the forward loop has stored.
    """

    def __init__(self, saved_tensors: Sequence[Tensor] | None = None) -> None:
        self.saved_tensors, self.rows = saved_tensors, list[Tensor]()
        self._numbers: dict[Node, int] = {}
        # Of each row, the tensor that it holds, the number of its changes, and its axes in the row.
        self._held: list[tuple[Tensor, int, list[int]]] = []
        self._entries = 0

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which autograd saves tensors here."""
        return saved_tensors_hooks(lambda x: _Saved(x, x._version, self._number(x)), self._restore)

    def finish(self) -> None:
        """Replace recomputed nodes of a backward step by reads of saved tensors."""
        tensors = self.saved_tensors or ()
        if len(self._held) != len(tensors):
            raise RuntimeError(_OTHERS)
        for node, number in self._numbers.items():
            tensor, version, axes = self._held[number]
            # A tensor that was changed afterwards was stored as it was then.
            if tensor._version != version:
                continue
            row = _node(tensors[number])
            assert row is not None
            with node.graph.inserting_after(row):
                read = node.graph.call_function(torch.ops.aten.permute.default, (row, axes))
            read.meta = dict(node.meta)
            node.replace_all_uses_with(read)

    def _number(self, x: Tensor) -> int | None:
        """Return the number of the row that holds a tensor; None if it is computed again."""
        node = _node(x)
        if node is None:  # A captured tensor, a constant of the loop, is in memory already.
            return None
        if node in self._numbers:
            return self._numbers[node]
        size = self._entries + x.numel()
        if (
            not x.is_floating_point()
            or size > MOST_ENTRIES
            or self._multiplications(node) < WORTH * x.numel()
        ):
            return None
        # Rows are stored in the order of the tensor's axes in memory.
        order = sorted(range(x.ndim), key=lambda axis: -x.stride(axis))
        row, number = x.detach().permute(order), len(self._held)
        if self.saved_tensors is None:
            self.rows.append(row)
        elif number >= len(self.saved_tensors) or self.saved_tensors[number].shape != row.shape:
            raise RuntimeError(_OTHERS)
        self._numbers[node], self._entries = number, size
        self._held.append((x, x._version, [order.index(axis) for axis in range(x.ndim)]))
        return number

    def _restore(self, saved: _Saved) -> Tensor:
        # Autograd leaves this check to the hooks.
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(saved.tensor.shape)}."
            )
        if saved.number is None:
            return saved.tensor
        rows = self.rows if self.saved_tensors is None else self.saved_tensors
        return rows[saved.number].permute(self._held[saved.number][2])

    def _multiplications(self, node: Node) -> int:
        """Count those of the products and functions that give a tensor from saved ones."""
        total, seen, todo = 0, {node}, [node]
        while todo:
            node = todo.pop()
            total += multiplications(node, WORTH)
            found = {x for x in node.all_input_nodes if x not in self._numbers} - seen
            seen |= found
            todo += found
        return total


def saving_step(plan: StepPlan, state: State, context: StepContext) -> tuple[State, list[Tensor]]:
    """Run a step while it is traced, and return what autograd saves."""
    saved = SavedTensors()
    leaves = type(state)._make(x.detach().requires_grad_() for x in state)
    with torch.enable_grad(), saved.hooks():
        after = plan.step(leaves, context)
    return detached(after), saved.rows


_OTHERS = "a step saves other tensors backward than forward."


def _node(x: Tensor) -> Node | None:
    """Return the operation of the current trace that has computed a tensor, if one has."""
    recorder = present_recorder()
    return None if recorder is None else recorder.node_of(x)
