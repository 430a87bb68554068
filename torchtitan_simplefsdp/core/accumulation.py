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
from torch.distributed.tensor import DTensor

from .parametrize import Parametrization, is_parametrized
from .reduction import reduce_gradient


@contextmanager
def accumulate_gradients(model: nn.Module) -> Iterator[None]:
    """Run forward and backward of several microbatches inside; sum their gradients over the replicas at the end.

    In `replicate` mode that is the only reduction, in `hybrid_shard` each backward still reduce-scatters, in `fully_shard`
    nothing changes. A parameter stored in fewer bits than `reduce_dtype` is reduced in every backward, as waiting would
    round its gradient. Gradients from before are set aside and added at the end; after an exception inside they are back.

    Inside, gradients are not complete: those of `parameter.grad` and of `torch.autograd.grad` are not summed over replicas.
    So zero, clip and step outside, and use no optimizer that steps in backward. All ranks must use the same parameters.

    Args:
        model: one that SimpleFSDP was applied to, whole or in parts; other models' gradients are not affected.

    Raises:
        ValueError: no part of `model` has SimpleFSDP, or gradients are being accumulated already.

    Source: `no_sync` of DistributedDataParallel and `set_requires_all_reduce` of FSDP2, as one context that cannot be left
    without the reduction.
    """
    modules = [module for module in model.modules() if is_parametrized(module)]
    _validate_modules(modules)
    parameters = _get_parameters(modules)
    before = [parameter.grad for parameter, _ in parameters]
    for parameter, _ in parameters:
        parameter.grad = None
    for module in modules:
        module._simple_fsdp_accumulates = True
    try:
        yield
        for parameter, how in parameters:
            _sum_over_replicas(parameter, how)
    except BaseException:
        for (parameter, _), gradient in zip(parameters, before):
            parameter.grad = gradient
        raise
    finally:
        for module in modules:
            module._simple_fsdp_accumulates = False
    for (parameter, _), gradient in zip(parameters, before):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def _validate_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("accumulate_gradients: the model has no SimpleFSDP. Apply data_parallel first.")
    if any(module._simple_fsdp_accumulates for module in modules):
        raise ValueError("accumulate_gradients: the model accumulates already. Use one context around all microbatches.")


def _get_parameters(modules: list[nn.Module]) -> list[tuple[nn.Parameter, Parametrization]]:
    """Return the stored parameters and how they are read, tied ones once; frozen ones too, they may be thawed inside."""
    found: dict[int, tuple[nn.Parameter, Parametrization]] = {}
    for module in modules:
        for name, how in module._simple_fsdp.items():
            parameter = module._parameters[name]
            if parameter is not None:
                found[id(parameter)] = (parameter, how)
    return list(found.values())


@torch.no_grad()
def _sum_over_replicas(parameter: nn.Parameter, how: Parametrization) -> None:
    if parameter.grad is None or not how.accumulates:  # not used in any microbatch, or complete already
        return
    local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    local.copy_(reduce_gradient(local.contiguous(), how.collectives.reduction.over_replicas()))
