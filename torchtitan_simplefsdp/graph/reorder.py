"""Reorder: when a graph issues the collectives of data parallelism, and when it waits for them.

A traced graph unshards every bucket at its beginning, and so reduces all at its end, and waits for each collective at once.
These passes move nodes and compute the same: a bucket is unsharded where it is used first, its gather is issued before the
bucket before is waited for, a reduction is issued when its gradients are there and waited for after the next one is issued.
That is the order of eager mode; see [Note: life of a bucket] in core/bucket.py.

Not here: which parameters share a collective (core/bucket_plan.py), what backward gathers again (partition.py).
"""

from __future__ import annotations

import torch
from torch import fx

from .gathers import find_gathers, Gather, get_order, moves_data

_C10D = torch.ops._c10d_functional
_REDUCTIONS = {_C10D.reduce_scatter_tensor.default, _C10D.all_reduce.default, _C10D.all_to_all_single.default}


def order_collectives(graph: fx.GraphModule) -> None:
    """Put the collectives of data parallelism into the order of eager mode, in place; those of others stay."""
    _issue_gathers_one_ahead(_unshard_at_first_use(graph.graph))
    _issue_reductions_at_once(graph.graph)
    _wait_for_reductions_one_later(graph.graph)
    graph.graph.lint()
    graph.recompile()


def _unshard_at_first_use(graph: fx.Graph) -> list[Gather]:
    """Move each gather, with all that moves its data, before the first computation that reads it; return them in order."""
    order = get_order(graph)
    gathers = sorted(find_gathers(graph), key=lambda gather: order[gather.get_first_use(order)])
    for gather in gathers:
        place = gather.get_first_use(order)
        for node in sorted(gather.nodes, key=order.__getitem__):
            place.prepend(node)
    return gathers


def _issue_gathers_one_ahead(gathers: list[Gather]) -> None:
    """Move what packs each gather, and the gather, before the wait of the one before it."""
    for earlier, gather in zip(gathers, gathers[1:]):
        (wait,) = earlier.issue.users
        for node in [*gather.packing, gather.issue]:
            wait.prepend(node)


def _issue_reductions_at_once(graph: fx.Graph) -> None:
    """Move what packs each reduction, and the reduction, behind the last gradient that goes into it."""
    order = get_order(graph)
    for reduction, _ in _find_reductions(graph):
        packing, gradients = _get_packing(reduction)
        place = max(gradients, key=order.__getitem__)
        for node in sorted((*packing, reduction), key=order.__getitem__):
            if order[node] > order[place]:
                place.append(node)
                place = node


def _wait_for_reductions_one_later(graph: fx.Graph) -> None:
    """Move what follows each reduction behind the issue of the next one."""
    order = get_order(graph)
    reductions = _find_reductions(graph)
    for (_, users), (following, _) in zip(reductions, reductions[1:]):
        place = following
        for node in sorted(users, key=order.__getitem__):
            place.append(node)
            place = node


def _find_reductions(graph: fx.Graph) -> list[tuple[fx.Node, set[fx.Node]]]:
    """Return the first collective of each reduction of gradients, in order, and all nodes that follow from it."""
    found = [(node, users) for node in graph.nodes if node.target in _REDUCTIONS if (users := _get_own_users(node))]
    return [(node, users) for node, users in found if not any(node in others for _, others in found)]


def _get_packing(reduction: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes before a reduction that only move data, for nothing else, and those that they take it from."""
    packing: set[fx.Node] = set()
    sources: set[fx.Node] = set()
    left = [reduction]
    while left:
        for source in left.pop().all_input_nodes:
            if moves_data(source) and all(user in packing or user is reduction for user in source.users):
                packing.add(source)
                left.append(source)
            else:
                sources.add(source)
    return packing, sources - packing


def _get_own_users(reduction: fx.Node) -> set[fx.Node] | None:
    """Return all nodes that use the reduction, if nothing else goes into them; None: it is no gradient's last step."""
    own: set[fx.Node] = set()
    left = [user for user in reduction.users if user.op != "output"]
    while left:
        node = left.pop()
        if node not in own:
            own.add(node)
            left += [user for user in node.users if user.op != "output"]
    return own if all(source in own or source is reduction for node in own for source in node.all_input_nodes) else None

