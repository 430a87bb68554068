"""Segments: a traced step cut at its data-parallel collectives, timed, its equal layers repeated.

[Note: units]
A unit is what lies between two data-parallel collectives: in forward the gather of a parameter and the compute up to
the next gather, in backward the compute up to a gradient's reduction (in `hybrid_shard` two collectives) and these.
Gathers in backward are left out: whether parameters are gathered again is the schedule's choice (schedules.py). Where
tensor parallelism communicates, compute waits, so its collectives count as compute time here.

Not here: the order in which units run and what overlaps (schedules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from .cost_model import CostModel
from .trace import Collective, Compute


class Unit(NamedTuple):
    """Compute and the data-parallel collectives before it (forward) or after it (backward). See [Note: units].

    Args:
        segment: number of the module that it belongs to, in the order of forward; a layer repeated has several.
        collectives: gathers or reductions; empty: none.
        seconds: compute, tensor parallelism's collectives included.
        tensor_parallel_seconds: the latter.
        elements: parameters that are gathered or whose gradients are reduced, padding included.
    """

    segment: int
    collectives: tuple[Collective, ...]
    seconds: float
    tensor_parallel_seconds: float
    elements: int


class Step(NamedTuple):
    """All units in the order in which they run; what a gather in backward would move is derived from `gather`.

    Args:
        forward, backward: units.
        gather: one of the forward's gathers, for its group and dtype; None: nothing is sharded.
    """

    forward: tuple[Unit, ...]
    backward: tuple[Unit, ...]
    gather: Collective | None


def build_step(
    events: Sequence[Collective | Compute],
    cost: CostModel,
    groups: Collection[str],
    repeats: Mapping[str, int],
    get_seconds: Callable[[CostModel, Compute], float] | None = None,
) -> Step:
    """Cut a trace into units.

    Args:
        events: of `trace_step`, with a label for each part of the model; events without one are left out.
        groups: names of the data-parallel mesh dims.
        repeats: how often the units of a label occur in the real step; 1 for labels that are not named.
        get_seconds: time of an op; None: `cost.compute_seconds`.

    Raises:
        ValueError: reductions of several kinds that do not come in whole rounds, so units cannot be told apart.
    """
    get_seconds = get_seconds or (lambda cost, op: cost.compute_seconds(op.flops, op.bytes, op.dtype))
    labels = list(dict.fromkeys(e.where for e in events if e.where))
    timed: dict[tuple[str, str], list[tuple[Collective | None, float, bool]]] = {}
    for event in events:
        is_compute = isinstance(event, Compute)
        is_data_parallel = not is_compute and event.group in groups
        if is_data_parallel and event.phase == "backward" and event.kind == "all_gather":
            continue
        seconds = get_seconds(cost, event) if is_compute else get_collective_seconds(cost, event)
        item = (event, 0.0, False) if is_data_parallel else (None, seconds, not is_compute)
        timed.setdefault((event.phase, event.where), []).append(item)
    forward: list[Unit] = []
    backward: list[list[Unit]] = []
    segment = 0
    for label in labels:
        ahead = _cut_forward(timed.get(("forward", label), []))
        behind = _cut_backward(timed.get(("backward", label), []), label)
        for _ in range(repeats.get(label, 1)):
            forward += [unit._replace(segment=segment) for unit in ahead]
            backward.append([unit._replace(segment=segment) for unit in behind])
            segment += 1
    gather = next((c for unit in forward for c in unit.collectives), None)
    return Step(tuple(forward), tuple(unit for units in reversed(backward) for unit in units), gather)


def get_collective_seconds(cost: CostModel, collective: Collective) -> float:
    """Return the time of a traced collective."""
    ranks = collective.ranks
    return cost.seconds(collective.kind, collective.bytes, len(ranks), cost.count_nodes(ranks))


def _cut_forward(items: list[tuple[Collective | None, float, bool]]) -> list[Unit]:
    units: list[Unit] = []
    for collective, seconds, is_tensor_parallel in items:
        if collective is not None:
            units.append(Unit(0, (collective,), 0.0, 0.0, count_elements(collective.bytes, collective.dtype)))
            continue
        unit = units.pop() if units else Unit(0, (), 0.0, 0.0, 0)
        units.append(_add(unit, seconds, is_tensor_parallel))
    return units


def _cut_backward(items: list[tuple[Collective | None, float, bool]], label: str) -> list[Unit]:
    collectives = [collective for collective, _, _ in items if collective is not None]
    in_round = len({(c.kind, c.group) for c in collectives})  # 2: a sum over shards, then one over replicas
    if collectives and len(collectives) % in_round:
        raise ValueError(f"build_step: {len(collectives)} reductions of {in_round} kinds in the backward of {label!r}.")
    units: list[Unit] = []
    open_unit = Unit(0, (), 0.0, 0.0, 0)
    for collective, seconds, is_tensor_parallel in items:
        if collective is None:
            open_unit = _add(open_unit, seconds, is_tensor_parallel)
            continue
        elements = open_unit.elements or count_elements(collective.bytes, collective.dtype)
        open_unit = open_unit._replace(collectives=(*open_unit.collectives, collective), elements=elements)
        if len(open_unit.collectives) == in_round:
            units.append(open_unit)
            open_unit = Unit(0, (), 0.0, 0.0, 0)
    return [*units, open_unit] if open_unit.seconds else units


def _add(unit: Unit, seconds: float, is_tensor_parallel: bool) -> Unit:
    tensor_parallel = unit.tensor_parallel_seconds + (seconds if is_tensor_parallel else 0.0)
    return unit._replace(seconds=unit.seconds + seconds, tensor_parallel_seconds=tensor_parallel)


def count_elements(nbytes: int, dtype: torch.dtype) -> int:
    """Return how many numbers of a dtype these bytes are."""
    return nbytes // dtype.itemsize
