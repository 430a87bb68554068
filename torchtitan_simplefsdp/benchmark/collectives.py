"""Collectives: which ones a step issues and how many bytes each rank sends, whoever issues them.

They are seen where all of them pass, as ops of torch's dispatcher: DistributedDataParallel's reducer and FSDP2 call
c10d's, SimpleFSDP and DTensor the functional ones, and compiled code either.

[Note: bytes sent]
The bytes are those a ring needs, the fewest that any algorithm needs: n ranks send (n - 1) / n of the full tensor for
an all_gather, a reduce_scatter or an all_to_all, twice that for an all_reduce. A backend can send more: gloo runs a
reduce_scatter as an all_reduce.

Not here: what collectives cost (measure.py times whole steps).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_simplefsdp.core import compat

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
# Per kind: the bytes that each of n ranks sends per byte of its input, see [Note: bytes sent].
_SENT = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


class CollectiveCounter(compat.TorchDispatchMode):
    """Counts collectives by kind in `counts`, and the bytes that this rank sends in them in `sent`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sent: float = 0.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise compiled code would not run as compiled below this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs the op as ops on local tensors, which come here
        if func.namespace in _NAMESPACES:
            self._count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple, kwargs: dict) -> None:
        name = func.name().partition("::")[2]
        arguments = compat.get_arguments(func, args, kwargs)
        if not arguments.keys() & {"process_group", "group_name"} or name == "barrier":  # a wait, or autograd's bookkeeping
            return
        kind, size = get_kind(name), compat.get_group_of_collective(func, args, kwargs).size()
        inputs = compat.tree_leaves([value for key, value in arguments.items() if not key.startswith("out")])
        payload = sum(leaf.nbytes for leaf in inputs if isinstance(leaf, torch.Tensor))
        if size > 1:
            self.counts[kind] += 1
            self.sent += _SENT[kind](size) * payload


def get_kind(name: str) -> str:
    """Return the kind of collective that an op is, from its name without namespace.

    Raises: NotImplementedError for an op that is none of these.
    """
    plain = name.replace("_", "")
    for kind in _SENT:
        if kind.replace("_", "") in plain:
            return kind
    raise NotImplementedError(
        f"benchmark: a step called the collective {name!r}, whose bytes are not known. Known: {', '.join(_SENT)}."
    )
