"""Step lines and scalars against what torchtitan prints."""

from __future__ import annotations

import logging
import math

import pytest
from torchtitan.tools.logging import logger

from torchtitan_simplefsdp.titan.metrics import _HideUnknownPeak, _StepLine, _WithoutMfu


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


STEP = "step:  1  loss:  8.13328  tflops: 0.01  mfu: {}%"


@pytest.mark.parametrize(
    "mfu, expected",
    [
        (math.nan, "step:  1  loss:  8.13328  tflops: 0.01  eta: 0:00:09"),
        (41.5, "step:  1  loss:  8.13328  tflops: 0.01  mfu: 41.50%  eta: 0:00:09"),
    ],
)
def test_a_step_line_gets_an_eta_and_keeps_only_a_real_mfu(lines, mfu, expected):
    line = _StepLine("0:00:09", show_mfu=not math.isnan(mfu))
    logger.addFilter(line)
    logger.info(STEP.format("nan" if math.isnan(mfu) else f"{mfu:.2f}"))
    logger.removeFilter(line)
    assert lines() == [expected]


def test_the_line_about_an_unknown_peak_is_not_printed(lines):
    hide = _HideUnknownPeak()
    logger.addFilter(hide)
    logger.info("Peak FLOPS used for computing MFU: nan")
    logger.info("Peak FLOPS used for computing MFU: 9.890e+14")
    logger.removeFilter(hide)
    assert lines() == ["Peak FLOPS used for computing MFU: 9.890e+14"]


def test_no_mfu_is_written_where_the_peak_is_unknown():
    written = []

    class Recorder:
        def log(self, metrics, step):
            written.append((step, metrics))

    _WithoutMfu(Recorder()).log({"tflops": 1.0, "mfu(%)": math.nan}, 3)
    assert written == [(3, {"tflops": 1.0})]
