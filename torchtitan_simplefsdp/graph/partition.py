"""Partition: which unsharded parameters the backward graph gathers again, and which it is given by the forward graph.

AOTAutograd traces forward and backward as one joint graph and cuts it in two; what the cut crosses is saved. By itself the
cut takes a gathered parameter for a cheap thing to save, or gathers some again and not others. Here each all_gather, with
all that only moves its data (wait, split, view, transpose, cast), is tagged: recompute (reshard after forward) or save.

Not here: finding gathers (gathers.py), where in a graph collectives stand (reorder.py).
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torchtitan_simplefsdp.core import compat

from .gathers import find_gathers, get_order
from .reorder import order_collectives


class SimpleFSDPPartitioner(compat.get_partitioner_class()):
    """AOTAutograd's partitioner, after tagging gathers, with both graphs' collectives put into order.

    Args:
        reshard: as `reshard_after_forward` of `data_parallel`; None: all but the last gather of the forward.
    """

    def __init__(self, reshard: bool | None) -> None:
        self.reshard = reshard

    def __call__(self, graph: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        tag_gathers(graph.graph, self.reshard)
        forward, backward = compat.cut_joint_graph(graph, inputs, **keywords)
        for part in (forward, backward):
            order_collectives(part)
        return forward, backward

    def uuid(self) -> tuple[str, bool | None]:
        """Part of the key of inductor's cache."""
        return "torchtitan_simplefsdp", self.reshard


def tag_gathers(graph: fx.Graph, reshard: bool | None) -> None:
    """Tag every gather of stored shards, and what moves its data, to be recomputed in backward, or its result to be saved."""
    order, gathers = get_order(graph), find_gathers(graph)
    last = max(gathers, key=lambda gather: order[gather.get_first_use(order)], default=None)
    for gather in gathers:
        if reshard or (reshard is None and gather is not last):
            for node in gather.nodes:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        else:
            for node in gather.unpacking:
                if any(user not in gather.nodes for user in node.users):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
