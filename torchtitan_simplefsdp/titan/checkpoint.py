"""Checkpoints: torchtitan's CheckpointManager, made to pick whole ones, to load on any layout, and to explain itself.

What torchtitan 0.2.2 does otherwise: it takes the newest step that has a `.metadata`, cut off or not; it counts steps that were
never finished as kept, so keep_latest_k can delete the only good one; it saves over a folder that still has an older
`.metadata`; it ignores the configured first weights as soon as the checkpoint folder exists; what is missing or of
another shape ends in a traceback on every rank.

Not here: which steps are whole (checkpoint_folder.py), what fits (checkpoint_fit.py), the data's position (dataloader.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from .checkpoint_fit import get_misfits, read_shapes
from .checkpoint_folder import DCP_FILE, find_latest, find_saved_steps, find_steps, get_fault, get_path
from .checkpoint_formats import CheckpointError, describe_failure
from .hf_assets import write_hf_assets


class Source(NamedTuple):
    """Where to load from: a folder, whether its weights alone, and whether it has Hugging Face's format."""

    path: str
    model_only: bool
    in_hf: bool


class SimpleFSDPCheckpointManager(CheckpointManager):
    """Saves and loads as torchtitan's, and raises `CheckpointError`, the same on every rank, where that cannot be done."""

    _saving_path = ""  # of the save that was started last

    def load(self, step: int = -1) -> bool:
        """Load the newest whole checkpoint of this run (or that of `step`), else the configured first weights.

        Returns:
            Whether anything was loaded.
        """
        source = self._choose_source(step) if self.enable else None
        if source is None:
            return False
        logger.info(f"Loading the checkpoint from {source.path}.")
        begin = time.monotonic()
        with torch.no_grad(), _explained(f"loading {source.path} failed", lambda: self._advise_on_damage(source.path)):
            states = self._states_to_load(source.model_only)
            self._validate_fit(states, source)
            self.dcp_load(
                states, source.path, from_hf=source.in_hf, from_quantized=source.in_hf and self.initial_load_in_hf_quantized
            )
        GarbageCollection.collect("GC collection for checkpoint loading.")
        logger.info(f"Finished loading the checkpoint in {time.monotonic() - begin:.2f} seconds.")
        return True

    def _choose_source(self, step: int) -> Source | None:
        """Let rank 0 look, so that all ranks load the same even while a shared disk shows them different things.

        Raises: CheckpointError, if there is nothing to load where there has to be.
        """
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                found = [self._look_for_source(step)]
            except CheckpointError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], CheckpointError):
            raise found[0]
        return found[0]

    def _look_for_source(self, step: int) -> Source | None:
        latest = step
        if step == -1:
            latest, skipped = find_latest(self.folder)
            for line in skipped:
                logger.warning(f"Checkpoint skipped: {line}.")
            if latest is None and find_saved_steps(self.folder):
                raise CheckpointError(
                    f"no whole checkpoint is left in {os.path.abspath(self.folder)}: {'; '.join(skipped)}. "
                    "Bring one back, or move the folder away to start the run over."
                )
        elif fault := get_fault(get_path(self.folder, step)):
            raise CheckpointError(
                f"checkpoint.load_step={step}: {get_path(self.folder, step)} {fault}. "
                "Set it to another step, or to -1 for the latest."
            )
        elif newer := [other for other in find_saved_steps(self.folder) if other > step]:
            logger.warning(
                f"checkpoint.load_step={step} leaves newer checkpoints in {self.folder} ({newer}): a start without it takes the "
                "newest of them. Move them away to go on from here for good."
            )
        if latest is not None:
            path = get_path(self.folder, latest)
            if not os.path.isfile(os.path.join(path, DCP_FILE)):
                raise CheckpointError(
                    f"{path} has Hugging Face's format, weights alone: the run that saved it ended there. To go on from an "
                    f"earlier step, pass --checkpoint.load_step (there are: {find_saved_steps(self.folder) or 'none'}); to start "
                    "another run from these weights, pass --checkpoint.initial_load_in_hf --checkpoint.initial_load_path and "
                    "another checkpoint.folder."
                )
            return Source(path, model_only=latest == 0, in_hf=False)
        if not (self.initial_load_path or self.initial_load_in_hf):
            return None
        path = self.initial_load_path or self.sd_adapter.hf_assets_path
        if not self.initial_load_in_hf and (fault := get_fault(path)):
            raise CheckpointError(f"checkpoint.initial_load_path={path!r} {fault}. Set it to another checkpoint.")
        return Source(path, self.initial_load_model_only, self.initial_load_in_hf)

    def _validate_fit(self, states: dict[str, Any], source: Source) -> None:
        """Raise on every rank if any has a fault: alone, it would leave the others waiting."""
        model = {name: state for name, state in states.items() if isinstance(state, torch.Tensor)}
        if source.in_hf:
            model = self.sd_adapter.to_hf(model)
        all_names = set(_gather(list(model)))  # each pipeline stage has its own
        try:
            faults = self._get_misfits(states, model, all_names, source.path)
        except CheckpointError as error:
            faults = [str(error)]
        if distinct := list(dict.fromkeys(_gather(faults))):
            raise CheckpointError("\n".join(distinct))

    def _get_misfits(
        self, states: dict[str, Any], model: dict[str, torch.Tensor], all_names: set[str], path: str
    ) -> list[str]:
        """Return why this rank cannot load `states`; tell those who ask what the checkpoint holds."""
        saved = read_shapes(path)
        parts = [name for name, state in states.items() if isinstance(state, Stateful)]
        missing = [name for name in parts if not any(key.startswith(f"{name}.") for key in saved)]
        if missing:
            return [
                f"{path} holds no {', '.join(missing)}: it is not a checkpoint to go on from. To start a run from its weights, "
                "pass it as --checkpoint.initial_load_path with --checkpoint.initial_load_model_only and another "
                f"checkpoint.folder; to load what is there, pass --checkpoint.exclude_from_loading {','.join(missing)}."
            ]
        wanted = dict(model)
        for part in parts:
            if prepare := getattr(states[part], "prepare_to_load", None):
                prepare({key.removeprefix(f"{part}.") for key in saved if key.startswith(f"{part}.")})
            state_dict = states[part].state_dict()
            wanted |= {f"{part}.{name}": value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
        hint = "Load it into the model.flavor and tokenizer that it was saved with."
        return [f"{path} does not fit this run: {line}. {hint}" for line in get_misfits(wanted, saved, all_names)]

    def _advise_on_damage(self, path: str) -> str:
        others = [other for other in find_saved_steps(self.folder) if get_path(self.folder, other) != path]
        return f" If its files are damaged, move it away; other steps there: {others or 'none'}."

    def save_now(self, step: int) -> None:
        """Save whatever the interval, and wait until it is on disk; nothing to do if this step was just saved."""
        if not self._should_save(step):
            interval, self.interval = self.interval, 1
            self.save(step)
            self.interval = interval
        self._async_wait()

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        """As torchtitan's, into a new folder: one of this name was left by an earlier start of the run.

        In Hugging Face's format, what `transformers` needs beside the weights is written too.
        """
        self._saving_path = checkpoint_id
        if dist.get_rank() == 0:  # the others write after rank 0 has planned the save
            shutil.rmtree(checkpoint_id, ignore_errors=True)
        with self._saving():
            result = super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        if kwargs.get("to_hf") and dist.get_rank() == 0:
            shutil.rmtree(os.path.join(checkpoint_id, "sharded"), ignore_errors=True)  # the ranks' parts of the same weights
            adapter = self.sd_adapter
            try:
                write_hf_assets(checkpoint_id, adapter.model_args, adapter.hf_assets_path, self.export_dtype)
            except OSError as error:
                raise CheckpointError(
                    f"{checkpoint_id} has all weights, but what transformers needs beside them could not be written ({error}). "
                    "Mend the cause, then scripts/convert_checkpoint.py makes a complete folder of it."
                ) from error
        return result

    def _async_wait(self) -> None:
        with self._saving():
            super()._async_wait()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Around anything that can fail to save; then remove what there is of it: on a full disk the logs need room."""
        try:
            with _explained(f"saving {self._saving_path} failed"):
                yield
        except CheckpointError as error:
            if dist.get_rank() == 0:
                shutil.rmtree(self._saving_path, ignore_errors=True)
            dist.barrier()
            saved = find_saved_steps(self.folder)
            last = f"step-{saved[-1]} is the last whole checkpoint" if saved else "there is no whole checkpoint"
            free = shutil.disk_usage(self.folder).free / 2**30
            raise CheckpointError(
                f"{error} What was written of it is removed, with which {free:.2f} GiB are free there; {last}. Mend the cause "
                "and start the same command again."
            ) from error

    def _purge_stale_checkpoints(self) -> None:
        """Delete steps before the newest keep_latest_k finished ones; a save that is still running does not count as one.

        Neither do steps after it: an earlier start left them, and this one was made to load an older step, or had to.
        """
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        current = int(self._saving_path.rpartition("-")[2])
        finished = [step for step in find_saved_steps(self.folder) if step <= current]
        oldest_kept = min(finished[-self.keep_latest_k :], default=0)
        for step in find_steps(self.folder):
            if step < oldest_kept:
                self.purge_queue.put(get_path(self.folder, step))


@contextlib.contextmanager
def _explained(what: str, get_advice: Callable[[], str] = str) -> Iterator[None]:
    """Turn DCP's failures, which it gathers from all ranks, into one line; the advice is looked for after a failure only."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(f"{what} ({describe_failure(error)}).{get_advice()}") from error


def _gather(lines: list[str]) -> list[str]:
    """Return the lines of all ranks."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, lines)
    return [line for of_rank in gathered for line in of_rank]
