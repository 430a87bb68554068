"""Measure: what a rank does; time all contenders in turns, or look at the memory and the compile time of one.

A timed step is forward and backward, from a barrier to the last gradient, on the slowest rank. All contenders live in
the same processes and run in turns, in an order that is reversed from round to round, so that a slow second of the
machine hits all. Memory and compile time of a contender are measured in processes of its own, with an optimizer.

Not here: the processes (ranks.py), statistics (report.py).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_simplefsdp.graph.trace import trace_collectives

from .contenders import build_setup, CONTENDERS, Row, Setup
from .llama import build_batch, run_step
from .memory import get_peak, reset_peak, return_freed_memory
from .options import Options


def get_order(count: int, round_number: int) -> list[int]:
    """Return in which order `count` contenders run in a round: forwards, then backwards."""
    return list(range(count))[:: -1 if round_number % 2 else 1]


class Runner:
    """A contender on this rank: its model, built, and steps of it."""

    def __init__(self, setup: Setup, row: Row) -> None:
        self.setup = setup
        self.forward: nn.Module = CONTENDERS[row.contender].build(setup, row.mode)
        self.batch = build_batch(setup.options, dist.get_rank() // setup.options.tp, setup.device)

    def step(self) -> tuple[float, float]:
        """Run one step from no gradients; return its seconds on this rank and this rank's part of the loss."""
        for parameter in self.forward.parameters():
            parameter.grad = None
        dist.barrier()
        started = time.perf_counter()
        loss = run_step(self.forward, self.batch, self.setup.options.tokens)
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, loss.item()

    def count(self) -> dict[str, Any]:
        """Run one step and return its collectives; code is not compiled again for it."""
        with torch.compiler.set_stance("fail_on_recompile"):
            collectives = [collective for collective in trace_collectives(self.step) if len(collective.ranks) > 1]
        sent = sum(collective.wire_bytes for collective in collectives)
        return {"collectives": dict(Counter(collective.kind for collective in collectives)), "sent_bytes": sent}


def attempt(function: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Call a function on all ranks; if it raises on any, return the first error's line on all of them."""
    result, error = None, None
    try:
        result = function(*args)
    except Exception as exception:  # whatever a contender raises is its result
        error = describe_error(exception)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return result, next((line for line in errors if line), None)


def describe_error(error: BaseException) -> str:
    """Return an exception as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def gather_slowest(seconds: list[float]) -> list[float]:
    """Return for each step the seconds of the slowest rank."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, seconds)
    return [max(step) for step in zip(*by_rank)]


def time_contenders(device: torch.device, options: Options, rows: list[Row]) -> list[dict[str, Any]]:
    """Measure all rows in turns.

    Returns:
        for each its `loss`, `seconds` of each round, `collectives` and `sent_bytes`, or its `error`.
    """
    with torch.compiler.config.patch(recompile_limit=8 * len(rows)):  # all contenders share the code of one model
        return _time_contenders(build_setup(options, device), rows)


def _time_contenders(setup: Setup, rows: list[Row]) -> list[dict[str, Any]]:
    options = setup.options
    results: list[dict[str, Any]] = [{} for _ in rows]
    runners: dict[int, Runner] = {}
    for index, row in enumerate(rows):
        runner, error = attempt(Runner, setup, row)
        for _ in range(options.warmup):
            if error is None:
                result, error = attempt(runner.step)
        if error is None:
            runners[index] = runner
            results[index]["loss"] = sum_losses(result[1], options)
        else:
            results[index]["error"] = error
    seconds: dict[int, list[float]] = {index: [] for index in runners}
    for round_number in range(options.rounds):
        for index in get_order(len(rows), round_number):
            if index in runners:
                seconds[index].append(runners[index].step()[0])
    for index, runner in runners.items():
        results[index]["seconds"] = gather_slowest(seconds[index])
        counts, error = attempt(runner.count)
        results[index].update(counts if error is None else {"error": error})
    return results


def sum_losses(loss: float, options: Options) -> float:
    """Return the loss of the whole batch, from each rank's part of it."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, loss)
    return sum(parts) / options.tp


def measure_alone(device: torch.device, options: Options, row: Row) -> dict[str, Any]:
    """Measure a row in processes of its own; return its `memory_bytes` and `compile_seconds`, or its `error`."""
    result, error = attempt(_measure_alone, device, options, row)
    return {"error": error} if error else result


def _measure_alone(device: torch.device, options: Options, row: Row) -> dict[str, Any]:
    return_freed_memory()
    load = CONTENDERS[row.contender].load
    if load is not None:
        load()
    small = replace(options, dim=64, layers=1, vocab=64, seq_len=8 * options.tp, batch=1)
    _train(Runner(build_setup(small, device), row), steps=1)  # loads the compiler and what else is not the model's
    torch.compiler.reset()
    before = reset_peak(device)
    runner = Runner(build_setup(options, device), row)
    optimizer = torch.optim.AdamW(runner.forward.parameters(), foreach=True)
    first, *later = _train(runner, steps=3, optimizer=optimizer)
    reset_peak(device)  # building the whole model on each rank is not training
    _train(runner, steps=2, optimizer=optimizer)
    used: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(used, get_peak(device) - before)
    return {"memory_bytes": max(used), "compile_seconds": first - statistics.median(later)}


def _train(runner: Runner, steps: int, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Run steps and return the seconds of their forward and backward."""
    optimizer = optimizer or torch.optim.AdamW(runner.forward.parameters(), foreach=True)
    seconds = []
    for _ in range(steps):
        seconds.append(runner.step()[0])
        optimizer.step()
    return seconds
