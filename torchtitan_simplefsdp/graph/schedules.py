"""Schedules: what is bucketed, prefetched and overlapped, and the step that it gives, predicted.

[Note: what overlaps]
Without overlap compute waits for every collective: what the front end alone does. With overlap, gathers are issued
ahead by `prefetch` buckets and reductions are waited for at the end of the step. All collectives share one stream:
gathers and reductions travel over the same wires. A gathered bucket is held until its last use: with reshard in each
of forward and backward, else from forward to backward.

Not here: what a step consists of (segments.py), how long things take (cost_model.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cost_model import CostModel
from .segments import Step, Unit, get_collective_seconds
from .simulate import COMMUNICATION, COMPUTE, Task, Timeline, simulate
from .trace import Collective


class Schedule(NamedTuple):
    """How data-parallel collectives are issued.

    Args:
        bucket: 'parameter': a collective each; 'block': a layer's together, and those before and after the layers; a
            number: consecutive parameters together up to so many bytes as gathered (or reduced, where nothing is
            gathered), across layers.
        prefetch: buckets that are gathered ahead; 0: a gather is issued when compute needs it.
        overlaps_reductions: whether compute goes on while gradients are reduced.
    """

    bucket: str | int
    prefetch: int
    overlaps_reductions: bool


SCHEDULES = {
    "front end alone": Schedule("parameter", 0, False),
    "block buckets": Schedule("block", 0, False),
    "block buckets, prefetch": Schedule("block", 1, True),
}
AUTO = "auto buckets, prefetch"
_AUTO_SIZES = tuple(2**exponent for exponent in range(20, 35))  # bytes: 1 MiB to 16 GiB


class Prediction(NamedTuple):
    """A step, predicted.

    Args:
        timeline: of all tasks.
        wire_bytes: bytes that a rank sends for data parallelism.
        collectives: number of data-parallel collectives.
        bucket: the schedule's.
        tensor_parallel_seconds: communication of tensor parallelism, for which compute waits; part of compute's time.
    """

    timeline: Timeline
    wire_bytes: float
    collectives: int
    bucket: str | int
    tensor_parallel_seconds: float


def predict(step: Step, cost: CostModel, schedule: Schedule, reshard: bool) -> Prediction:
    """Simulate a step.

    Args:
        step: of `build_step`.
        cost: the machine.
        schedule: how collectives are issued.
        reshard: whether parameters are freed after forward and gathered again in backward.
    """
    program = _Program(cost, schedule, step)
    forward, backward = (_fill_buckets(units, schedule.bucket, step) for units in (step.forward, step.backward))
    program.append_pass(forward, [_merge(bucket) for bucket in forward], [[] for _ in forward], frees=reshard)
    again = [_gather_again(bucket, step) if reshard else [] for bucket in backward]
    program.append_pass(backward, again, [_merge(bucket) for bucket in backward], frees=True)
    tensor_parallel = sum(unit.tensor_parallel_seconds for unit in (*step.forward, *step.backward))
    wire_bytes = sum(collective.wire_bytes for collective in program.issued)
    return Prediction(simulate(program.tasks), wire_bytes, len(program.issued), schedule.bucket, tensor_parallel)


def predict_auto(step: Step, cost: CostModel, reshard: bool, most_bytes: int) -> Prediction:
    """Return the fastest step over block buckets and sizes from 1 MiB to 16 GiB, with prefetch, within `most_bytes`.

    At equal speed block buckets are taken, then the smaller size.

    Raises:
        ValueError: no bucket plan stays within `most_bytes`.
    """
    predictions = [predict(step, cost, Schedule(bucket, 1, True), reshard) for bucket in ("block", *_AUTO_SIZES)]
    fitting = [p for p in predictions if p.timeline.peak_bytes <= most_bytes]
    if not fitting:
        least = min(p.timeline.peak_bytes for p in predictions)
        raise ValueError(
            f"predict_auto: no bucket plan holds at most {most_bytes} bytes; the least is {least}. Allow that."
        )
    return min(fitting, key=lambda p: p.timeline.step_seconds)


def _fill_buckets(units: Sequence[Unit], bucket: str | int, step: Step) -> list[list[Unit]]:
    buckets: list[list[Unit]] = []
    for unit in units:
        if buckets and _joins(buckets[-1], unit, bucket, step):
            buckets[-1].append(unit)
        else:
            buckets.append([unit])
    return buckets


def _joins(before: list[Unit], unit: Unit, bucket: str | int, step: Step) -> bool:
    if bucket == "parameter":
        return False
    if bucket == "block":
        return before[-1].segment == unit.segment
    return sum(_get_bytes(other, step) for other in (*before, unit)) <= bucket


def _get_bytes(unit: Unit, step: Step) -> int:
    """Return the bytes of a unit's parameters as gathered, or of its gradients where nothing is."""
    if step.gather:
        return unit.elements * step.gather.dtype.itemsize
    return unit.collectives[0].bytes if unit.collectives else 0


def _merge(bucket: list[Unit]) -> list[Collective]:
    """Return one collective per kind, group and dtype, in order."""
    merged: dict[tuple, Collective] = {}
    for collective in (c for unit in bucket for c in unit.collectives):
        key = (collective.kind, collective.group, collective.dtype)
        nbytes = collective.bytes + (merged[key].bytes if key in merged else 0)
        merged[key] = collective._replace(bytes=nbytes)
    return list(merged.values())


def _gather_again(bucket: list[Unit], step: Step) -> list[Collective]:
    elements = sum(unit.elements for unit in bucket)
    if not step.gather or not elements:
        return []
    return [step.gather._replace(bytes=elements * step.gather.dtype.itemsize, phase="backward")]


class _Program:
    """The tasks of a step, in the order in which a program issues them."""

    def __init__(self, cost: CostModel, schedule: Schedule, step: Step) -> None:
        self.tasks: list[Task] = []
        self.issued: list[Collective] = []
        self._cost, self._schedule, self._step = cost, schedule, step

    def append_pass(
        self,
        buckets: list[list[Unit]],
        gathers: list[list[Collective]],
        reductions: list[list[Collective]],
        frees: bool,
    ) -> None:
        """Append forward or backward: per bucket gathers, compute and reductions; `frees`: compute is the last use."""
        start = self._get_last()  # of the pass before
        before = start  # compute of the bucket before
        reduced: tuple[int, ...] = ()
        gathered: dict[int, tuple[int, ...]] = {}
        for number, bucket in enumerate(buckets):
            for ahead in range(number, min(number + self._schedule.prefetch + 1, len(buckets))):
                if ahead not in gathered:
                    nbytes = sum(collective.bytes for collective in gathers[ahead])
                    gathered[ahead] = self._append_collectives(gathers[ahead], before, allocates=nbytes)
            waits = (*start, *gathered[number], *(() if self._schedule.overlaps_reductions else reduced))
            gradients = sum(collective.bytes for collective in reductions[number][:1])
            unsharded = sum(_get_bytes(unit, self._step) for unit in bucket) if frees and self._step.gather else 0
            self.tasks.append(Task(COMPUTE, sum(unit.seconds for unit in bucket), waits, gradients, unsharded))
            before = self._get_last()
            reduced = self._append_collectives(reductions[number], before, frees=gradients)

    def _append_collectives(
        self, collectives: list[Collective], after: tuple[int, ...], allocates: int = 0, frees: int = 0
    ) -> tuple[int, ...]:
        """Append one after the other; return the last one's number, to be waited for."""
        for number, collective in enumerate(collectives):
            seconds = get_collective_seconds(self._cost, collective)
            is_last = number == len(collectives) - 1
            self.tasks.append(Task(COMMUNICATION, seconds, after, 0 if number else allocates, frees if is_last else 0))
            self.issued.append(collective)
            after = self._get_last()
        return after if collectives else ()

    def _get_last(self) -> tuple[int, ...]:
        return (len(self.tasks) - 1,) if self.tasks else ()
