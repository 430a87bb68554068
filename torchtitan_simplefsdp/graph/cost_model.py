"""CostModel: how long a collective or an op takes on a machine, by numbers in a TOML file.

Passes that bucket and reorder must decide alike on every rank, so nothing is measured while they run: the numbers are
given, or measured once by scripts/measure_cost_model.py, which writes the file.

[Note: time of a collective]
The ring: n ranks on m nodes pass pieces around, n - 1 steps for all_gather and reduce_scatter, 2 (n - 1) for
all_reduce; of n - 1 steps, m - 1 cross nodes.

    seconds = latency + steps within nodes * theirs + steps between nodes * theirs + bytes sent by a rank / bandwidth

A rank's bandwidth is that within the node, or, where the group
spans nodes, at most that of the network ports of its ranks on one node together: 8 ranks per node have 8 ports, which
all carry a part. Source of this form: NCCL, src/graph/tuning.cc.

Not here: numbers of known machines (machines.py), measuring (measure.py).
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Bytes that a rank sends, in units of (n - 1) / n of the whole tensor, and ring steps in units of n - 1.
_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
KINDS = tuple(_ROUNDS)


def get_wire_bytes(kind: str, nbytes: float, group_size: int) -> float:
    """Return the bytes that each rank sends at least, for a whole tensor of `nbytes`."""
    if kind not in _ROUNDS:
        raise ValueError(f"cost model: no cost for collective {kind!r}. Known: {', '.join(KINDS)}.")
    return _ROUNDS[kind] * nbytes * (group_size - 1) / group_size


@dataclass(frozen=True)
class CollectiveCost:
    """Numbers of one kind of collective. See [Note: time of a collective]; bandwidths are per rank and direction."""

    latency_seconds: float
    intra_node_step_seconds: float
    inter_node_step_seconds: float
    intra_node_bytes_per_second: float
    inter_node_bytes_per_second: float


@dataclass(frozen=True)
class CostModel:
    """A machine.

    Args:
        name: what it is and where the numbers are from.
        ranks_per_node: ranks that share a node, numbered consecutively.
        op_seconds: time of an op that does nothing.
        memory_bytes_per_second: attainable bandwidth of the device's memory, bytes read plus bytes written.
        flops_per_second: attainable rate of matrix products by name of dtype, as 'bfloat16'.
        collectives: by kind: all_gather, reduce_scatter, all_reduce, all_to_all.
    """

    name: str
    ranks_per_node: int
    op_seconds: float
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    collectives: Mapping[str, CollectiveCost]

    def __post_init__(self) -> None:
        faults = [f"collectives.{kind} is missing" for kind in KINDS if kind not in self.collectives]
        faults += [
            f"collectives.{kind} is not one of {', '.join(KINDS)}" for kind in self.collectives if kind not in KINDS
        ]
        faults += [f"{key}={value!r} must be a number {bound}" for key, value, bound in self._find_wrong_numbers()]
        if type(self.ranks_per_node) is not int or self.ranks_per_node < 1:
            faults.append(f"ranks_per_node={self.ranks_per_node!r} must be a whole number, at least 1")
        if not self.flops_per_second:
            faults.append("flops_per_second is empty; it needs a rate per dtype, as bfloat16 = 6e14")
        if faults:
            raise ValueError(f"cost model {self.name!r}: {'; '.join(faults)}.")

    def _find_wrong_numbers(self) -> list[tuple[str, Any, str]]:
        numbers = {"op_seconds": self.op_seconds, "memory_bytes_per_second": self.memory_bytes_per_second}
        numbers |= {f"flops_per_second.{dtype}": rate for dtype, rate in self.flops_per_second.items()}
        for kind, cost in self.collectives.items():
            numbers |= {f"collectives.{kind}.{key}": value for key, value in dataclasses.asdict(cost).items()}
        wrong = []
        for key, value in numbers.items():
            may_be_zero = key.endswith(("latency_seconds", "step_seconds", "op_seconds"))
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and not may_be_zero):
                wrong.append((key, value, "not below 0" if may_be_zero else "above 0"))
        return wrong

    def count_nodes(self, ranks: tuple[int, ...]) -> int:
        """Return on how many nodes these global ranks are."""
        return len({rank // self.ranks_per_node for rank in ranks})

    def seconds(self, kind: str, nbytes: float, group_size: int, nodes: int = 1) -> float:
        """Return the time of a collective on a whole tensor of `nbytes`, by a group that spans `nodes` nodes evenly."""
        wire_bytes = get_wire_bytes(kind, nbytes, group_size)
        if group_size == 1:
            return 0.0
        cost, rounds = self.collectives[kind], _ROUNDS[kind]
        bandwidth = cost.intra_node_bytes_per_second
        if nodes > 1:
            bandwidth = min(bandwidth, group_size / nodes * cost.inter_node_bytes_per_second)
        steps = (group_size - nodes) * cost.intra_node_step_seconds + (nodes - 1) * cost.inter_node_step_seconds
        return cost.latency_seconds + rounds * steps + wire_bytes / bandwidth

    def compute_seconds(self, flops: float, nbytes: float, dtype: torch.dtype) -> float:
        """Return the time of one op: its arithmetic or its memory traffic, whichever takes longer."""
        arithmetic = flops / self._get_rate(dtype) if flops else 0.0
        return self.op_seconds + max(arithmetic, nbytes / self.memory_bytes_per_second)

    def _get_rate(self, dtype: torch.dtype) -> float:
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops_per_second:
            raise ValueError(
                f"cost model {self.name!r}: no FLOP rate for {name}; it has {', '.join(self.flops_per_second)}. "
                f"Add flops_per_second.{name}, or measure it with scripts/measure_cost_model.py."
            )
        return self.flops_per_second[name]


def load_cost_model(file: Path) -> CostModel:
    """Read a model from a TOML file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not TOML, missing or unknown keys, wrong values; all of them in one message.
    """
    if not file.is_file():
        raise FileNotFoundError(f"cost model: {file} not found. scripts/measure_cost_model.py writes one.")
    try:
        table = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"cost model: {file} is not TOML: {error}.") from error
    faults = _find_wrong_keys(CostModel, table, "")
    costs = table.get("collectives", {})
    for kind, cost in costs.items() if isinstance(costs, dict) else ():
        faults += _find_wrong_keys(CollectiveCost, cost, f"collectives.{kind}.")
    if faults:
        raise ValueError(f"cost model: {file}: {'; '.join(faults)}.")
    table["collectives"] = {kind: CollectiveCost(**cost) for kind, cost in costs.items()}
    return CostModel(**table)


def _find_wrong_keys(kind: type, table: Any, prefix: str) -> list[str]:
    if not isinstance(table, dict):
        return [f"{prefix.rstrip('.')} must be a table"]
    names = [field.name for field in dataclasses.fields(kind)]
    faults = [f"{prefix}{name} is missing" for name in names if name not in table]
    faults += [f"unknown key {prefix}{name}" for name in table if name not in names]
    tables = [name for name in ("flops_per_second", "collectives") if name in names and name in table]
    return faults + [f"{name} must be a table" for name in tables if not isinstance(table[name], dict)]


def format_cost_model(model: CostModel) -> str:
    """Return the model as TOML that `load_cost_model` reads back to an equal one."""
    lines = [
        f"name = {_quote(model.name)}",
        f"ranks_per_node = {model.ranks_per_node}",
        f"op_seconds = {model.op_seconds!r}",
        f"memory_bytes_per_second = {model.memory_bytes_per_second!r}",
        "\n[flops_per_second]",
        *(f"{dtype} = {rate!r}" for dtype, rate in model.flops_per_second.items()),
    ]
    for kind, cost in model.collectives.items():
        lines.append(f"\n[collectives.{kind}]")
        lines += [f"{key} = {value!r}" for key, value in dataclasses.asdict(cost).items()]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
