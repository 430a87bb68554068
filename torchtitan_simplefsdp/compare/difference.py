"""Difference: where and by how much one metric of a run departs from the baseline's.

Not here: which difference is an error (scripts/loss_compare.py).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One metric of a run against the baseline's. Steps are optimizer steps; None where nothing differs.

    Args:
        steps: steps that both have.
        missing: steps that one of them lacks; each counts as infinitely different.
        first_step: the first step that differs in any bit.
        largest_absolute: largest absolute difference, in the metric's unit.
        absolute_step: the first step that has it.
        largest_relative: largest absolute difference divided by the baseline's absolute value.
        relative_step: the first step that has it.
    """

    steps: int
    missing: int
    first_step: int | None
    largest_absolute: float
    absolute_step: int | None
    largest_relative: float
    relative_step: int | None


def is_equal(a: float, b: float) -> bool:
    """Answer whether two floats have the same bits; every nan equals every other."""
    return a.hex() == b.hex()


def get_difference(baseline: dict[int, float], values: dict[int, float], steps: int) -> Difference:
    """Compare the values of steps 1 to `steps`, and of any other step that is there."""
    all_steps = sorted({*range(1, steps + 1), *baseline, *values})
    both = [step for step in all_steps if step in baseline and step in values]
    differing = [step for step in all_steps if step not in both or not is_equal(baseline[step], values[step])]
    absolute = {step: _get_absolute(baseline.get(step), values.get(step)) for step in differing}
    relative = {step: _get_relative(absolute[step], baseline.get(step)) for step in differing}
    absolute_step = max(absolute, key=absolute.get, default=None)
    relative_step = max(relative, key=relative.get, default=None)
    return Difference(
        steps=len(both),
        missing=len(all_steps) - len(both),
        first_step=next(iter(differing), None),
        largest_absolute=absolute.get(absolute_step, 0.0),
        absolute_step=absolute_step,
        largest_relative=relative.get(relative_step, 0.0),
        relative_step=relative_step,
    )


def _get_absolute(baseline: float | None, value: float | None) -> float:
    if baseline is None or value is None or math.isnan(baseline) or math.isnan(value):
        return math.inf
    return abs(value - baseline)


def _get_relative(absolute: float, baseline: float | None) -> float:
    if absolute == 0:  # zeros of different sign
        return 0.0
    return absolute / abs(baseline) if baseline and math.isfinite(absolute) else math.inf
