"""Rules about checkpoints; the messages are written by hand."""

import pytest
from config_workspace import get_faults, parse, workspace

from torchtitan_simplefsdp.titan.config import rules_checkpoint

# Flags, world size, the one fault ({cwd} is the current folder).
CASES = {
    "one_checkpoint": (
        "--checkpoint.keep_latest_k 1",
        1,
        "checkpoint.keep_latest_k=1 is not possible: the latest checkpoint may still be in the making. Use 0 to keep all, or at "
        "least 2.",
    ),
    "pinned_memory_without_a_gpu": (
        "--checkpoint.enable --checkpoint.async_mode async_with_pinned_mem",
        1,
        "checkpoint.async_mode='async_with_pinned_mem' needs a GPU, whose copies the pinned memory is for. Use 'async'.",
    ),
    "seed_checkpoint_on_two_ranks": (
        "--checkpoint.enable --checkpoint.create_seed_checkpoint",
        2,
        "checkpoint.create_seed_checkpoint needs one rank, got world size 2. Start it with NGPU=1.",
    ),
    "seed_checkpoint_without_checkpoints": (
        "--checkpoint.create_seed_checkpoint",
        1,
        "checkpoint.create_seed_checkpoint needs checkpoint.enable. Add --checkpoint.enable.",
    ),
    "last_save_of_everything_in_hf": (
        "--checkpoint.enable --checkpoint.last_save_in_hf --checkpoint.no_last_save_model_only",
        1,
        "checkpoint.last_save_in_hf needs checkpoint.last_save_model_only: Hugging Face's format holds weights only. Set it, or "
        "remove last_save_in_hf.",
    ),
    "unknown_state": (
        "--checkpoint.enable --checkpoint.exclude_from_loading optimizer,lr",
        1,
        "checkpoint.exclude_from_loading: unknown 'lr'. Known: 'model', 'optimizer', 'lr_scheduler', 'dataloader', 'train_state'.",
    ),
    "steps_from_1_with_a_schedule_that_goes_on": (
        "--checkpoint.enable --checkpoint.exclude_from_loading optimizer,train_state",
        1,
        "checkpoint.exclude_from_loading has 'train_state' and not 'lr_scheduler': steps would be counted from 1 again with the "
        "learning rates behind the checkpoint's step. Add 'lr_scheduler', or remove 'train_state'.",
    ),
    "missing_step": (
        "--checkpoint.enable --checkpoint.folder many --checkpoint.load_step 3",
        1,
        "checkpoint.load_step=3: no such checkpoint in {cwd}/outputs/many, which has ..., step-2, step-4, step-5, step-6, "
        "step-7. Set it to one that is there, or to -1 for the latest.",
    ),
    "missing_step_without_any": (
        "--checkpoint.enable --checkpoint.load_step -2",
        1,
        "checkpoint.load_step=-2: no such checkpoint in {cwd}/outputs/checkpoint, which has none. Set it to one that is "
        "there, or to -1 for the latest.",
    ),
    "unfinished_step": (
        "--checkpoint.enable --checkpoint.folder unfinished --checkpoint.load_step 1",
        1,
        "checkpoint.load_step=1: no such checkpoint in {cwd}/outputs/unfinished, which has none. Set it to one that is "
        "there, or to -1 for the latest.",
    ),
    "missing_path": (
        "--checkpoint.enable --checkpoint.initial_load_path nowhere",
        1,
        "checkpoint.initial_load_path='nowhere' is not a folder (looked in {cwd}/nowhere). Expected one step's folder, such "
        "as checkpoint/step-10, with a file .metadata in it.",
    ),
    "path_without_a_step": (
        "--checkpoint.enable --checkpoint.initial_load_path outputs/many",
        1,
        "checkpoint.initial_load_path='outputs/many' holds no checkpoint. Expected one step's folder, such as "
        "checkpoint/step-10, with a file .metadata in it. It has ..., step-2, step-4, step-5, step-6, step-7: name one of "
        "these folders.",
    ),
    "hf_path_in_another_format": (
        "--checkpoint.enable --checkpoint.initial_load_in_hf --checkpoint.initial_load_path outputs/many/step-7",
        1,
        "checkpoint.initial_load_path='outputs/many/step-7' holds no checkpoint. Expected a folder with .safetensors files.",
    ),
    "hf_assets_without_weights": (
        "--checkpoint.enable --checkpoint.initial_load_in_hf",
        1,
        "checkpoint.initial_load_in_hf without initial_load_path: model.hf_assets_path='tok' holds no checkpoint. Expected a "
        "folder with .safetensors files.",
    ),
    "hf_with_optimizer_state": (
        "--checkpoint.enable --checkpoint.initial_load_in_hf --checkpoint.no_initial_load_model_only "
        "--checkpoint.initial_load_path weights",
        1,
        "checkpoint.initial_load_in_hf needs checkpoint.initial_load_model_only: Hugging Face's format holds weights only. "
        "Set it, or remove initial_load_in_hf.",
    ),
    "quantized_in_another_format": (
        "--checkpoint.enable --checkpoint.initial_load_in_hf_quantized --checkpoint.initial_load_path outputs/many/step-7",
        1,
        "checkpoint.initial_load_in_hf_quantized needs checkpoint.initial_load_in_hf. Add it, or remove both.",
    ),
}
CASES |= {
    f"{flag}_without_enable": (
        f"--checkpoint.{flag}",
        1,
        f"checkpoint.{key} loads nothing without checkpoint.enable. Add --checkpoint.enable (with --checkpoint.load_only "
        "nothing is saved), or remove it.",
    )
    for flag, key in (
        ("initial_load_path weights", "initial_load_path='weights'"),
        ("initial_load_in_hf", "initial_load_in_hf"),
        ("load_step 4", "load_step=4"),
        ("load_only", "load_only"),
    )
}


@pytest.fixture
def checkpoints(workspace, monkeypatch):
    monkeypatch.setattr(rules_checkpoint, "is_cpu_only", lambda: True)
    for step in (1, 2, 4, 5, 6, 7):
        folder = workspace / "outputs" / "many" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    (workspace / "outputs" / "unfinished" / "step-1").mkdir(parents=True)
    (workspace / "weights").mkdir()
    (workspace / "weights" / "model-00001-of-00001.safetensors").touch()
    return workspace


@pytest.mark.parametrize("flags, world_size, fault", CASES.values(), ids=CASES.keys())
def test_a_broken_rule_is_the_one_fault(checkpoints, flags, world_size, fault):
    assert get_faults(checkpoints, flags=flags, world_size=world_size) == [fault.replace("{cwd}", str(checkpoints))]


@pytest.mark.parametrize(
    "flags",
    [
        "--checkpoint.enable --checkpoint.create_seed_checkpoint --checkpoint.keep_latest_k 0",
        "--checkpoint.enable --checkpoint.folder many --checkpoint.load_step 7 --checkpoint.exclude_from_loading dataloader",
        "--checkpoint.enable --checkpoint.folder many --checkpoint.initial_load_path gone",  # a resumed run ignores it
        # a run that was interrupted in its first save starts again
        "--checkpoint.enable --checkpoint.folder unfinished --checkpoint.initial_load_path outputs/many/step-7",
        "--checkpoint.enable --checkpoint.folder new --checkpoint.initial_load_path outputs/many/step-7",
        "--checkpoint.enable --checkpoint.initial_load_path weights --checkpoint.initial_load_in_hf",
        "--checkpoint.enable --checkpoint.folder= --checkpoint.load_only",
        "--checkpoint.export_dtype bfloat16 --checkpoint.last_save_in_hf",
    ],
)
def test_what_is_possible_is_not_refused(checkpoints, flags):
    assert parse(checkpoints, flags=flags)


def test_a_seed_checkpoint_of_any_layout_is_the_model_alone_on_one_process(workspace):
    layout = "--parallelism.tensor_parallel_degree 8 --parallelism.data_parallel_replicate_degree 2 --simple_fsdp.mode replicate"
    saving = "--checkpoint.last_save_in_hf --checkpoint.last_save_model_only --checkpoint.export_dtype bfloat16"
    config = parse(workspace, flags=f"--checkpoint.enable --checkpoint.create_seed_checkpoint {layout} {saving}")
    parallelism, checkpoint = config.parallelism, config.checkpoint
    assert (parallelism.tensor_parallel_degree, parallelism.data_parallel_replicate_degree) == (1, 1)
    assert (checkpoint.last_save_model_only, checkpoint.last_save_in_hf) == (True, False)
    assert checkpoint.export_dtype == "float32"
