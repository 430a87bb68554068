"""Peers: torchtitan 0.2.2's own SimpleFSDP, to be measured against; the only import of torchtitan.experiments.

Not here: contenders that plain torch and this package provide (contenders.py).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def load() -> ModuleType:
    """Import it, and torchtitan with it, which takes seconds: only where it is measured."""
    from torchtitan.experiments.simple_fsdp import simple_fsdp

    return simple_fsdp


def apply_torchtitan(
    model: nn.Module, mesh: DeviceMesh, mode: str, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> nn.Module:
    simple_fsdp = load()
    policy = simple_fsdp.MixedPrecisionPolicy(param_dtype, reduce_dtype)
    return simple_fsdp.data_parallel(model, mesh, mode, policy)
