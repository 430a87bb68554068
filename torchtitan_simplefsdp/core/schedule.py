"""Schedule: the order in which a model reads its buckets, and prefetching along it.

The order of one forward is the prediction for the next: the first forward prefetches nothing, a later one issues the
gather of the bucket that came next the last time. Backward goes back along the order of its own forward. A wrong
prediction costs time, not correctness; all ranks run the same program, so they predict alike.

Not here: what a bucket does (bucket.py), what is saved for backward (reshard.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from . import compat

if TYPE_CHECKING:
    from .bucket import Bucket, Gather


class Schedule:
    """The buckets of one call of `data_parallel`."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self._reset()

    def _reset(self) -> None:
        self.saves_recipes = False  # see reshard.py
        self._forwards = 0  # of the model, that run now
        self._forwards_begun = 0
        self._read: list[Bucket] = []  # in the forward that runs now
        self._next: dict[Bucket, Bucket] = {}
        self._before: dict[Bucket, Bucket] = {}
        self._last: Gather | None = None
        self._unsharded: dict[int, tuple[Gather, int]] = {}  # by storage
        self._backward_id: int | None = None
        self._issued_in_backward: list[Gather | Bucket] = []

    def __getstate__(self) -> dict:
        """A copy starts with nothing gathered; the buckets that are copied put themselves in, in a part of a model some."""
        return {"buckets": []}

    def __setstate__(self, state: dict) -> None:
        self.buckets = []
        self._reset()

    @property
    def run(self) -> tuple[str, int] | None:
        """Which backward, or forward of the whole model, runs now: reads share what is unsharded within one. None: none."""
        backward_id = compat.get_backward_id()
        if backward_id is not None:
            return "backward", backward_id
        return ("forward", self._forwards_begun) if self._forwards else None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward of the whole model inside."""
        if self._forwards == 0:
            self._forwards_begun += 1
            if compat.get_backward_id() is None:
                self._end_backward()  # of one that raised
        self._forwards += 1
        try:
            yield
        finally:
            self._forwards -= 1
            if self._forwards == 0:
                self._end_forward()

    def _end_forward(self) -> None:
        for bucket in self.buckets:
            bucket.drop_gathered()
        if compat.get_backward_id() is None:
            self._next = dict(zip(self._read, self._read[1:]))
            self._before = dict(zip(self._read[1:], self._read))
            self._read, self._last = [], None

    def advance(self, bucket: Bucket, gather: Gather) -> None:
        """Issue what comes after `bucket`, which a forward is about to wait for."""
        if compat.get_backward_id() is not None:  # activation checkpointing runs this forward again
            self._note(bucket)
            before = self._before.get(bucket)
            if before is not None and before.is_checkpointed and not before.is_unsharded_in(self.run):
                self._prefetch_again(before)
        elif self._forwards:
            bucket.is_checkpointed = gather.is_checkpointed = compat.is_in_checkpoint()
            self._read.append(bucket)
            gather.previous, self._last = self._last, gather
            if bucket in self._next:
                self._next[bucket].prefetch()

    def gather_again(self, gather: Gather) -> tuple[torch.Tensor, ...]:
        """Return the tensors of `gather` in a backward; gathers them if need be, and issues what comes after."""
        if not gather.is_finished:
            self._free_frozen()
            self._note(gather)
            gather.issue()
            previous = gather.previous
            if previous is not None and previous.is_checkpointed:
                self._prefetch_again(previous.bucket)
            elif previous is not None and previous.is_saved:
                self._note(previous)
                previous.issue()
        return gather.get()

    def _prefetch_again(self, bucket: Bucket) -> None:
        self._note(bucket)
        bucket.prefetch()

    def _note(self, issued: Gather | Bucket) -> None:
        """Have `issued` freed when the backward that runs now ends, whatever becomes of it."""
        backward_id = compat.get_backward_id()
        if backward_id != self._backward_id:
            self._end_backward()  # of one that raised
            self._backward_id = backward_id
            compat.call_at_end_of_backward(self._end_backward)
        self._issued_in_backward.append(issued)

    def _end_backward(self) -> None:
        for issued in self._issued_in_backward:
            issued.drop_gathered()
        self._issued_in_backward, self._backward_id = [], None

    def _free_frozen(self) -> None:
        """Free what backward gathered again of buckets without a gradient, which no reduction would free."""
        for issued in self._issued_in_backward:
            if issued.is_finished and not issued.is_trained:
                issued.drop_gathered()

    def register(self, gather: Gather, tensors: Sequence[torch.Tensor]) -> None:
        """Make the storages known by which `find` recognises unsharded parameters."""
        for index, tensor in enumerate(tensors):
            self._unsharded[compat.get_storage_id(tensor)] = gather, index

    def unregister(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forget storages that are about to be freed."""
        for tensor in tensors:
            del self._unsharded[compat.get_storage_id(tensor)]

    def find(self, tensor: torch.Tensor) -> tuple[Gather, int] | None:
        """Return which unsharded parameter `tensor` is a view of."""
        return self._unsharded.get(compat.get_storage_id(tensor))
