"""Rebind: every global of torchtitan and torch that this plugin replaces, in one table, each with its reason.

Not here: anything a subclass or a TrainSpec can do; that is done there (trainer.py, train_spec.py).
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.config import JobConfig
from torchtitan.distributed import utils as dist_utils

from torchtitan_simplefsdp.core.grad_norm import clip_grad_norm_

from .checkpoint import SimpleFSDPCheckpointManager
from .device import CpuDevice, is_cpu_only
from .config.job_config import SERVED_MODELS
from .metrics import FlushedTensorBoardLogger

DEVICE_BINDINGS = (
    "torchtitan.components.metrics.device_module",
    "torchtitan.components.metrics.device_type",
    "torchtitan.distributed.dual_pipe_v.device_module",
    "torchtitan.distributed.dual_pipe_v.device_type",
    "torchtitan.distributed.parallel_dims.device_type",
    "torchtitan.distributed.utils.device_module",
    "torchtitan.distributed.utils.device_type",
    "torchtitan.tools.profiling.device_module",
    "torchtitan.tools.utils.device_module",
    "torchtitan.tools.utils.device_type",
)
"""Every name of torchtitan 0.2.2 that holds the device; each module copies it at import (a test looks for more)."""


def apply_rebinds(job_config: JobConfig) -> None:
    """Replace the globals that this run needs replaced. On a GPU the device layer is left alone."""
    for path, value in _get_rebinds(job_config).items():
        module, _, name = path.rpartition(".")
        setattr(importlib.import_module(module), name, value)


def _get_rebinds(job_config: JobConfig) -> dict[str, Any]:
    # the norm must not depend on the sharding, whatever the model (see core/grad_norm.py); called by Trainer.train_step
    rebinds: dict[str, Any] = {
        "torchtitan.distributed.utils.clip_grad_norm_": _clip_grad_norm,
        # picks whole checkpoints, loads on any layout and explains itself; the Trainer names the class
        "torchtitan.train.CheckpointManager": SimpleFSDPCheckpointManager,
        # a killed run keeps its scalars
        "torchtitan.components.metrics.TensorBoardLogger": FlushedTensorBoardLogger,
        # torchtitan's main parses sys.argv itself; it gets what was parsed and checked already
        "torchtitan.train.ConfigManager": lambda: SimpleNamespace(parse_args=lambda: job_config),
    }
    if job_config.model.name in SERVED_MODELS:
        # the policy of core/precision.py is the only one: torchtitan would add autocast in replicate-only runs and say
        # "disabled" in others
        rebinds["torchtitan.distributed.utils.maybe_enable_amp"] = _no_autocast
        # it warns that the loss is visible on the last stage's ranks only; trainer.py gives it to all
        rebinds["torchtitan.train.ensure_pp_loss_visible"] = lambda parallel_dims, job_config, color: None
    if is_cpu_only():
        values = {"device_module": CpuDevice, "device_type": "cpu"}
        rebinds.update({path: values[path.rpartition(".")[2]] for path in DEVICE_BINDINGS})
        # torchtitan runs lspci and assumes an A100; nan means unknown, and metrics.py shows no MFU then
        rebinds["torchtitan.tools.utils.get_peak_flops"] = lambda device_name: math.nan
        # torchtitan passes activities=[CPU, None] where there is no GPU, which torch refuses
        rebinds["torch.profiler.profile"] = _Profile
    return rebinds


_torchtitan_clip_grad_norm = dist_utils.clip_grad_norm_


def _clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: torch.distributed.DeviceMesh | None = None,
    ep_enabled: bool = False,
) -> torch.Tensor:
    if ep_enabled:  # expert gradients live on meshes that only torchtitan's own function knows
        return _torchtitan_clip_grad_norm(
            parameters, max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh, ep_enabled
        )
    return clip_grad_norm_(parameters, max_norm, [pp_mesh.get_group()] if pp_mesh is not None else [])


def _no_autocast(*args: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class _Profile(torch.profiler.profile):
    def __init__(self, *, activities: Iterable[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(activities=[a for a in activities or [] if a is not None] or None, **kwargs)
