"""Rules about where a run writes: the dump folder, and below it checkpoints, TensorBoard data and traces.

Without them a folder that cannot be written is found when the first file is due, which may be hours later. Nothing is
created here: what counts is the first parent that exists.

Not here: free space.
"""

import os
from collections.abc import Iterator

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_simplefsdp.titan.config.fault import Rule


def find_write_problem(folder: str) -> str | None:
    """Return why `folder` cannot be made or written to, None if it can."""
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return f"{path} is not a folder"
    return None if os.access(path, os.W_OK | os.X_OK) else f"no permission to write in {path}"


def _get_folder_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    dump_folder = config.job.dump_folder
    if problem := find_write_problem(dump_folder):
        yield f"job.dump_folder={dump_folder!r} cannot be written to: {problem}. Set it to a folder that can."
        return
    # each only if its feature is on, and a checkpoint folder only if something is saved
    below = {
        "checkpoint.folder": config.checkpoint.enable and not config.checkpoint.load_only,
        "metrics.save_tb_folder": config.metrics.enable_tensorboard,
        "profiling.save_traces_folder": config.profiling.enable_profiling,
        "profiling.save_memory_snapshot_folder": config.profiling.enable_memory_snapshot,
        "comm.save_traces_folder": config.comm.trace_buf_size > 0,
    }
    for key, is_written in below.items():
        section, _, name = key.partition(".")
        folder = getattr(getattr(config, section), name)
        problem = find_write_problem(os.path.join(dump_folder, folder)) if is_written else None
        if problem:
            yield f"{key}={folder!r} in job.dump_folder={dump_folder!r} cannot be written to: {problem}. Set one of them anew."


OUTPUT_RULES = (Rule(("job.dump_folder", "checkpoint", "metrics", "profiling", "comm"), _get_folder_faults),)
