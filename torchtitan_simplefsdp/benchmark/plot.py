"""Plot: step time and peak memory of all rows side by side, as a PNG file.

Not here: numbers to quote (report.py).
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from .report import get_quartiles, Measurements, MIB

_COLORS = {"none": "0.6", "ddp": "C0", "fsdp2": "C1", "torchtitan": "C2", "ours": "C3"}


def plot_measurements(measurements: Measurements, file: Path) -> None:
    """Draw a bar per row that was measured: the median step with its quartiles, and where it was measured the peak memory."""
    rows = {row: measured for row, measured in measurements.items() if measured.error is None}
    has_memory = any(measured.memory_bytes is not None for measured in rows.values())
    figure = Figure(figsize=(13 if has_memory else 8, 1.5 + 0.32 * len(rows)), dpi=120, layout="constrained")
    time, *others = figure.subplots(1, 1 + has_memory, sharey=True, squeeze=False)[0]
    labels = [f"{row.contender} {row.mode}".strip() for row in rows]
    colors = [_COLORS[row.contender.partition("+")[0]] for row in rows]
    quartiles = [[1e3 * second for second in get_quartiles(measured.seconds)] for measured in rows.values()]
    medians = [median for _, median, _ in quartiles]
    spread = [[median - low for low, median, _ in quartiles], [high - median for _, median, high in quartiles]]
    bars = time.barh(labels, medians, xerr=spread, color=colors, error_kw={"linewidth": 1, "capsize": 2})
    time.bar_label(bars, fmt="%.1f", padding=6, fontsize="small")
    time.set_xlabel("forward and backward in ms: median, quartiles")
    time.margins(x=0.12, y=0.02)
    time.invert_yaxis()
    for memory in others:
        peaks = [(measured.memory_bytes or 0) / MIB for measured in rows.values()]
        memory.bar_label(memory.barh(labels, peaks, color=colors), fmt="%.0f", padding=3, fontsize="small")
        memory.set_xlabel("peak memory in MiB, of the rank with the highest")
        memory.margins(x=0.12, y=0.02)
    figure.savefig(file)
