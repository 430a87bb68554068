"""SimpleFSDPTrainer: torchtitan's Trainer with right pipeline gradients and loss, one reduction per step, a stop that saves.

Not here: the training loop, which is torchtitan's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from torchtitan_simplefsdp.core.accumulation import accumulate_gradients
from torchtitan_simplefsdp.progress import report_progress
from torchtitan_simplefsdp.stop import StopRequest

from .config.job_config import SERVED_MODELS
from .loss import TokenSumLoss


class Stopped(Exception):
    """The run was told to stop and has saved; the message is for the user."""


class SimpleFSDPTrainer(Trainer):
    """Trains any text model that torchtitan knows; what it adds is in the methods below."""

    _started = os.environ.get("SIMPLEFSDP_STARTED")  # when run_train.sh was called, in seconds since the epoch
    _microbatches_left = 0  # of the current optimizer step
    _tokens_loaded, _share_loaded = 0, 0  # seen before this start by all ranks, and this rank's part of them
    _loads_total = True
    _step_loaded = 0

    def __init__(self, job_config: JobConfig) -> None:
        self._accumulation = contextlib.ExitStack()
        self._stop_request = StopRequest()
        super().__init__(job_config)

    def forward_backward_step(self, **microbatch: Any) -> torch.Tensor:
        """As torchtitan's, with gradients summed over replicas after the last microbatch of the step.

        torchtitan calls this once per microbatch and does not say which is the last, so the context is left by count.
        """
        if self._microbatches_left == 0:
            self._microbatches_left = self.gradient_accumulation_steps
            if self._accumulates():
                for part in self.model_parts:
                    self._accumulation.enter_context(accumulate_gradients(part))
        loss = self._forward_backward_microbatch(**microbatch)
        self._microbatches_left -= 1
        if self._microbatches_left == 0:
            self._accumulation.close()
        return loss

    def _accumulates(self) -> bool:
        several = self.gradient_accumulation_steps > 1 or self.parallel_dims.pp_enabled
        config = self.job_config
        return several and config.model.name in SERVED_MODELS and config.simple_fsdp.replica_reduction == "per_step"

    def _forward_backward_microbatch(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """As torchtitan's; under pipeline parallelism the schedule's loss is divided too, and all ranks return it."""
        if not (self.parallel_dims.pp_enabled and isinstance(self.loss_fn, TokenSumLoss)):
            return super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
        with self.loss_fn.divided_by(global_valid_tokens):
            loss = super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=torch.ones((), device=self.device)
            )
        # torchtitan's loss is -1 on all stages but the last; every rank gets the real one, so rank 0 can show it
        loss = loss.detach()
        loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).reshape(()) * self.pp_has_last_stage
        torch.distributed.all_reduce(loss, group=self.parallel_dims.get_mesh("pp").get_group())
        return loss

    def train_step(self, data_iterator: Any) -> None:
        """As torchtitan's, then tell the launcher's progress bar; after the first one, say how long the start took."""
        super().train_step(data_iterator)
        if self._started and torch.distributed.get_rank() == 0:
            seconds = time.time() - float(self._started)
            logger.info(f"Time from the command to the end of step {self.step}: {seconds:.1f} s")
        self._started = None
        report_progress(self.step, self.job_config.training.steps)

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """As torchtitan's, which counts the tokens of a sequence on each of the cp ranks that share it."""
        cp = self.parallel_dims.cp
        for input_dict, labels in super().batch_generator(data_iterable):
            self.ntokens_seen -= labels.numel() * (cp - 1) // cp
            yield input_dict, labels

    def should_continue_training(self) -> bool:
        """As torchtitan's; if any rank was told to stop, save and raise `Stopped` on all of them."""
        continues = super().should_continue_training()
        if continues and self._saves():
            received = torch.tensor(int(self._stop_request.received), device=self.device)
            torch.distributed.all_reduce(received, torch.distributed.ReduceOp.MAX)
            if received.item():
                raise Stopped(f"run_train.sh: stopped by SIGTERM {self._save_to_stop()} The same command goes on from there.")
        return continues

    def _saves(self) -> bool:
        return self.job_config.checkpoint.enable and not self.job_config.checkpoint.load_only

    def _save_to_stop(self) -> str:
        if self.step == self._step_loaded:
            return f"before step {self.step + 1}, there is nothing new to save."
        self.checkpointer.save_now(self.step)
        return f"after step {self.step}, which is saved in {os.path.abspath(self.checkpointer.folder)}."

    def prepare_to_load(self, saved: set[str]) -> None:
        """Ask for what a checkpoint has: torchtitan's own lacks the tokens of all ranks."""
        self._loads_total = "tokens_seen" in saved

    def state_dict(self) -> dict[str, Any]:
        """As torchtitan's, whose `ntokens_seen` is one rank's, and the tokens of all ranks, for starts with another number."""
        ranks, _ = self._get_loss_ranks()
        total = self._tokens_loaded + (self.ntokens_seen - self._share_loaded) * ranks
        return {"step": self.step, "ntokens_seen": total // ranks} | ({"tokens_seen": total} if self._loads_total else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a share of the tokens seen, such that those of all ranks add up to the whole."""
        ranks, rank = self._get_loss_ranks()
        self.step = self._step_loaded = state_dict["step"]
        self._tokens_loaded = state_dict["tokens_seen"] if self._loads_total else state_dict["ntokens_seen"] * ranks
        self._share_loaded = self.ntokens_seen = (self._tokens_loaded + ranks - 1 - rank) // ranks
        self._loads_total = True

    def _get_loss_ranks(self) -> tuple[int, int]:
        mesh = self.parallel_dims.get_optional_mesh("loss")
        return (mesh.size(), mesh.get_local_rank()) if mesh is not None else (1, 0)

    def train(self) -> None:
        """As torchtitan's, then say where the results are."""
        if self._saves():
            self._stop_request.listen()
        super().train()
        if torch.distributed.get_rank() == 0:
            logger.info(self._get_closing_line())

    def _get_closing_line(self) -> str:
        config, dump_folder = self.job_config, Path(self.job_config.job.dump_folder)
        places = {
            "checkpoints": config.checkpoint.enable and dump_folder / config.checkpoint.folder,
            "TensorBoard": config.metrics.enable_tensorboard and dump_folder / config.metrics.save_tb_folder,
            "traces": config.profiling.enable_profiling and dump_folder / config.profiling.save_traces_folder,
        }
        found = [f"{what} in {os.path.abspath(where)}" for what, where in places.items() if where]
        return f"Finished step {self.step}. " + ("; ".join(found) or "No checkpoints, TensorBoard or traces enabled") + "."
