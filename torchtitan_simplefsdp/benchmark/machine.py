"""Machine: what a measurement depends on beside the code; its processor, its load, the versions that ran.

Not here: names and paths of the machine, which say nothing about its speed.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Return a description for the report, as JSON keeps it."""
    return {
        "processor": get_processor(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def get_processor(cpuinfo: str) -> str:
    """Return the processor's model from the text of /proc/cpuinfo; where that has none, the architecture."""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def get_load() -> float:
    """Return the processes that ran or wanted to, on average over the last minute."""
    return os.getloadavg()[0]
