"""Pools of worker processes that tests share: each call runs one function on the N ranks of a gloo world.

Importing torch costs seconds, so the processes of each world size live for all tests of this folder, and so does their
process group: DTensor caches meshes by shape, and a cached mesh must not outlive its groups. The group rendezvous through
a file (no port). A rank that raises fails the test; after a failure or a hang the pool is killed and the next call gets a
new one.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

CALL_TIMEOUT_SECONDS = 300


class RankPool:
    """Runs functions on gloo ranks; the processes of a world size are started when first needed.

    Args:
        preload: installed modules that are imported once, in a process that all ranks are then forked from; None: each
            rank is a new interpreter. Only one pool of a process can have this.
    """

    def __init__(self, preload: list[str] | None = None) -> None:
        self._worlds: dict[int, _World] = {}
        self._context = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            self._context.set_forkserver_preload(preload)

    def run(self, function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank of a world of `world_size`; return the results by rank."""
        if world_size not in self._worlds:
            self._worlds[world_size] = _World(world_size, self._context)
        results, failure = self._worlds[world_size].run(function, args)
        if failure:
            self._worlds.pop(world_size).close()  # its other ranks may wait in a collective for ever
            raise AssertionError(failure)
        return results

    def close(self) -> None:
        """End all processes."""
        for world in self._worlds.values():
            world.close()


class _World:
    def __init__(self, world_size: int, context: BaseContext) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._ranks: list[tuple[multiprocessing.Process, Connection]] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, store), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, function: Callable[..., Any], args: tuple) -> tuple[list[Any], str | None]:
        for _, connection in self._ranks:
            connection.send((function, args))
        results: dict[int, Any] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        deadline = time.monotonic() + CALL_TIMEOUT_SECONDS
        while waiting:
            answered = wait(list(waiting), timeout=deadline - time.monotonic())
            if not answered:
                return [], f"ranks {sorted(waiting.values())} of {len(self._ranks)} did not answer in {CALL_TIMEOUT_SECONDS} s"
            for connection in answered:
                rank = waiting.pop(connection)
                try:
                    results[rank], failure = connection.recv()
                except EOFError:
                    process = self._ranks[rank][0]
                    process.join()
                    failure = f"the process has died, exit code {process.exitcode}; stderr has its stack if a signal killed it"
                if failure:  # the others may wait for this one
                    return [], f"rank {rank} of {len(self._ranks)}:\n{failure}"
        return [results[rank] for rank in range(len(self._ranks))], None

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(connection: Connection, rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    import torchtitan_simplefsdp.core  # noqa: F401  # before the process group is built, see use_one_gloo_thread

    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=CALL_TIMEOUT_SECONDS),
    )
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((function(*args), None))
        except BaseException:  # pytest's own failures are no Exceptions
            connection.send((None, traceback.format_exc()))
        torch.compiler.reset()
