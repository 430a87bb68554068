"""FSDP2 as the oracle of core/: gradients are plain sums over ranks, also on gloo."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def sum_gradients(model: nn.Module) -> None:
    """Have every FSDP2 module of `model` sum gradients instead of averaging them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premul-sum
