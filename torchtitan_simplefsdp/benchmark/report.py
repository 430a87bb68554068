"""Report: what the measured steps say, as numbers per row, as a Markdown table and as JSON.

A ratio is the median over rounds of the ratio within a round, so what slowed a whole round cancels out. It is above 1
where the row is faster than FSDP2 in the same mode (in fully_shard, for modes that FSDP2 does not have). The share of
the ceiling is the same against the row without communication that is compiled if this one is.

Not here: pictures (plot.py).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .contenders import CONTENDERS, Row
from .llama import count_parameters
from .options import Options

_BASELINE = "fsdp2"
_SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A"}
_HEADER = (
    "contender",
    "mode",
    "tokens/s per rank",
    "tokens/s in all",
    "step in ms (quartiles)",
    "times FSDP2's speed",
    "of the ceiling",
    "peak memory, MiB",
    "collectives",
    "sent per rank, MiB",
    "compile, s",
)
MIB = 2**20


@dataclass(frozen=True)
class Measurement:
    """What was measured of one row; `error` stands in for everything that could not be.

    Args:
        seconds: of each round's step, on the slowest rank.
        loss: of the whole batch, the same for all rows up to rounding.
        collectives: number per kind in one step.
        sent_bytes: in one step, per rank, at least: by a ring (graph/cost_model.py).
        memory_bytes: peak of the rank with the highest.
        compile_seconds: how much longer the first step takes than later ones.
    """

    seconds: Sequence[float] = ()
    loss: float | None = None
    collectives: dict[str, int] | None = None
    sent_bytes: float | None = None
    memory_bytes: int | None = None
    compile_seconds: float | None = None
    error: str | None = None


Measurements = dict[Row, Measurement]


def get_ratio(row: Row, other: Row | None, measurements: Measurements) -> float | None:
    """Return how many times as fast as `other` a row is: the median of the rounds' ratios; None without both."""
    if other is None or not measurements[other].seconds or not measurements[row].seconds:
        return None
    pairs = zip(measurements[other].seconds, measurements[row].seconds)
    return statistics.median(theirs / mine for theirs, mine in pairs)


def get_baseline(row: Row, measurements: Measurements) -> Row | None:
    """Return the row of FSDP2 that a row is compared with; None if the comparison has none."""
    candidates = (Row(_BASELINE, row.mode), Row(_BASELINE, "fully_shard"), Row(_BASELINE, "hybrid_shard"))
    return next((candidate for candidate in candidates if candidate in measurements), None)


def get_ceiling(row: Row, measurements: Measurements) -> Row | None:
    """Return the row without communication that a row is compared with; None if the comparison has none."""
    ceiling = Row("none+compile" if CONTENDERS[row.contender].compiled else "none", "")
    return ceiling if ceiling in measurements else None


def get_quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    if len(seconds) == 1:
        return (seconds[0],) * 3
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, median, high


def format_table(measurements: Measurements, options: Options) -> str:
    rows = [_HEADER, ("---",) * len(_HEADER), *(_build_cells(row, measurements, options) for row in measurements)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _build_cells(row: Row, measurements: Measurements, options: Options) -> list[str]:
    measured = measurements[row]
    name = [row.contender, row.mode or "any"]
    if measured.error is not None:
        error = measured.error.replace("|", "\\|")
        return [*name, f"not available: {error}", *[""] * (len(_HEADER) - 3)]
    low, median, high = get_quartiles(measured.seconds)
    speed = options.tokens / median
    ratio = get_ratio(row, get_baseline(row, measurements), measurements)
    share = get_ratio(row, get_ceiling(row, measurements), measurements)
    kinds = [f"{count} {_SHORT[kind]}" for kind, count in sorted((measured.collectives or {}).items())]
    compiled = CONTENDERS[row.contender].compiled and measured.compile_seconds is not None
    return [
        *name,
        f"{speed / options.ranks:.0f}",
        f"{speed:.0f}",
        f"{1e3 * median:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})",
        "" if ratio is None else f"{ratio:.2f}",
        "" if share is None else f"{share:.0%}",
        "" if measured.memory_bytes is None else f"{measured.memory_bytes / MIB:.0f}",
        " + ".join(kinds) or "none",
        f"{(measured.sent_bytes or 0) / MIB:.2f}",
        f"{measured.compile_seconds:.1f}" if compiled else "",
    ]


def describe(options: Options, machine: dict[str, Any], load: tuple[float, float]) -> str:
    """Return what was measured where, as one paragraph."""
    devices = ", ".join(dict.fromkeys(machine["gpus"])) or f"{options.threads} CPU thread(s) each"
    parallel = f" ({options.dp} data-parallel, {options.tp} tensor-parallel)" if options.tp > 1 else ""
    model = f"{count_parameters(options) / 1e6:.1f}M parameters (dim {options.dim}, {options.layers} layers"
    return (
        f"{options.ranks} ranks{parallel}, {devices}, on {machine['processor']} with {machine['cores']} cores; "
        f"torch {machine['torch']}, Python {machine['python']}. Llama of {model}, vocabulary of {options.vocab}), "
        f"{options.batch} sequences of {options.seq_len} tokens per data-parallel rank, {options.dtype}. "
        f"{options.rounds} rounds after {options.warmup} steps of warm-up. "
        f"Load average {load[0]:.1f} before, {load[1]:.1f} after.\n"
    )


def write_json(
    file: Path, measurements: Measurements, options: Options, machine: dict[str, Any], load: tuple[float, float]
) -> None:
    """Write all that was measured, every round of it."""
    rows = [{**row._asdict(), **asdict(measured)} for row, measured in measurements.items()]
    content = {
        "machine": {**machine, "load_before_and_after": load},
        "options": asdict(options),
        "parameters": count_parameters(options),
        "rows": rows,
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
