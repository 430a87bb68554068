"""FLOPs and bytes of one op, for the cost model: torch's FLOP formulas, and attention that counts a causal mask.

Not here: how long that takes (cost_model.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from torchtitan_simplefsdp.core import compat

# Ops that return memory without touching it, and are no views to torch.
_FREE_OPS = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def count_flops(op: compat.OpOverload, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the multiplications and additions of matrix products and attention; 0 for all other ops."""
    if "scaled_dot_product" in op.name() and "attention" in op.name():
        return _count_attention(op, args, kwargs)
    formula = flop_registry.get(op.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


def count_bytes(op: compat.OpOverload, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the bytes of the tensors that an op reads and writes; 0 for views and others that touch no memory."""
    if op.is_view or op.namespace == "prim" or op.name().removeprefix("aten::").partition(".")[0] in _FREE_OPS:
        return 0
    return sum(leaf.nbytes for leaf in compat.tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor))


def _count_attention(op: compat.OpOverload, args: tuple, kwargs: dict) -> int:
    """Two matrix products forward, five backward (one recomputes the scores); a causal mask leaves half of each.

    torch's own formulas count the whole square and lack the CPU kernel.
    """
    arguments = compat.get_arguments(op, args, kwargs)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    batch, heads, queries, width = query.shape
    scores = 2 * batch * heads * queries * key.size(2)
    flops = scores * (3 * width + 2 * value.size(3) if "backward" in op.name() else width + value.size(3))
    return flops // 2 if arguments.get("is_causal") else flops
