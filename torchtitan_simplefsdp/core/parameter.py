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
from .reduction import Reduction, build_reduction
from .unshard import Cut, TensorParallelSpec, Wire


def build_sharded_parameter(
    parameter: nn.Parameter,
    device_mesh: DeviceMesh,
    mode: str,
    mp_policy: MixedPrecisionPolicy,
    shard_dim: int,
    reduction: str,
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
    how = _build_parametrization(parameter, device_mesh, dp_placements, mp_policy, reduction)
    return nn.Parameter(stored, requires_grad=parameter.requires_grad), how


def build_cast(parameter: nn.Parameter, mp_policy: MixedPrecisionPolicy) -> Parametrization:
    """Return how a parameter without data parallelism is read: cast to `param_dtype`, no collective."""
    wire = Wire((Cut.of_whole(_get_local(parameter)),), _get_param_dtype(parameter, mp_policy), Reduction())
    return Parametrization(wire, False, _build_tensor_parallel_spec(parameter))


def _build_parametrization(
    parameter: nn.Parameter,
    device_mesh: DeviceMesh,
    dp_placements: tuple[Placement, ...],
    mp_policy: MixedPrecisionPolicy,
    reduction: str,
) -> Parametrization:
    sharded = [mesh_dim for mesh_dim, placement in enumerate(dp_placements) if isinstance(placement, Shard)]
    shard_mesh_dim = sharded[0] if sharded else None
    replicate_mesh_dims = tuple(mesh_dim for mesh_dim in range(device_mesh.ndim) if mesh_dim not in sharded)
    reduce_dtype = mp_policy.reduce_dtype if parameter.dtype.is_floating_point else None
    reduction = build_reduction(device_mesh, shard_mesh_dim, replicate_mesh_dims, reduce_dtype, exact=reduction == "exact")
    cut = _build_cut(_get_local(parameter), device_mesh, shard_mesh_dim if reduction.shard else None, dp_placements)
    # Gradients wait for the sum over replicas in the dtype of the stored parameter, which must not round what is summed.
    rounds = reduce_dtype is not None and torch.promote_types(reduce_dtype, parameter.dtype) != parameter.dtype
    accumulates = bool(reduction.replicate) and not rounds
    wire = Wire((cut,), _get_param_dtype(parameter, mp_policy), reduction)
    return Parametrization(wire, accumulates, _build_tensor_parallel_spec(parameter))


def _build_cut(
    local: torch.Tensor, device_mesh: DeviceMesh, mesh_dim: int | None, dp_placements: tuple[Placement, ...]
) -> Cut:
    if mesh_dim is None:
        return Cut.of_whole(local)
    dim = dp_placements[mesh_dim].dim
    _, rows = get_local_rows(local.size(dim), device_mesh.size(mesh_dim), device_mesh.get_local_rank(mesh_dim))
    return Cut(tuple(local.movedim(dim, 0).shape), dim, rows)


def _get_param_dtype(parameter: nn.Parameter, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype in which modules read `parameter`; only floating-point ones are cast."""
    return (mp_policy.param_dtype or parameter.dtype) if parameter.dtype.is_floating_point else parameter.dtype


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


def _build_tensor_parallel_spec(parameter: torch.Tensor) -> TensorParallelSpec | None:
    if not isinstance(parameter, DTensor):
        return None
    return TensorParallelSpec(
        parameter.device_mesh, parameter.placements, parameter.shape, _get_contiguous_stride(parameter.shape)
    )


def _get_contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
