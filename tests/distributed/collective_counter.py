"""Counts collectives: those that core/ issues, and those of anyone that move floating-point tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from torchtitan_simplefsdp.core import compat


@contextmanager
def count_collectives() -> Iterator[Counter]:
    counter: Counter[str] = Counter()

    def counted(name, function):
        def call(*args, **keywords):
            counter[name] += 1
            return function(*args, **keywords)

        return call

    names = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
    with mock.patch.multiple(compat, **{name: counted(name, getattr(compat, name)) for name in names}):
        yield counter


class FloatCollectives(compat.TorchDispatchMode):
    """Names in `seen` every collective on floating-point tensors, of torch's own code too.

    Collectives on objects (the plans of torch.distributed.checkpoint) move bytes and sizes and are not among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs the op as ops on local tensors, which come here
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves):
                self.seen.append(func.name())
        return func(*args, **(kwargs or {}))
