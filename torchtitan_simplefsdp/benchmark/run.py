"""Run: a whole benchmark; all rows in turns in one set of processes, then each row in processes of its own.

Not here: what is done with the result (report.py, plot.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from .contenders import build_rows
from .measure import measure_alone, time_contenders
from .options import Options, validate_options
from .ranks import run_ranks
from .report import Measurement, Measurements

# Losses of the same weights and data may differ by rounding, and by no more than this part of them.
_LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}


def run_benchmark(options: Options, names: list[str], alone: bool, report: Callable[[str], None]) -> Measurements:
    """Measure contenders in the modes of `options`; `report` is given a line at each step.

    Args:
        names: of `CONTENDERS`.
        alone: whether to measure memory and compile time too, in processes of its own for each row.

    Raises:
        ValueError: options or names that are not possible.
    """
    validate_options(options)
    rows = build_rows(names, options.modes)
    report(f"timing {len(rows)} rows in {options.rounds} rounds")
    timed = run_ranks(time_contenders, options.ranks, options.threads, options, rows)
    measurements = check_losses({row: Measurement(**result) for row, result in zip(rows, timed)}, options.dtype)
    for row, measured in measurements.items():
        if alone and measured.error is None:
            report(f"memory of {row.contender} {row.mode}".rstrip())
            try:
                result = run_ranks(measure_alone, options.ranks, options.threads, options, row)
            except (ProcessExitedException, ProcessRaisedException) as error:  # out of memory, for one
                result = {"error": f"alone: {error}".strip().splitlines()[-1]}
            measurements[row] = replace(measured, **result)
    return measurements


def check_losses(measurements: Measurements, dtype: str) -> Measurements:
    """Return the measurements, with an error for each row that computes another loss than the first one that ran."""
    expected = next((measured.loss for measured in measurements.values() if measured.error is None), None)
    checked = {}
    for row, measured in measurements.items():
        if measured.error is None and abs(measured.loss - expected) > _LOSS_TOLERANCE[dtype] * abs(expected):
            measured = replace(measured, error=f"its loss is {measured.loss:.7g}, that of the first row {expected:.7g}")
        checked[row] = measured
    return checked
