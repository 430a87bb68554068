"""Auto bucketing: the bucket plan whose step is predicted to be the fastest, by a cost model.

[Note: what is predicted]
Nothing runs and nothing is traced: a parameter that takes part in a matrix product costs 2 FLOPs per token in forward and
4 in backward (arXiv:2001.08361, section 2.1); attention's own products, elementwise ops and recomputation are left out, so
compute is underestimated and communication looks more exposed than it is. What overlaps is said in schedules.py. The choice
is a pure function of shapes, the mesh and the cost model, so all ranks choose alike.

Not here: what a plan does (core/bucket_plan.py), numbers of machines (cost_model.py, machines.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_simplefsdp.core.bucket_plan import build_bucket_plan
from torchtitan_simplefsdp.core.precision import MixedPrecisionPolicy

from .cost_model import CostModel
from .schedules import Prediction, Schedule, predict, predict_auto
from .segments import Step, Unit
from .trace import Collective

# How much more may be unsharded at a time than with a bucket per block, which are two blocks where gathers are issued ahead.
MEMORY_FACTOR = 2


class Choice(NamedTuple):
    """A plan for `data_parallel`, what it is predicted to give, and what a bucket per block would."""

    bucket_plan: str | float
    chosen: Prediction
    block: Prediction


def choose_bucket_plan(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mode: str,
    mp_policy: MixedPrecisionPolicy,
    cost: CostModel,
    tokens: int,
    reshard_after_forward: bool | None = None,
) -> Choice:
    """Choose 'block', or a size in MiB, for `data_parallel(..., bucket_plan=...)`.

    Args:
        model, device_mesh, mode, mp_policy, reshard_after_forward: those of `data_parallel`, before it is applied.
        cost: the machine.
        tokens: of one forward on this rank.

    Raises:
        ValueError: the cost model has no FLOP rate for the dtype of compute.
    """
    step = build_estimated_step(model, device_mesh, mode, mp_policy, cost, tokens)
    reshards = step.gather is not None and reshard_after_forward is not False
    block = predict(step, cost, Schedule("block", 1, True), reshards)
    chosen = predict_auto(step, cost, reshards, MEMORY_FACTOR * block.timeline.peak_bytes)
    if isinstance(chosen.bucket, str):
        return Choice(chosen.bucket, chosen, block)
    # the simulator measures a bucket by what travels, `data_parallel` by the parameters as computed with
    travels = step.gather or next(unit.collectives[0] for unit in step.backward if unit.collectives)
    return Choice(chosen.bucket / travels.dtype.itemsize * _get_param_dtype(model, mp_policy).itemsize / 2**20, chosen, block)


def build_estimated_step(
    model: nn.Module, device_mesh: DeviceMesh, mode: str, mp_policy: MixedPrecisionPolicy, cost: CostModel, tokens: int
) -> Step:
    """Return the units of a step as [Note: what is predicted] estimates them; see `choose_bucket_plan`."""
    param_dtype = _get_param_dtype(model, mp_policy)
    reduce_dtype = mp_policy.reduce_dtype or param_dtype
    # the mesh's dims: (replicate,), (shard,) or (replicate, shard)
    groups = [
        (device_mesh.mesh_dim_names[dim] if device_mesh.mesh_dim_names else str(dim), _get_ranks(device_mesh, dim))
        for dim in range(device_mesh.ndim)
    ]
    shard = None if mode == "replicate" else groups[-1]
    replicas = groups[0] if mode != "fully_shard" else None
    parameters = dict(model.named_parameters())
    segments = enumerate(build_bucket_plan(model, "block", mp_policy.param_dtype))
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    forward: list[Unit] = []
    backward: list[Unit] = []
    for segment, fqn in ((segment, fqn) for segment, fqns in segments for fqn in fqns):
        parameter = parameters[fqn]
        numel = _count_local(parameter)
        elements = math.ceil(numel / len(shard[1])) * len(shard[1]) if shard else numel
        flops = 2 * tokens * numel if parameter.ndim > 1 and id(parameter) not in looked_up else 0
        gather, reductions = [], []
        if shard:
            gather = [Collective("all_gather", *shard, elements * param_dtype.itemsize, param_dtype, "forward", fqn)]
            reductions = [Collective("reduce_scatter", *shard, elements * reduce_dtype.itemsize, reduce_dtype, "backward", fqn)]
        if replicas:
            nbytes = elements * reduce_dtype.itemsize // (len(shard[1]) if shard else 1)
            reductions.append(Collective("all_reduce", *replicas, nbytes, reduce_dtype, "backward", fqn))
        forward_seconds, backward_seconds = (cost.compute_seconds(f * flops, 0, param_dtype) for f in (1, 2))
        forward.append(Unit(segment, tuple(gather), forward_seconds, 0.0, elements))
        backward.append(Unit(segment, tuple(reductions if parameter.requires_grad else ()), backward_seconds, 0.0, elements))
    return Step(tuple(forward), tuple(reversed(backward)), next((c for unit in forward for c in unit.collectives), None))


def _get_param_dtype(model: nn.Module, mp_policy: MixedPrecisionPolicy) -> torch.dtype:
    return mp_policy.param_dtype or next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def _get_ranks(device_mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    """Return the first group of this dim, the same on all ranks."""
    return tuple(device_mesh.mesh.movedim(dim, 0).reshape(device_mesh.size(dim), -1)[:, 0].tolist())


def _count_local(parameter: nn.Parameter) -> int:
    """Return the elements of a tensor-parallel part, the same on all ranks."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    parts = math.prod(
        size for size, placement in zip(parameter.device_mesh.shape, parameter.placements) if isinstance(placement, Shard)
    )
    return math.ceil(parameter.numel() / parts)
