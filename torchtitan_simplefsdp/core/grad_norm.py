"""Gradient norm and clipping that do not depend on how gradients are sharded.

An fp32 norm of shards depends on their sizes (3e-5 relative at 2M elements on CPU) and, through clipping, makes the
same training drift apart between layouts. Here squares are summed in fp64 per local shard, divided by the number of
ranks that hold the same shard, and summed over the mesh.

Not here: other norms than the 2-norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor], max_norm: float, groups: Sequence[dist.ProcessGroup] = ()
) -> torch.Tensor:
    """Scale the gradients in place so that their total 2-norm is at most `max_norm`; return the norm before scaling.

    Args:
        parameters: sharded or plain; those without gradient are skipped. A plain gradient counts once, as replicated.
        max_norm: largest total norm allowed. A norm that is inf or nan is returned as it is and the gradients become
            nan, as with `torch.nn.utils.clip_grad_norm_`.
        groups: process groups whose ranks hold other parameters (pipeline stages).

    Returns:
        fp32 scalar on the gradients' device, the same on every rank.
    """
    parameters = list(parameters)
    device = parameters[0].device if parameters else None
    parameters = [p for p in parameters if p.grad is not None]
    total_norm = get_total_norm([p.grad for p in parameters], groups, device).float()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm


@torch.no_grad()
def get_total_norm(
    gradients: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup] = (), device: torch.device | None = None
) -> torch.Tensor:
    """Return the total 2-norm of gradients as an fp64 scalar; one all_reduce per mesh dim and group.

    Args:
        gradients: sharded or plain; may be empty, for a pipeline stage that has none.
        groups: process groups whose ranks hold other gradients.
        device: where to sum; None: the device of the first gradient, CPU without any.

    Raises:
        ValueError: a gradient with a Partial placement.
    """
    if device is None:
        device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    sums: dict[DeviceMesh, torch.Tensor] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            total += _sum_of_squares(gradient)
            continue
        if any(placement.is_partial() for placement in gradient.placements):
            raise ValueError(
                "get_total_norm: got a gradient with a Partial placement, whose norm is not that of its parts. "
                "Redistribute it to the placements of its parameter first."
            )
        mesh = gradient.device_mesh
        copies = 1
        for mesh_dim, placement in enumerate(gradient.placements):
            if placement.is_replicate():
                copies *= mesh.size(mesh_dim)
        sums.setdefault(mesh, torch.zeros_like(total)).add_(_sum_of_squares(gradient.to_local()) / copies)
    for mesh, mesh_sum in sums.items():
        for mesh_dim in range(mesh.ndim):
            if mesh.size(mesh_dim) > 1:
                dist.all_reduce(mesh_sum, group=mesh.get_group(mesh_dim))
        total += mesh_sum
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def _sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
