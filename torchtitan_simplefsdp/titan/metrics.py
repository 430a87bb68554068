"""Metrics: torchtitan's step lines and TensorBoard scalars, plus an ETA, minus an MFU that would be made up.

Not here: what is measured, which is torchtitan's; the progress bar on a terminal (progress.py).
"""

from __future__ import annotations

import logging
import math
import re
import time
from datetime import timedelta
from typing import Any

from torchtitan.components.metrics import BaseLogger, MetricsProcessor, TensorBoardLogger
from torchtitan.tools.logging import logger

MFU_TAG = "mfu(%)"


class SimpleFSDPMetricsProcessor(MetricsProcessor):
    """Logs as torchtitan does; where the device's peak FLOPS is unknown (CPU), no MFU is shown or written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first: tuple[int, float] | None = None  # first logged step and when it ended
        if math.isnan(self.gpu_peak_flops):
            self.logger = _WithoutMfu(self.logger)
            logger.addFilter(_HideUnknownPeak())

    def log(self, step: int, *args: Any, **kwargs: Any) -> None:
        """Log one step as torchtitan's `MetricsProcessor.log`, whose line gets an ETA at its end."""
        line = _StepLine(self._get_eta(step), show_mfu=not math.isnan(self.gpu_peak_flops))
        logger.addFilter(line)  # torchtitan formats and prints the line in one call
        try:
            super().log(step, *args, **kwargs)
        finally:
            logger.removeFilter(line)

    def _get_eta(self, step: int) -> str:
        """Return the time left at the mean pace since the first logged step; that step holds start-up costs."""
        now = time.perf_counter()
        if self._first is None:
            self._first = (step, now)
            return "?"
        first_step, first_time = self._first
        seconds = (now - first_time) / max(1, step - first_step) * (self.job_config.training.steps - step)
        return str(timedelta(seconds=round(seconds)))


class FlushedTensorBoardLogger(TensorBoardLogger):
    """torchtitan's, with every step on disk when it is logged: tensorboard keeps two minutes in memory, lost by a SIGKILL."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        super().log(metrics, step)
        self.writer.flush()


class _StepLine(logging.Filter):
    def __init__(self, eta: str, show_mfu: bool) -> None:
        super().__init__()
        self._eta, self._show_mfu = eta, show_mfu

    def filter(self, record: logging.LogRecord) -> bool:
        if "step:" in record.msg:
            if not self._show_mfu:
                record.msg = re.sub(r"mfu: nan%", "", record.msg).rstrip()
            record.msg += f"  eta: {self._eta}"
        return True


class _HideUnknownPeak(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().endswith("computing MFU: nan")


class _WithoutMfu(BaseLogger):
    def __init__(self, inner: BaseLogger) -> None:
        self._inner = inner

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self._inner.log({tag: value for tag, value in metrics.items() if tag != MFU_TAG}, step)

    def close(self) -> None:
        self._inner.close()
