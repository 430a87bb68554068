"""Gathers: the all_gathers of stored shards in a graph, with the nodes around them that only move their data.

Not here: what is done with them (partition.py, reorder.py).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from torchtitan_simplefsdp.core import compat

_MOVES = {
    operator.getitem,
    torch.ops.aten.clone.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.split_with_sizes_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops._c10d_functional.wait_tensor.default,
}


@dataclass
class Gather:
    """The unsharding of a bucket.

    Args:
        packing: nodes between the shards, which are inputs of the graph, and the all_gather, in order.
        issue: the all_gather.
        unpacking: nodes behind it that only move data (wait, split, view, transpose, cast), in order.
    """

    packing: list[fx.Node]
    issue: fx.Node
    unpacking: list[fx.Node]

    @property
    def nodes(self) -> set[fx.Node]:
        """All nodes."""
        return {*self.packing, self.issue, *self.unpacking}

    def get_first_use(self, order: dict[fx.Node, int]) -> fx.Node:
        """Return the first node, in `order`, that computes with what was gathered, or the output of the graph."""
        return min({user for node in self.nodes for user in node.users} - self.nodes, key=order.__getitem__)


def get_order(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the place of each node."""
    return {node: number for number, node in enumerate(graph.nodes)}


def find_gathers(graph: fx.Graph) -> list[Gather]:
    """Return the all_gathers of graph inputs, in order; one of anything computed (tensor or context parallelism) is none."""
    gathers: list[Gather] = []
    of: dict[fx.Node, Gather] = {}
    for node in graph.nodes:
        if is_gather(node):
            packing = _get_packing(node)
            if packing is not None:
                gathers.append(Gather(packing, node, []))
                of[node] = gathers[-1]
        elif moves_data(node) and node.all_input_nodes:
            sources = [of.get(source) for source in node.all_input_nodes]
            if sources[0] is not None and all(source is sources[0] for source in sources):
                sources[0].unpacking.append(node)
                of[node] = sources[0]
    return gathers


def is_gather(node: fx.Node) -> bool:
    """Return whether a node issues an all_gather."""
    return node.target is torch.ops._c10d_functional.all_gather_into_tensor.default


def moves_data(node: fx.Node) -> bool:
    """Return whether a node computes nothing new."""
    if node.op != "call_function":
        return False
    return node.target in _MOVES or (isinstance(node.target, compat.OpOverload) and node.target.is_view)


def _get_packing(gather: fx.Node) -> list[fx.Node] | None:
    """Return the nodes between graph inputs and the gather, in order, if they only move data of inputs; else None."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> bool:
        if node.op == "placeholder" or node in found:
            return True
        if not moves_data(node) or not all(visit(source) for source in node.all_input_nodes):
            return False
        found[node] = None
        return True

    return list(found) if all(visit(source) for source in gather.all_input_nodes) else None
