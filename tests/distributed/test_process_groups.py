"""Gloo process groups: one worker thread each, as two of them race in torch (compat.use_one_gloo_thread)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from torchtitan_simplefsdp.core import compat

from .meshes import build_meshes

TRAIN_ALONE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + {store!r}, rank=0, world_size=1)
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1,))
from torchtitan_simplefsdp import data_parallel
data_parallel(torch.nn.Linear(2, 2), mesh)
"""


def get_threads() -> list[int]:
    data, tensor = build_meshes("hybrid_shard", tp=2)
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    return [options._threads, compat.get_gloo_threads(data), compat.get_gloo_threads(tensor)]


def test_each_group_of_a_mesh_has_one_worker_thread(ranks):
    assert ranks.run(get_threads, 8) == [[1, 1, 1]] * 8


@pytest.mark.parametrize("imported_first", [True, False])
def test_groups_with_two_threads_are_warned_about(tmp_path, imported_first):
    script = TRAIN_ALONE.format(store=str(tmp_path / "store"))
    if imported_first:
        script = "from torchtitan_simplefsdp import data_parallel" + script
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ("2 worker threads each" in ran.stderr) is not imported_first
