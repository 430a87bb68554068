"""SimpleFSDPTrainer: torchtitan's Trainer with right pipeline gradients and loss, accumulation that reduces once, progress.

Not here: the training loop, which is torchtitan's.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from torchtitan_simplefsdp.core.accumulation import accumulate_gradients
from torchtitan_simplefsdp.progress import report_progress

from .config.job_config import SERVED_MODELS
from .loss import TokenSumLoss


class SimpleFSDPTrainer(Trainer):
    """Trains any text model that torchtitan knows; what it adds is in the methods below."""

    _started = os.environ.get("SIMPLEFSDP_STARTED")  # when run_train.sh was called, in seconds since the epoch
    _microbatches_left = 0  # of the current optimizer step

    def __init__(self, job_config: JobConfig) -> None:
        self._accumulation = contextlib.ExitStack()
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

    def train(self) -> None:
        """As torchtitan's, then say where the results are."""
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
