"""Ranks: run a function on the ranks of one machine, in new processes, and return what rank 0 returned.

One process per rank, gloo on CPU and NCCL where there are GPUs; they meet in a file, no port is taken. Compiled code is
cached in a folder that is deleted with them, so that each set of processes compiles from scratch.

Not here: what ranks do (measure.py).
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=10)  # of one collective; a rank may compile while the others wait


def run_ranks(function: Callable[..., Any], ranks: int, threads: int, *args: Any) -> Any:
    """Call `function(device, *args)` on every rank; return rank 0's result, as JSON keeps it.

    Raises:
        torch.multiprocessing.ProcessException: a rank raised or died; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, (function, ranks, threads, Path(folder), args), nprocs=ranks)
        return json.loads((Path(folder) / "result.json").read_text())


def _run_rank(rank: int, function: Callable[..., Any], ranks: int, threads: int, folder: Path, args: tuple) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    torch.set_num_threads(threads)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=TIMEOUT,
    )
    result = function(device, *args)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
