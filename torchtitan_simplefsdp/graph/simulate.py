"""Simulate: when tasks of a compute and a communication stream start and end, and what memory they hold.

Not here: which tasks a step has (schedules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

COMPUTE, COMMUNICATION = "compute", "communication"


class Task(NamedTuple):
    """Work of one stream.

    Args:
        stream: COMPUTE or COMMUNICATION; each runs its tasks one by one, in the order of the list.
        seconds: how long it takes, not below 0.
        after: earlier tasks of the list that must have ended.
        allocates: bytes that are held from its start on.
        frees: bytes that are given back at its end.
    """

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    allocates: int = 0
    frees: int = 0


class Timeline(NamedTuple):
    """What a simulation found.

    Args:
        starts, ends: seconds, by task.
        compute_seconds: time in which the compute stream works.
        step_seconds: time until all is done.
        peak_bytes: most bytes held at once.
    """

    starts: list[float]
    ends: list[float]
    compute_seconds: float
    step_seconds: float
    peak_bytes: int

    @property
    def exposed_seconds(self) -> float:
        """Time in which the compute stream waits for communication."""
        return self.step_seconds - self.compute_seconds


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run the tasks: each starts when its stream is free and the tasks it waits for have ended.

    Raises:
        ValueError: a task waits for itself or a later one, or has an unknown stream.
    """
    free_at = {COMPUTE: 0.0, COMMUNICATION: 0.0}
    starts: list[float] = []
    ends: list[float] = []
    for index, task in enumerate(tasks):
        if task.stream not in free_at:
            streams = ", ".join(free_at)
            raise ValueError(f"simulate: task {index} is on unknown stream {task.stream!r}. Streams: {streams}.")
        if any(other >= index for other in task.after):
            raise ValueError(
                f"simulate: task {index} waits for {task.after}, not all of them before it. List it after them."
            )
        starts.append(max([free_at[task.stream], *(ends[other] for other in task.after)]))
        ends.append(starts[-1] + task.seconds)
        free_at[task.stream] = ends[-1]
    compute = sum(task.seconds for task in tasks if task.stream == COMPUTE)
    return Timeline(starts, ends, compute, max(ends, default=0.0), _get_peak(tasks, starts, ends))


def _get_peak(tasks: Sequence[Task], starts: list[float], ends: list[float]) -> int:
    """Memory freed at a moment is there for what starts at it."""
    changes = [(ends[i], -task.frees) for i, task in enumerate(tasks) if task.frees]
    changes += [(starts[i], task.allocates) for i, task in enumerate(tasks) if task.allocates]
    held = peak = 0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return peak
