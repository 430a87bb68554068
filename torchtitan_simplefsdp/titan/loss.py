"""Loss: torchtitan's summed loss, divisible by the global token count inside a pipeline schedule.

torchtitan 0.2.2 divides only the loss it logs under pipeline parallelism; the schedule backpropagates the sum, so
gradients are too large by the token count (grad norm 6385 instead of 3.118 at 2048 tokens).

Not here: the loss function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import JobConfig


class TokenSumLoss:
    """A summed loss that divides by a token count while `divided_by` is active."""

    def __init__(self, loss_fn: Callable[..., torch.Tensor]) -> None:
        self._loss_fn = loss_fn
        self._divisor: torch.Tensor | float | None = None

    def __call__(self, pred: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss summed over tokens, or divided by the active count."""
        loss = self._loss_fn(pred, labels)
        return loss if self._divisor is None else loss / self._divisor

    @contextmanager
    def divided_by(self, tokens: torch.Tensor | float) -> Iterator[None]:
        """Divide by `tokens` (valid tokens of the global batch) inside the context."""
        self._divisor = tokens
        try:
            yield
        finally:
            self._divisor = None


def build_loss(job_config: JobConfig, **kwargs: Any) -> TokenSumLoss:
    """Build the loss function of the TrainSpec."""
    return TokenSumLoss(build_cross_entropy_loss(job_config, **kwargs))
