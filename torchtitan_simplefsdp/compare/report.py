"""Report: a comparison's result as a table for the terminal, as a Markdown table and as JSON.

The JSON file of one comparison is the golden file of another: floats are written with all their digits, so they come
back exactly. It holds NaN and Infinity as Python's json module writes them.

Not here: pictures (plot.py).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from .difference import Difference, get_difference
from .runs import CompareError, GOLDEN
from .scalars import METRICS, Scalars

_HEADER = ("run", "metric", "last value", "first differing step", "largest absolute", "largest relative", "missing")


@dataclass(frozen=True)
class Result:
    """What came of one run: its command, the versions that ran it, and its scalars by step."""

    name: str
    command: str
    versions: dict[str, str]
    scalars: Scalars


@dataclass(frozen=True)
class Comparison:
    """The baseline, all other runs, and for each of these and each metric its difference from the baseline."""

    steps: int
    baseline: Result
    others: list[Result]
    differences: dict[str, dict[str, Difference]]


def compare_results(baseline: Result, others: list[Result], steps: int) -> Comparison:
    """Compare every result with the baseline, over steps 1 to `steps`."""
    differences = {
        other.name: {
            metric: get_difference(baseline.scalars[metric], other.scalars[metric], steps) for metric in METRICS
        }
        for other in others
    }
    return Comparison(steps, baseline, others, differences)


def format_table(comparison: Comparison) -> str:
    rows = [_HEADER, *_build_rows(comparison)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def format_markdown(comparison: Comparison) -> str:
    rows = [_HEADER, ["---"] * len(_HEADER), *_build_rows(comparison)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _build_rows(comparison: Comparison) -> list[list[str]]:
    rows = []
    for result in (comparison.baseline, *comparison.others):
        for metric in METRICS:
            values = result.scalars[metric]
            last = f"{values[max(values)]:.6g}" if values else "none"
            if result is comparison.baseline:
                rows.append([result.name, metric, last, "(baseline)", "", "", ""])
            else:
                rows.append([result.name, metric, last, *_describe(comparison.differences[result.name][metric])])
    return rows


def _describe(difference: Difference) -> list[str]:
    if difference.first_step is None:
        return ["none", "0", "0", "0"]
    absolute = f"{difference.largest_absolute:.3g} at step {difference.absolute_step}"
    relative = f"{difference.largest_relative:.3g} at step {difference.relative_step}"
    return [str(difference.first_step), absolute, relative, str(difference.missing)]


def write_json(comparison: Comparison, file: Path) -> None:
    """Write everything that is known about a comparison; it names no path of this machine that no command names."""
    runs = {result.name: asdict(result) for result in (comparison.baseline, *comparison.others)}
    for run in runs.values():
        del run["name"]
    differences = {
        name: {metric: asdict(difference) for metric, difference in metrics.items()}
        for name, metrics in comparison.differences.items()
    }
    content = {
        "steps": comparison.steps,
        "baseline": comparison.baseline.name,
        "runs": runs,
        "differences": differences,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def read_golden(file: Path) -> Result:
    """Read the baseline of a comparison that was written before.

    Raises: CompareError if the file is not there or is not one.
    """
    try:
        content = json.loads(file.read_text())
        run = content["runs"][content["baseline"]]
        scalars = {metric: {int(s): float(v) for s, v in run["scalars"][metric].items()} for metric in METRICS}
        return Result(GOLDEN, run["command"], run["versions"], scalars)
    except OSError as error:
        raise CompareError(f"--import-result {file}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompareError(f"--import-result {file} was not written by --export-result ({error!r}).") from error
