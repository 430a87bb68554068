"""Parameter: one parameter's sharded storage and how it is read, from its values, mesh, mode and policy.

Not here: walking a model (data_parallel.py), the collectives themselves (unshard.py).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from . import compat
from .parametrize import Parametrization
from .placements import get_data_parallel_placements, get_local_rows, get_spanned_placements
from .precision import MixedPrecisionPolicy
from .unshard import Collectives, TensorParallelSpec


def build_sharded_parameter(
    parameter: nn.Parameter, device_mesh: DeviceMesh, mode: str, mp_policy: MixedPrecisionPolicy, shard_dim: int
) -> tuple[nn.Parameter, Parametrization]:
    """Return the stored form of `parameter` (a DTensor of its local shard) and how it is read.

    See [Note: shapes of one parameter] in unshard.py. A parameter without dims cannot be cut and is replicated.
    """
    if parameter.ndim == 0:
        dp_placements = get_data_parallel_placements("replicate", 0) * device_mesh.ndim
    else:
        dp_placements = get_data_parallel_placements(mode, shard_dim % parameter.ndim)
    mesh, placements = device_mesh, dp_placements
    if isinstance(parameter, DTensor):
        mesh, placements = get_spanned_placements(parameter, device_mesh, dp_placements)
    stored = DTensor.from_local(
        _get_local_shard(_get_local(parameter), device_mesh, dp_placements),
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=_get_contiguous_stride(parameter.shape),
    )
    how = Parametrization(
        _build_collectives(parameter, mp_policy, device_mesh, dp_placements), _build_tensor_parallel_spec(parameter)
    )
    return nn.Parameter(stored, requires_grad=parameter.requires_grad), how


def build_cast(parameter: nn.Parameter, mp_policy: MixedPrecisionPolicy) -> Parametrization:
    """Return how a parameter without data parallelism is read: cast to `param_dtype`, no collective."""
    return Parametrization(_build_collectives(parameter, mp_policy), _build_tensor_parallel_spec(parameter))


def _get_local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the TP-local tensor, detached."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def _get_local_shard(
    local: torch.Tensor, device_mesh: DeviceMesh, dp_placements: tuple[Placement, ...]
) -> torch.Tensor:
    for mesh_dim, placement in enumerate(dp_placements):
        if isinstance(placement, Shard):
            start, length = get_local_rows(
                local.size(placement.dim), device_mesh.size(mesh_dim), device_mesh.get_local_rank(mesh_dim)
            )
            # a clone, so that the storage of the whole parameter can be freed
            return local.narrow(placement.dim, start, length).clone(memory_format=torch.contiguous_format)
    return local.contiguous()


def _build_collectives(
    parameter: torch.Tensor,
    mp_policy: MixedPrecisionPolicy,
    device_mesh: DeviceMesh | None = None,
    dp_placements: tuple[Placement, ...] = (),
) -> Collectives:
    floating = parameter.dtype.is_floating_point
    collectives = Collectives(
        shard_dim=0,
        shard_dim_size=0,
        shard_degree=1,
        shard_group="",
        replicate_groups=(),
        param_dtype=(mp_policy.param_dtype or parameter.dtype) if floating else parameter.dtype,
        reduce_dtype=None,
    )
    for mesh_dim, placement in enumerate(dp_placements):
        degree = device_mesh.size(mesh_dim)
        if degree == 1:
            continue  # nothing to communicate
        group = compat.get_group_name(device_mesh, mesh_dim)
        if isinstance(placement, Shard):
            collectives = collectives._replace(
                shard_dim=placement.dim,
                shard_dim_size=_get_local(parameter).size(placement.dim),
                shard_degree=degree,
                shard_group=group,
            )
        else:
            collectives = collectives._replace(replicate_groups=(*collectives.replicate_groups, group))
        if floating:
            collectives = collectives._replace(reduce_dtype=mp_policy.reduce_dtype)
    return collectives


def _build_tensor_parallel_spec(parameter: torch.Tensor) -> TensorParallelSpec | None:
    if not isinstance(parameter, DTensor):
        return None
    return TensorParallelSpec(
        parameter.device_mesh, parameter.placements, parameter.shape, _get_contiguous_stride(parameter.shape)
    )


def _get_contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
