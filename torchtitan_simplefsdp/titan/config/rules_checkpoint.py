"""Rules about checkpoints: what a run would load must be there, and what it is to load or save must be possible.

torchtitan finds these faults after the model is built, at the last save, or not at all: then it trains on from other
weights than were asked for. Where a run loads from: its own newest checkpoint if there is one, else `initial_load_path`.

Not here: whether a checkpoint is whole and fits the model (titan/checkpoint.py).
"""

import os
from collections.abc import Iterator

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_simplefsdp.titan.checkpoint_folder import DCP_FILE, find_saved_steps
from torchtitan_simplefsdp.titan.device import is_cpu_only
from torchtitan_simplefsdp.titan.config.fault import list_choices, Rule

_STATES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")  # of torchtitan's CheckpointManager


def settle_seed_checkpoint(config: JobConfig) -> None:
    """Make a configuration of any layout one of the single process that writes a seed checkpoint, in place.

    Only the model is saved, the only part of step 0 that a run loads: to save the optimizer, torchtitan would first make
    its state, twice the size of the model, and gradients.
    """
    parallelism, checkpoint = config.parallelism, config.checkpoint
    for dim in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel", "pipeline_parallel"):
        setattr(parallelism, f"{dim}_degree", 1)
    config.simple_fsdp.mode = "auto"
    checkpoint.last_save_model_only = True
    checkpoint.last_save_in_hf = False
    checkpoint.export_dtype = "float32"  # torchtitan's word for leaving the weights as they are


def _get_saving_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.keep_latest_k == 1:
        yield (
            "checkpoint.keep_latest_k=1 is not possible: the latest checkpoint may still be in the making. "
            "Use 0 to keep all, or at least 2."
        )
    if checkpoint.enable and checkpoint.async_mode.lower() == "async_with_pinned_mem" and is_cpu_only():
        yield (
            "checkpoint.async_mode='async_with_pinned_mem' needs a GPU, whose copies the pinned memory is for. Use 'async'."
        )
    if checkpoint.create_seed_checkpoint and world_size != 1:
        yield (
            f"checkpoint.create_seed_checkpoint needs one rank, got world size {world_size}. Start it with NGPU=1."
        )
    if checkpoint.create_seed_checkpoint and not checkpoint.enable:
        yield "checkpoint.create_seed_checkpoint needs checkpoint.enable. Add --checkpoint.enable."
    if checkpoint.enable and checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        yield (
            "checkpoint.last_save_in_hf needs checkpoint.last_save_model_only: Hugging Face's format holds weights only. "
            "Set it, or remove last_save_in_hf."
        )


def _get_ignored_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.enable:
        return
    asked = {
        f"initial_load_path={checkpoint.initial_load_path!r}": checkpoint.initial_load_path,
        "initial_load_in_hf": checkpoint.initial_load_in_hf,
        f"load_step={checkpoint.load_step}": checkpoint.load_step != -1,
        "load_only": checkpoint.load_only,
    }
    for key, is_asked in asked.items():
        if is_asked:
            yield (
                f"checkpoint.{key} loads nothing without checkpoint.enable. Add --checkpoint.enable (with "
                "--checkpoint.load_only nothing is saved), or remove it."
            )


def _get_loading_faults(config: JobConfig, world_size: int, train_spec: TrainSpec | None) -> Iterator[str]:
    checkpoint = config.checkpoint
    if not checkpoint.enable or checkpoint.create_seed_checkpoint:
        return
    unknown = [name for name in checkpoint.exclude_from_loading if name not in _STATES]
    if unknown:
        yield f"checkpoint.exclude_from_loading: unknown {list_choices(unknown)}. Known: {list_choices(_STATES)}."
    excluded = checkpoint.exclude_from_loading
    if "train_state" in excluded and "lr_scheduler" not in excluded:
        yield (
            "checkpoint.exclude_from_loading has 'train_state' and not 'lr_scheduler': steps would be counted from 1 again with the "
            "learning rates behind the checkpoint's step. Add 'lr_scheduler', or remove 'train_state'."
        )
    folder = os.path.join(config.job.dump_folder, checkpoint.folder)
    steps = find_saved_steps(folder)
    if checkpoint.load_step != -1 and checkpoint.load_step not in steps:
        yield (
            f"checkpoint.load_step={checkpoint.load_step}: no such checkpoint in {os.path.abspath(folder)}, which has "
            f"{_describe_steps(steps)}. Set it to one that is there, or to -1 for the latest."
        )
    if not steps and (checkpoint.initial_load_path or checkpoint.initial_load_in_hf):
        yield from _get_initial_load_faults(config)


def _get_initial_load_faults(config: JobConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield (
            "checkpoint.initial_load_in_hf needs checkpoint.initial_load_model_only: Hugging Face's format holds weights "
            "only. Set it, or remove initial_load_in_hf."
        )
    if checkpoint.initial_load_in_hf_quantized and not checkpoint.initial_load_in_hf:
        yield "checkpoint.initial_load_in_hf_quantized needs checkpoint.initial_load_in_hf. Add it, or remove both."
    path = checkpoint.initial_load_path or config.model.hf_assets_path
    name = f"checkpoint.initial_load_path={path!r}"
    if not checkpoint.initial_load_path:
        name = f"checkpoint.initial_load_in_hf without initial_load_path: model.hf_assets_path={path!r}"
    if not os.path.isdir(path):
        yield f"{name} is not a folder (looked in {os.path.abspath(path)}). Expected {_describe_expected(checkpoint)}."
        return
    files = os.listdir(path)
    if checkpoint.initial_load_in_hf:
        found = any(file.endswith(".safetensors") for file in files)
    else:
        found = DCP_FILE in files
    if not found:
        steps = find_saved_steps(path)
        hint = f" It has {_describe_steps(steps)}: name one of these folders." if steps else ""
        yield f"{name} holds no checkpoint. Expected {_describe_expected(checkpoint)}.{hint}"


def _describe_expected(checkpoint: JobConfig) -> str:
    if checkpoint.initial_load_in_hf:
        return "a folder with .safetensors files"
    return f"one step's folder, such as checkpoint/step-10, with a file {DCP_FILE} in it"


def _describe_steps(steps: list[int]) -> str:
    shown = ", ".join(f"step-{step}" for step in steps[-5:])
    return ("..., " if len(steps) > 5 else "") + shown if steps else "none"


CHECKPOINT_RULES = (
    Rule(("checkpoint",), _get_saving_faults),
    Rule(("checkpoint",), _get_ignored_faults),
    Rule(("checkpoint", "job.dump_folder", "model.hf_assets_path", "model.tokenizer_path"), _get_loading_faults),
)
