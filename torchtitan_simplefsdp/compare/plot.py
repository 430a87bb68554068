"""Plot: loss and gradient norm of all runs, and below them their differences from the baseline.

Differences are signed and on a scale that is linear around zero and logarithmic beyond, so that one bit and one percent
are both visible.

Not here: numbers to quote (report.py).
"""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import Comparison

_TITLES = {"loss": "Loss", "grad_norm": "Gradient norm"}


def plot_comparison(comparison: Comparison, file: Path) -> None:
    """Write the plot as a PNG file."""
    figure = Figure(figsize=(12, 7), dpi=120, layout="constrained")
    axes = figure.subplots(2, len(_TITLES), sharex=True, height_ratios=(3, 2))
    for column, (metric, title) in enumerate(_TITLES.items()):
        _plot_values(axes[0, column], comparison, metric)
        _plot_differences(axes[1, column], comparison, metric)
        axes[0, column].set_title(title)
        axes[1, column].set_xlabel("step")
    axes[0, 0].legend()
    figure.savefig(file)


def _plot_values(axes: Axes, comparison: Comparison, metric: str) -> None:
    baseline = comparison.baseline
    values = baseline.scalars[metric]
    # wide and pale, so that a run which is equal stays visible on top of it
    axes.plot(list(values), list(values.values()), label=f"{baseline.name} (baseline)", color="0.75", linewidth=5)
    for index, other in enumerate(comparison.others):
        values = other.scalars[metric]
        style = ("-", "--", "-.", ":")[index % 4]
        axes.plot(list(values), list(values.values()), label=other.name, color=f"C{index}", linestyle=style)
    axes.grid(alpha=0.3)


def _plot_differences(axes: Axes, comparison: Comparison, metric: str) -> None:
    baseline, sizes = comparison.baseline.scalars[metric], []
    for index, other in enumerate(comparison.others):
        values = other.scalars[metric]
        steps = [step for step in values if step in baseline]
        differences = [values[step] - baseline[step] for step in steps]
        sizes += [abs(value) for value in differences if value and math.isfinite(value)]
        axes.plot(steps, differences, color=f"C{index}", marker=".", markersize=4, linewidth=1)
    axes.set_ylabel("run - baseline")
    axes.grid(alpha=0.3)
    if sizes:
        axes.set_yscale("symlog", linthresh=min(sizes))
    elif all(metrics[metric].first_step is None for metrics in comparison.differences.values()):
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
        axes.text(0.5, 0.6, "identical", transform=axes.transAxes, ha="center", fontsize=14)
