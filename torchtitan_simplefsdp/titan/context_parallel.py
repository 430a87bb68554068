"""Context parallelism on CPU: attention that gathers keys and values and masks by position.

torchtitan's context parallelism routes attention through a DTensor rule that exists for GPU kernels only. This module
computes the same on any device: simple rather than fast, for tests and small runs.

Not here: cutting inputs and labels along the sequence, which torchtitan's trainer does on every device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_simplefsdp.core import compat


class AllGatherAttention(nn.Module):
    """Causal attention over the whole sequence for the queries of this context-parallel rank.

    Args:
        cp_mesh: 1D mesh over which the sequence is cut.
        load_balanced: whether each rank holds one chunk from the head and one from the tail (torchtitan's 'headtail').
    """

    def __init__(self, cp_mesh: DeviceMesh, load_balanced: bool) -> None:
        super().__init__()
        self._degree, self._rank = cp_mesh.size(), cp_mesh.get_local_rank()
        self._group = compat.get_group_name(cp_mesh, 0)
        self._load_balanced = load_balanced

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, enable_gqa: bool = False
    ) -> torch.Tensor:
        """Attend; q, k, v and the result are [batch, heads, seq_len / cp, head_dim]."""
        k, v = (_AllGatherSequence.apply(x, self._degree, self._group) for x in (k, v))
        positions = get_positions(k.size(2), self._degree, self._load_balanced).to(q.device)
        mine = positions.view(self._degree, -1)[self._rank]
        mask = mine.unsqueeze(1) >= positions.unsqueeze(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def get_positions(seq_len: int, cp_degree: int, load_balanced: bool) -> torch.Tensor:
    """Return the position [seq_len] of every token, in the order of the ranks' concatenated shards."""
    positions = torch.arange(seq_len)
    if not load_balanced:
        return positions
    chunks = positions.chunk(2 * cp_degree)
    return torch.cat([torch.cat((chunks[rank], chunks[-1 - rank])) for rank in range(cp_degree)])


class _AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, degree: int, group: str) -> torch.Tensor:
        ctx.degree, ctx.group = degree, group
        return compat.wait(compat.all_gather(x.movedim(2, 0).contiguous(), degree, group)).movedim(0, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        part = compat.wait(compat.reduce_scatter(grad.movedim(2, 0).contiguous(), ctx.degree, ctx.group))
        return part.movedim(0, 2), None, None
