"""Scalars: loss and gradient norm of every step, in the full precision that TensorBoard keeps (float32).

Not here: what is done with them (difference.py, plot.py).
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent

METRICS = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm"}
"""What is compared, and torchtitan's TensorBoard tags of it."""

Scalars = dict[str, dict[int, float]]
"""For each of METRICS, its value by optimizer step."""


def read_scalars(folder: Path) -> Scalars:
    """Read all event files below `folder`; of a step that a resumed run did twice, the later value counts."""
    events = {tag: [] for tag in METRICS.values()}
    for file in find_event_files(folder):
        for tag, found in read_events(file, METRICS.values()).items():
            events[tag] += found
    return {
        metric: dict(sorted({e.step: e.value for e in sorted(events[tag], key=lambda e: e.wall_time)}.items()))
        for metric, tag in METRICS.items()
    }


def find_event_files(folder: Path) -> list[Path]:
    """Return TensorBoard's files below `folder`, sorted."""
    return sorted(folder.rglob("events.out.tfevents.*"))


def read_events(file: Path, tags: Iterable[str]) -> dict[str, list[ScalarEvent]]:
    """Read the events of one file, in the order of writing, of those TensorBoard tags that it has."""
    accumulator = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0: all; the default is a sample
    accumulator.Reload()
    return {tag: accumulator.Scalars(tag) for tag in tags if tag in accumulator.Tags()["scalars"]}


def read_all_scalars(folder: Path, tags: Iterable[str]) -> dict[str, dict[int, list[float]]]:
    """Read scalars by TensorBoard tag and step, from all event files below `folder`, each value that a step was given."""
    values: dict[str, dict[int, list[float]]] = {tag: defaultdict(list) for tag in tags}
    for file in find_event_files(folder):
        for tag, events in read_events(file, values).items():
            for event in events:
                values[tag][event.step].append(event.value)
    return values


def count_complete_steps(scalars: Scalars) -> int:
    """Return up to which step every metric has a value for every step."""
    steps = set.intersection(*(set(values) for values in scalars.values()))
    return next(step for step in range(len(steps) + 1) if step + 1 not in steps)
