"""The checkpoint manager on one process; torchtitan's own is the contrast, what was done to the files the oracle."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from torchtitan_simplefsdp.titan.checkpoint import SimpleFSDPCheckpointManager
from torchtitan_simplefsdp.titan.checkpoint_folder import find_saved_steps, get_path
from torchtitan_simplefsdp.titan.checkpoint_formats import CheckpointError


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Number(Stateful):
    """Stands in for optimizer, scheduler, data loader and train state."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]


class Run:
    """A model of one layer, all of whose states have the same value, and its checkpoints."""

    def __init__(self, dump_folder, out_features: int = 3, manager=SimpleFSDPCheckpointManager, **checkpoint) -> None:
        config = JobConfig().checkpoint
        values = {"enable": True, "folder": "", "interval": 1, "keep_latest_k": 0, "last_save_model_only": False}
        for name, value in (values | checkpoint).items():
            setattr(config, name, value)
        self.model = nn.Linear(2, out_features, bias=False)
        self.states = [Number() for _ in range(4)]
        optimizer, scheduler, loader, train_state = self.states
        states = {"train_state": train_state}
        self.manager = manager(loader, [self.model], optimizer, scheduler, states, config, None, str(dump_folder))

    def set(self, value: float) -> None:
        nn.init.constant_(self.model.weight, value)
        for state in self.states:
            state.value = torch.tensor(value)

    def get(self) -> set[float]:
        return {state.value.item() for state in self.states} | set(self.model.weight.flatten().tolist())

    def save(self, *steps: int) -> None:
        for step in steps:
            self.set(float(step))
            self.manager.save(step)


@pytest.fixture
def saved(tmp_path):
    """A folder with the steps 2, 4 and 6."""
    Run(tmp_path).save(2, 4, 6)
    return tmp_path


def cut_off(folder, step: int) -> None:
    with open(os.path.join(get_path(str(folder), step), "__0_0.distcp"), "r+b") as file:
        file.truncate(10)


def drop_metadata(folder, step: int) -> None:
    os.remove(os.path.join(get_path(str(folder), step), ".metadata"))


@pytest.fixture
def warnings_of(caplog):
    logger.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    logger.removeHandler(caplog.handler)


def test_the_newest_whole_step_is_loaded_and_newer_ones_are_named(saved, warnings_of):
    drop_metadata(saved, 6)
    cut_off(saved, 4)
    run = Run(saved)
    assert run.manager.load()
    assert run.get() == {2.0}
    first, second = warnings_of()
    assert first == "Checkpoint skipped: step-6 was not finished (no .metadata)."
    assert second.startswith("Checkpoint skipped: step-4 has a file that was cut off: __0_0.distcp has 10 of ")


def test_a_given_step_is_loaded_or_refused(saved):
    run = Run(saved)
    assert run.manager.load(4)
    assert run.get() == {4.0}
    cut_off(saved, 4)
    with pytest.raises(CheckpointError, match="checkpoint.load_step=4: .*step-4 has a file that was cut off"):
        run.manager.load(4)
    with pytest.raises(CheckpointError, match="checkpoint.load_step=5: .*step-5 does not exist. Set it to another step"):
        run.manager.load(5)


def test_a_folder_without_a_whole_step_gives_the_configured_first_weights(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    run = Run(other, initial_load_path=get_path(str(saved), 4))
    assert run.manager.load() and run.get() == {0.0, 4.0}  # the model's, which alone are loaded
    os.mkdir(get_path(str(other), 2))  # interrupted in its first save
    run = Run(other, initial_load_path=get_path(str(saved), 4))
    assert run.manager.load() and run.get() == {0.0, 4.0}
    assert not Run(other).manager.load()


def test_a_run_does_not_start_over_when_all_it_has_is_damaged(tmp_path):
    Run(tmp_path).save(2)
    cut_off(tmp_path, 2)
    with pytest.raises(CheckpointError, match="no whole checkpoint is left in .*: step-2 has a file that was cut off.* start the run over"):
        Run(tmp_path).manager.load()


def test_a_file_that_breaks_while_it_is_read_is_one_line_with_the_other_steps(saved):
    data = os.path.join(get_path(str(saved), 6), "__0_0.distcp")
    with open(data, "r+b") as file:
        file.write(bytes(os.path.getsize(data)))
    with pytest.raises(CheckpointError, match=r"loading .*step-6 failed \(rank 0: .*\). If .* other steps there: \[2, 4\]") as error:
        Run(saved).manager.load()
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


def test_going_back_with_load_step_names_the_newer_steps(saved, warnings_of):
    Run(saved).manager.load(2)
    (line,) = warnings_of()
    assert "leaves newer checkpoints" in line and "[4, 6]" in line


def test_another_model_is_one_line_and_nothing_is_loaded(saved):
    run = Run(saved, out_features=5)
    run.set(1.0)
    with pytest.raises(CheckpointError, match=r"step-6 does not fit this run: .*weight is \[3, 2\] there and \[5, 2\] here") as error:
        run.manager.load()
    assert "\n" not in str(error.value)
    assert run.get() == {1.0}
    run.manager.states["model"].cache_state_dict["extra"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="1 of 6 keys are missing in the checkpoint: extra"):
        run.manager.load()


def test_weights_alone_are_no_checkpoint_to_go_on_from(tmp_path):
    run = Run(tmp_path, last_save_model_only=True)
    run.set(3.0)
    run.manager.save(3, last_step=True)
    with pytest.raises(CheckpointError, match="step-3 holds no train_state, optimizer, dataloader, lr_scheduler: ") as error:
        Run(tmp_path).manager.load()
    excluded = str(error.value).rpartition("--checkpoint.exclude_from_loading ")[2].rstrip(".")
    run = Run(tmp_path, exclude_from_loading=excluded.split(","))
    assert run.manager.load() and run.get() == {0.0, 3.0}
    run = Run(tmp_path, folder="next", initial_load_path=get_path(str(tmp_path), 3))
    assert run.manager.load() and run.get() == {0.0, 3.0}


def test_weights_in_hugging_face_format_are_refused_with_the_way_out(saved):
    os.mkdir(get_path(str(saved), 8))
    open(os.path.join(get_path(str(saved), 8), "model.safetensors.index.json"), "w").close()
    with pytest.raises(CheckpointError, match=r"step-8 has Hugging Face's format.*--checkpoint.load_step \(there are: \[2, 4, 6\]\)"):
        Run(saved).manager.load()


@pytest.mark.parametrize("manager, kept", [(SimpleFSDPCheckpointManager, [4, 6]), (CheckpointManager, [])])
def test_saves_that_never_finished_do_not_count_as_kept(saved, manager, kept):
    run = Run(saved, manager=manager, keep_latest_k=2)
    for step in (8, 10):  # one was interrupted, one is still running
        os.mkdir(get_path(str(saved), step))
    run.manager._saving_path = get_path(str(saved), 10)
    run.manager._purge_stale_checkpoints()
    run.manager.close()
    assert find_saved_steps(str(saved)) == kept


def test_newer_steps_that_cannot_be_loaded_do_not_cost_the_good_ones(saved):
    Run(saved).save(8)
    for step in (6, 8):
        cut_off(saved, step)
    run = Run(saved, keep_latest_k=2)
    assert run.manager.load() and run.get() == {4.0}
    run.save(5)
    run.manager.close()
    assert find_saved_steps(str(saved)) == [4, 5, 6, 8]


def test_only_the_newest_steps_are_kept_and_leftovers_before_them_are_removed(tmp_path):
    run = Run(tmp_path, keep_latest_k=2)
    os.mkdir(get_path(str(tmp_path), 1))
    run.save(2, 3, 4, 5)
    run.manager.close()
    assert sorted(os.listdir(tmp_path)) == ["step-4", "step-5"]


def test_a_save_that_fails_is_one_line_and_leaves_nothing_behind(saved, monkeypatch):
    run = Run(saved)
    (saved / "step-8").mkdir()
    (saved / "step-8" / ".metadata").write_text("of an earlier start")

    def fail(*args, **kwargs):
        assert not (saved / "step-8" / ".metadata").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.distributed.checkpoint.FileSystemWriter, "write_data", fail)
    with pytest.raises(CheckpointError) as error:
        run.save(8)
    assert str(error.value).startswith(f"saving {saved}/step-8 failed (rank 0: OSError: [Errno 28] No space left on device). ")
    assert "step-6 is the last whole checkpoint." in str(error.value)
    assert not (saved / "step-8").exists()


def test_a_save_now_does_not_wait_for_the_interval_nor_save_twice(tmp_path):
    run = Run(tmp_path, interval=10)
    run.manager.save(7)
    assert find_saved_steps(str(tmp_path)) == []
    run.manager.save_now(7)
    assert find_saved_steps(str(tmp_path)) == [7]
    run.manager.save(10)
    shutil.rmtree(get_path(str(tmp_path), 10))
    run.manager.save_now(10)
    assert find_saved_steps(str(tmp_path)) == [7]
    run.manager.save(11)
    assert find_saved_steps(str(tmp_path)) == [7]


def test_a_checkpoint_with_more_layers_is_refused(tmp_path):
    run = Run(tmp_path)
    run.manager.states["model"].cache_state_dict |= {f"layers.{i}.weight": torch.zeros(2) for i in range(3)}
    run.save(2)
    run = Run(tmp_path)
    run.manager.states["model"].cache_state_dict |= {f"layers.{i}.weight": torch.zeros(2) for i in range(2)}
    with pytest.raises(CheckpointError, match="1 keys of the checkpoint are layers too many here: layers.2.weight"):
        run.manager.load()
