"""The table of rebinds is complete and does what it says."""

from __future__ import annotations

import ast
import contextlib
import math
from pathlib import Path

import pytest
import torch
import torchtitan
from torchtitan.config import JobConfig

from torchtitan_simplefsdp.titan import rebind
from torchtitan_simplefsdp.titan.device import CpuDevice

ROOT = Path(torchtitan.__file__).parent


def get_module_level_bindings() -> set[str]:
    """Find, in torchtitan's sources, each module-level name that holds the device type or module."""
    found = set()
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "experiments":
            continue
        for node in ast.parse(file.read_text()).body:
            names = []
            if isinstance(node, ast.ImportFrom) and node.module == "torchtitan.tools.utils":
                names = [alias.asname or alias.name for alias in node.names if alias.name.startswith("device_")]
            elif isinstance(node, ast.Assign):
                targets = [t for target in node.targets for t in getattr(target, "elts", [target])]
                names = [t.id for t in targets if isinstance(t, ast.Name) and t.id in ("device_type", "device_module")]
            found |= {".".join(("torchtitan", *parts, name)) for name in names}
    return found


def test_the_table_names_every_device_binding_of_torchtitan():
    assert get_module_level_bindings() == set(rebind.DEVICE_BINDINGS)


def get_rebinds(monkeypatch, model: str, cpu_only: bool) -> dict:
    monkeypatch.setattr(rebind, "is_cpu_only", lambda: cpu_only)
    config = JobConfig()
    config.model.name = model
    return rebind._get_rebinds(config)


def test_on_a_gpu_the_device_layer_is_left_alone(monkeypatch):
    assert set(get_rebinds(monkeypatch, "simple_fsdp.llama3", cpu_only=False)) == {
        "torchtitan.components.metrics.TensorBoardLogger",
        "torchtitan.distributed.utils.clip_grad_norm_",
        "torchtitan.distributed.utils.maybe_enable_amp",
        "torchtitan.train.CheckpointManager",
        "torchtitan.train.ConfigManager",
        "torchtitan.train.ensure_pp_loss_visible",
    }
    assert set(get_rebinds(monkeypatch, "llama3", cpu_only=False)) == {
        "torchtitan.components.metrics.TensorBoardLogger",
        "torchtitan.distributed.utils.clip_grad_norm_",
        "torchtitan.train.CheckpointManager",
        "torchtitan.train.ConfigManager",
    }


def test_without_a_gpu_device_names_peak_flops_and_profiler_are_replaced(monkeypatch):
    rebinds = get_rebinds(monkeypatch, "llama3", cpu_only=True)
    assert all(rebinds[path] == "cpu" for path in rebind.DEVICE_BINDINGS if path.endswith("type"))
    assert all(rebinds[path] is CpuDevice for path in rebind.DEVICE_BINDINGS if path.endswith("module"))
    assert math.isnan(rebinds["torchtitan.tools.utils.get_peak_flops"]("a CPU"))
    with rebinds["torch.profiler.profile"](activities=[torch.profiler.ProfilerActivity.CPU, None]) as profiler:
        torch.ones(2) + 1
    assert any(event.key == "aten::add" for event in profiler.key_averages())


def test_every_rebound_name_exists_in_its_module(monkeypatch):
    import importlib

    for path in get_rebinds(monkeypatch, "simple_fsdp.llama3", cpu_only=True):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_no_autocast_is_added_to_our_models(monkeypatch):
    build = get_rebinds(monkeypatch, "simple_fsdp.llama3", cpu_only=True)["torchtitan.distributed.utils.maybe_enable_amp"]
    context = build(None, "bfloat16", "cpu")
    assert isinstance(context, contextlib.nullcontext)


@pytest.mark.parametrize("max_norm, expected", [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0])])
def test_the_gradient_norm_of_plain_parameters_is_torchs(max_norm, expected):
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert rebind._clip_grad_norm([parameter], max_norm).item() == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor(expected))
