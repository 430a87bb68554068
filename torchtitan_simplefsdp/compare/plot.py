"""Plot: loss and gradient norm of all runs, and below them how far each run is from the baseline.

Differences are on a logarithmic scale, so that a last bit and a percent are both visible; steps without a difference
have no point.

Not here: numbers to quote (report.py).
"""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .report import Comparison

_TITLES = {"loss": "loss", "grad_norm": "gradient norm"}


def plot_comparison(comparison: Comparison, file: Path) -> None:
    """Write the plot as a PNG file."""
    figure = Figure(figsize=(12, 7), dpi=120, layout="constrained")
    axes = figure.subplots(2, len(_TITLES), sharex=True, height_ratios=(3, 2))
    for column, (metric, title) in enumerate(_TITLES.items()):
        _plot_values(axes[0, column], comparison, metric)
        _plot_differences(axes[1, column], comparison, metric)
        axes[0, column].set_ylabel(title)
        axes[1, column].set_ylabel("|run - baseline|")
        axes[1, column].set_xlabel("step")
        axes[1, column].xaxis.get_major_locator().set_params(integer=True)
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
    baseline, drawn, identical = comparison.baseline.scalars[metric], False, []
    for index, other in enumerate(comparison.others):
        values = other.scalars[metric]
        sizes = {step: abs(values[step] - baseline[step]) for step in values if step in baseline}
        sizes = {step: size for step, size in sizes.items() if size and math.isfinite(size)}
        if sizes:
            axes.plot(list(sizes), list(sizes.values()), ".-", color=f"C{index}", linewidth=0.5)
            drawn = True
        elif comparison.differences[other.name][metric].first_step is None:
            identical.append(other.name)
    if drawn:
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        if identical:
            axes.set_title(f"identical to the baseline: {', '.join(identical)}", fontsize="medium", wrap=True)
    else:
        text = "identical" if len(identical) == len(comparison.others) else "no finite difference at a common step"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize="x-large")
        axes.set_yticks([])
