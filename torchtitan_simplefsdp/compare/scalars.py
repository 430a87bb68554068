"""Scalars: loss and gradient norm of every step, in the full precision that TensorBoard keeps (float32).

Not here: what is done with them (difference.py, plot.py).
"""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

METRICS = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm"}
"""What is compared, and torchtitan's TensorBoard tags of it."""

Scalars = dict[str, dict[int, float]]
"""For each of METRICS, its value by optimizer step."""


def read_scalars(folder: Path) -> Scalars:
    """Read all event files below `folder`; of a step that a resumed run did twice, the later value counts."""
    events = {metric: [] for metric in METRICS}
    for file in folder.rglob("events.out.tfevents.*"):
        accumulator = EventAccumulator(str(file), size_guidance={"scalars": 0})  # 0: all; the default is a sample
        accumulator.Reload()
        for metric, tag in METRICS.items():
            if tag in accumulator.Tags()["scalars"]:
                events[metric] += accumulator.Scalars(tag)
    return {
        metric: dict(sorted({e.step: e.value for e in sorted(found, key=lambda e: e.wall_time)}.items()))
        for metric, found in events.items()
    }


def count_complete_steps(scalars: Scalars) -> int:
    """Return up to which step every metric has a value for every step."""
    steps = set.intersection(*(set(values) for values in scalars.values()))
    return next(step for step in range(len(steps) + 1) if step + 1 not in steps)
