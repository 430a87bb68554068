"""Reading scalars and comparing them; the oracles are written by hand."""

import math
import struct

import pytest
from tests.integration.compare_stub import GRAD_NORM, LOSS, write_scalars

from torchtitan_simplefsdp.compare.difference import get_difference
from torchtitan_simplefsdp.compare.scalars import count_complete_steps, read_scalars


def to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def test_all_steps_are_read_with_every_bit_of_float32(tmp_path):
    values = {step: 1 / step for step in range(1, 10_502)}  # TensorBoard's own default is a sample of 10,000
    write_scalars(tmp_path, LOSS, values)
    assert read_scalars(tmp_path) == {"loss": {s: to_float32(v) for s, v in values.items()}, "grad_norm": {}}


def test_of_a_step_done_twice_the_later_value_counts(tmp_path):
    write_scalars(tmp_path / "b", LOSS, {1: 3.0, 2: 2.0, 3: 1.0}, wall_time=10)
    write_scalars(tmp_path / "a", LOSS, {3: 1.5, 4: 0.5}, wall_time=20)
    assert read_scalars(tmp_path)["loss"] == {1: 3.0, 2: 2.0, 3: 1.5, 4: 0.5}


def test_an_event_file_cut_in_the_middle_gives_what_is_whole(tmp_path):
    write_scalars(tmp_path, LOSS, {1: 3.0, 2: 2.0})
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert read_scalars(tmp_path)["loss"] == {1: 3.0}


@pytest.mark.parametrize("steps, expected", [([], 0), ([2], 0), ([1], 1), ([1, 2, 4], 2)])
def test_a_run_may_resume_only_up_to_the_first_step_that_is_missing(tmp_path, steps, expected):
    write_scalars(tmp_path, LOSS, dict.fromkeys([1, 2, 3, 4], 1.0))
    write_scalars(tmp_path, GRAD_NORM, dict.fromkeys(steps, 1.0))
    assert count_complete_steps(read_scalars(tmp_path)) == expected


def test_equal_values_do_not_differ_even_if_they_are_nan_or_infinite():
    values = {1: 1.0, 2: math.nan, 3: -math.inf}
    difference = get_difference(values, {**values, 2: -math.nan}, 3)
    assert (difference.steps, difference.missing, difference.first_step) == (3, 0, None)
    assert difference.largest_absolute == difference.largest_relative == 0


def test_one_bit_is_a_difference():
    difference = get_difference({1: 1.0, 2: 1.0}, {1: 1.0, 2: math.nextafter(1.0, 2)}, 2)
    assert difference.first_step == 2
    assert difference.largest_absolute == difference.largest_relative == 2**-52


def test_the_largest_absolute_and_relative_differences_are_each_found_with_their_step():
    difference = get_difference({1: 1.0, 2: 100.0, 3: 0.5}, {1: 1.0, 2: 110.0, 3: 1.0}, 3)
    assert (difference.first_step, difference.largest_absolute, difference.absolute_step) == (2, 10.0, 2)
    assert (difference.largest_relative, difference.relative_step) == (1.0, 3)


@pytest.mark.parametrize(
    "baseline, value", [(1.0, math.nan), (math.nan, 1.0), (0.0, 1.0), (math.inf, 1.0), (1.0, None), (None, 1.0)]
)
def test_what_cannot_be_divided_or_is_missing_differs_infinitely(baseline, value):
    as_steps = lambda v: {1: 1.0} if v is None else {1: 1.0, 2: v}  # noqa: E731
    difference = get_difference(as_steps(baseline), as_steps(value), 2)
    assert (difference.first_step, difference.largest_relative, difference.relative_step) == (2, math.inf, 2)
    assert difference.missing == (baseline is None or value is None)


def test_a_step_that_both_lack_is_missing():
    difference = get_difference({1: 1.0}, {1: 1.0}, 2)
    assert (difference.steps, difference.missing, difference.first_step) == (1, 1, 2)


def test_zeros_of_different_sign_differ_by_nothing_but_their_bits():
    difference = get_difference({1: 0.0}, {1: -0.0}, 1)
    assert (difference.first_step, difference.largest_absolute, difference.largest_relative) == (1, 0, 0)
