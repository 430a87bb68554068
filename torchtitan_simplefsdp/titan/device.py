"""Device layer: the part of `torch.cuda` that torchtitan's trainer calls, for a machine without a GPU.

torchtitan 0.2.2 asks a device module for names, memory and synchronization and falls back to "cuda" where there is
none. `CpuDevice` answers for the CPU with gloo: memory is that of this process, measured. Linux only, as torchtitan's triton import is.

Not here: replacing torchtitan's bindings with it (rebind.py).
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from types import SimpleNamespace

import torch


def is_cpu_only() -> bool:
    """Return whether torch sees no accelerator, so the trainer has to run on CPU."""
    return not torch.accelerator.is_available()


class CpuDevice:
    """Stands in for `torch.cuda` in torchtitan; same names, same units (bytes)."""

    @staticmethod
    def set_device(device: torch.device) -> None:
        """Do nothing: there is one CPU."""

    @staticmethod
    def current_device() -> int:
        """Return the index that `torch.distributed.barrier(device_ids=...)` wants (`torch.cpu` returns a string)."""
        return 0

    @staticmethod
    def synchronize() -> None:
        """Do nothing: CPU ops are synchronous."""

    @staticmethod
    def get_device_name(device: torch.device | None = None) -> str:
        """Return the processor's model name."""
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())  # ARM lists no names

    @staticmethod
    def get_device_properties(device: torch.device | None = None) -> SimpleNamespace:
        """Return an object with `total_memory`: physical memory of the machine, in bytes."""
        return SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    @staticmethod
    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        """Return the process's peak resident set under the two names that torchtitan reads, in bytes."""
        peak = get_peak_resident_bytes()
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    @staticmethod
    def reset_peak_memory_stats() -> None:
        """Do nothing: the operating system keeps the peak since the process started."""

    @staticmethod
    def empty_cache() -> None:
        """Do nothing: CPU memory has no allocator cache of torch's own."""


def get_peak_resident_bytes() -> int:
    """Return the largest resident set that this process has had, in bytes."""
    # not getrusage's ru_maxrss: that survives exec, so it starts at the size of the launcher
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
