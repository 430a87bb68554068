"""Memory: the peak of a rank while something runs, measured by the kernel (CPU) or by torch's allocator (GPU).

On a CPU it is the resident set of the whole process, so a contender has to have the process for itself, and what is
counted is the difference from before its model was built.

The C library would keep most of what is freed, in amounts that depend on sizes and threads, and the peak would be that
of its habits: `return_freed_memory` makes it give every tensor of 64 KiB or more back to the kernel at once.

Not here: what runs meanwhile (measure.py).
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch


_M_MMAP_THRESHOLD = -3  # see mallopt(3); setting it also stops the C library from raising it by itself


def return_freed_memory() -> None:
    """Have this process return large blocks to the kernel when they are freed; slower, so not where time is measured."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)


def reset_peak(device: torch.device) -> int:
    """Forget the peak so far, give back what is free, and return the bytes that are in use now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # the C library keeps freed pages, which are nobody's
    Path("/proc/self/clear_refs").write_text("5")  # see proc(5); makes VmHWM start again at VmRSS
    return _read_status("VmRSS")


def get_peak(device: torch.device) -> int:
    """Return the most bytes that were in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _read_status("VmHWM")


def _read_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{key}:"))
    return int(value) * 1024
