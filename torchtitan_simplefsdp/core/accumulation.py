"""Accumulation: the sum of gradients over replicas once per optimizer step instead of once per microbatch.

A gradient that is only summed over replicas at the end has the shape of the stored parameter all the time, so it waits in
`parameter.grad`, and it costs no memory. The reduction over shards stays in every backward: without it a rank would have
to keep the gradient of the whole parameter.

Not here: the loop over microbatches, and dividing the loss by what all of them hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from . import compat
from .parametrize import Parametrization, is_parametrized
from .unshard import Cut, Wire, finish_reduce, start_reduce


@contextmanager
def accumulate_gradients(model: nn.Module) -> Iterator[None]:
    """Run forward and backward of several microbatches inside; sum their gradients over the replicas at the end.

    In `replicate` mode that is the only reduction, in `hybrid_shard` each backward still reduce-scatters, in `fully_shard`
    nothing changes. A parameter stored in fewer bits than `reduce_dtype` is reduced in every backward, as waiting would
    round its gradient. Gradients from before are set aside and added at the end; after an exception inside they are back.

    Inside, gradients are not complete: those of `parameter.grad` and of `torch.autograd.grad` are not summed over replicas.
    So zero, clip and step outside, and use no optimizer that steps in backward. All ranks must use the same parameters.
    Parameters must not be written inside: without `reshard_after_forward` microbatches in flight share what was gathered.

    Args:
        model: one that SimpleFSDP was applied to, whole or in parts; other models' gradients are not affected.

    Raises:
        ValueError: no part of `model` has SimpleFSDP, gradients are being accumulated already, or `model` is a part that
            holds only some parameters of a bucket.

    Source: `no_sync` of DistributedDataParallel and `set_requires_all_reduce` of FSDP2, as one context that cannot be left
    without the reduction.
    """
    modules = [module for module in model.modules() if is_parametrized(module)]
    _validate_modules(modules)
    buckets = _get_buckets(modules)
    parameters = [parameter for bucket, _ in buckets for parameter in bucket]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    _mark(modules, object())
    try:
        yield
        _sum_over_replicas(buckets)
    except BaseException:
        for parameter, gradient in zip(parameters, before):
            parameter.grad = gradient
        raise
    finally:
        _mark(modules, None)
    for parameter, gradient in zip(parameters, before):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def _validate_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("accumulate_gradients: the model has no SimpleFSDP. Apply data_parallel first.")
    if any(module._simple_fsdp_accumulates for module in modules):
        raise ValueError("accumulate_gradients: the model accumulates already. Use one context around all microbatches.")
    inside = {id(module) for module in modules}
    for module in modules:
        for bucket, _ in module._simple_fsdp_buckets.values():
            outside = [member.fqn for member in bucket.members if id(member.module) not in inside]
            if outside:
                raise ValueError(
                    f"accumulate_gradients: {outside[0]!r} is not in this part of the model, but shares a bucket with "
                    f"parameters that are. Pass the whole model, or choose another bucket_plan."
                )


def _mark(modules: list[nn.Module], accumulation: object | None) -> None:
    for module in modules:
        module._simple_fsdp_accumulates = accumulation is not None
        for bucket, _ in module._simple_fsdp_buckets.values():
            bucket.accumulation = accumulation


# the stored parameters of a bucket, tied ones once, and how they are reduced
_Bucket = tuple[list[nn.Parameter], Parametrization]


def _get_buckets(modules: list[nn.Module]) -> list[_Bucket]:
    """Return what the modules' parameters are in; frozen ones too, they may be thawed inside."""
    found: dict[int, _Bucket] = {}
    for module in modules:
        for name, how in module._simple_fsdp.items():
            parameter = module._parameters[name]
            if parameter is None:
                continue
            bucket = module._simple_fsdp_buckets.get(name)
            members, _ = found.setdefault(id(bucket[0] if bucket else parameter), ([], how))
            if not any(parameter is member for member in members):
                members.append(parameter)
    return list(found.values())


@torch.no_grad()
def _sum_over_replicas(buckets: list[_Bucket]) -> None:
    """Sum what waited in the gradients, a bucket in one collective; all are issued before the first is waited for."""
    started = []
    for parameters, how in buckets:
        gradients = [compat.get_local(p.grad) for p in parameters if p.grad is not None]
        if gradients and how.accumulates:  # else not used in any microbatch, or complete already
            wire = Wire(tuple(map(Cut.of_whole, gradients)), how.wire.param_dtype, how.wire.reduction.over_replicas())
            started.append((gradients, start_reduce(gradients, wire), wire))
    for gradients, reduction, wire in started:
        for gradient, reduced in zip(gradients, finish_reduce(reduction, wire)):
            gradient.copy_(reduced)
