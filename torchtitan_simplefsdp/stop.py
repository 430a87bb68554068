"""Stopping a run: how a scheduler's SIGTERM goes from the launcher to the ranks, and how a rank answers it.

torchrun would pass a SIGTERM on as well, but kill the ranks 30 seconds later, saved or not. How much time there is the
scheduler knows; so the launcher waits for the ranks, which end after the step they are at. Schedulers that signal every
process themselves are served too: a rank does not mind a second SIGTERM, and its data loader workers leave it to the rank.

Not here: what is saved (titan/trainer.py); Ctrl-C, which ends a run at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


class StopRequest:
    """Whether this rank was told to stop; until `listen` a SIGTERM ends it at once."""

    def __init__(self) -> None:
        self.received = False

    def listen(self) -> None:
        """From here on a SIGTERM is noted instead of ending this process."""
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True


def outlive_sigterm(worker: int) -> None:
    """In a data loader worker, end at the rank's SIGTERM only; a `worker_init_fn` of torch's DataLoader.

    Any other would end the worker, and the rank with an error before it has saved.
    """
    rank = multiprocessing.parent_process().pid  # not os.getppid(), which may be multiprocessing's fork server
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def forward_sigterm() -> Iterator[None]:
    """Pass the first SIGTERM on to the ranks and wait for them; at a second one torchrun ends them within 30 seconds."""
    from torch.distributed.elastic.multiprocessing import SignalException

    forwarded = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal forwarded
        ranks = find_children(os.getpid())
        if forwarded or not ranks:
            raise SignalException("stopped", signal.Signals(number))
        forwarded = True
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):  # ended by itself since
                os.kill(pid, number)

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def find_children(pid: int) -> list[int]:
    """Return the processes that one has started; of a launcher they are the ranks, of which torchrun does not tell."""
    children = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended since
            _, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid:
                children.append(int(status.parent.name))
    return children
