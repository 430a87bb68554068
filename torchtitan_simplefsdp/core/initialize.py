"""Mesh-invariant init: the same initial weights bit for bit on every mesh, device count and pipeline split.

DTensor's own random numbers are not supported on a CPU mesh (every shard would be the same copy), and a random stream
that runs through the model gives another model per pipeline split. Here each parameter draws from a generator of its
own, seeded by (seed, FQN, how many draws it had), into one full temporary, of which the local shard is kept. So peak
extra memory is one parameter, and nothing is communicated.

Not here: what the initial values are; that is the model's own `init_weights`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import compat
from .parametrize import disable_gather

# module names that activation checkpointing and torch.compile put into FQNs; wrapping must not change the weights
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
_COMPILE_PREFIX = "_orig_mod."


@contextmanager
def mesh_invariant_init(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Make in-place random ops on the parameters of `model` independent of how these are sharded.

    Args:
        model: its parameters are materialized (not meta), sharded or not.
        seed: the same on every rank; None: `torch.initial_seed()`, which then must be the same on every rank.

    Raises:
        NotImplementedError: a random op on a DTensor that is not in place (`torch.randn_like(weight)`).
    """
    seed = torch.initial_seed() if seed is None else seed
    with disable_gather(), _MeshInvariantRandom(model, seed):
        yield


class _MeshInvariantRandom(compat.TorchDispatchMode):
    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._draws: Counter[str] = Counter()
        self._fqns = WeakIdKeyDictionary()
        for fqn, parameter in model.named_parameters():
            self._fqns[parameter] = fqn.replace(_CHECKPOINT_PREFIX, "").replace(_COMPILE_PREFIX, "")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if torch.Tag.nondeterministic_seeded in func.tags and target is not None:
            return self._draw(func, target, args[1:], kwargs)
        out = func(*args, **kwargs)
        if target in self._fqns and isinstance(out, torch.Tensor) and out.shape == target.shape:
            self._fqns[out] = self._fqns[target]  # a cast or detached copy that is filled and copied back
        return out

    def _draw(self, func, target: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
        if not compat.is_in_place(func):
            if isinstance(target, DTensor):
                raise NotImplementedError(
                    f"mesh_invariant_init: {func} on a sharded parameter has no mesh-invariant form. "
                    "Fill the parameter in place, for instance with torch.nn.init.normal_(parameter)."
                )
            return func(target, *args, **kwargs)
        if kwargs.get("generator") is None and target in self._fqns:
            kwargs = {**kwargs, "generator": self._generator(self._fqns[target], target.device)}
        if not isinstance(target, DTensor):
            return func(target, *args, **kwargs)
        full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        func(full, *args, **kwargs)
        # src_data_rank=None: every rank has drawn the same full tensor, so nothing is sent
        shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
        return target

    def _generator(self, fqn: str, device: torch.device) -> torch.Generator:
        key = f"{self._seed}/{fqn}/{self._draws[fqn]}"
        self._draws[fqn] += 1
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        # 63 bits: manual_seed takes what fits a signed 64-bit integer on every device
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
