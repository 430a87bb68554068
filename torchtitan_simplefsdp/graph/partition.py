"""Partition: which unsharded parameters the backward graph gathers again, and which it is given by the forward graph.

AOTAutograd traces forward and backward as one joint graph and cuts it in two; what the cut crosses is saved. By itself the
cut takes a gathered parameter for a cheap thing to save, or gathers some again and not others. Here each all_gather, with
all that only moves its data (wait, split, view, transpose, cast), is tagged: recompute (reshard after forward) or save.

Not here: where in a graph a collective stands (reorder passes).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchtitan_simplefsdp.core import compat

_MOVES = {
    torch.ops.aten.clone.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.split_with_sizes_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops._c10d_functional.wait_tensor.default,
}


class ReshardPartitioner(compat.get_partitioner_class()):
    """AOTAutograd's partitioner, after tagging gathers.

    Args:
        reshard: as `reshard_after_forward` of `data_parallel`; None: all but the last gather of the forward.
    """

    def __init__(self, reshard: bool | None) -> None:
        self.reshard = reshard

    def __call__(self, graph: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        tag_gathers(graph, self.reshard)
        return compat.cut_joint_graph(graph, inputs, **keywords)

    def uuid(self) -> tuple[str, bool | None]:
        """Part of the key of inductor's cache."""
        return "torchtitan_simplefsdp", self.reshard


def tag_gathers(graph: fx.GraphModule, reshard: bool | None) -> None:
    """Tag every all_gather of stored shards, and what moves its data, to be recomputed in backward, or saved.

    An all_gather of anything computed (of tensor or context parallelism) is left to the partitioner.
    """
    chains: list[set[fx.Node]] = []  # per all_gather: from the graph's inputs to where computation begins
    chain_of: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.graph.nodes:
        if is_gather(node):
            before = _get_moves_before(node)
            if before is not None:
                chains.append(before | {node})
                chain_of[node] = chains[-1]
        elif node.op == "call_function" and _moves_data(node) and node.all_input_nodes:
            sources = [chain_of.get(source) for source in node.all_input_nodes]
            if sources[0] is not None and all(source is sources[0] for source in sources):
                sources[0].add(node)
                chain_of[node] = sources[0]
    for chain in chains:
        if reshard or (reshard is None and chain is not chains[-1]):
            for node in chain:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        else:
            for node in chain:
                if node in chain_of and any(user not in chain for user in node.users):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def is_gather(node: fx.Node) -> bool:
    """Return whether a node issues an all_gather."""
    return node.target is torch.ops._c10d_functional.all_gather_into_tensor.default


def _get_moves_before(gather: fx.Node) -> set[fx.Node] | None:
    """Return the nodes between graph inputs and the gather if they only move data, else None."""
    found: set[fx.Node] = set()
    left = list(gather.all_input_nodes)
    while left:
        node = left.pop()
        if node.op == "placeholder" or node in found:
            continue
        if node.op != "call_function" or not _moves_data(node):
            return None
        found.add(node)
        left += node.all_input_nodes
    return found


def _moves_data(node: fx.Node) -> bool:
    if node.target in _MOVES or node.target is operator.getitem:
        return True
    return isinstance(node.target, compat.OpOverload) and node.target.is_view
