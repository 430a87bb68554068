"""Compile: a model under SimpleFSDP as one graph, or its blocks' computation one by one.

- `compile_model`: forward and backward are one graph each, collectives included (arXiv:2411.00284, section 3.2). What
  enters is each parameter's local shard as a plain tensor: DTensors as inputs would bring their mesh into the graph, which
  torch 2.13 cannot partition on CPU where activations are recomputed. Compile time grows with the number of blocks.
- `compile_blocks`: the collectives stay in eager mode, with their buckets, prefetching and resharding; the computation of
  a block is compiled with the unsharded parameters as inputs. Equal blocks share compiled code, so compile time does not
  grow with their number.

Not here: which gathers backward repeats (partition.py), when collectives of a graph are issued (reorder.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from torchtitan_simplefsdp.core import compat
from torchtitan_simplefsdp.core.bucket import Bucket
from torchtitan_simplefsdp.core.bucket_plan import find_blocks
from torchtitan_simplefsdp.core.parametrize import get_buckets, is_parametrized

from .partition import SimpleFSDPPartitioner


def compile_model(model: nn.Module, backend: str = "inductor") -> nn.Module:
    """Compile the forward and backward of `model` as one graph each, in place.

    Args:
        model: one that `data_parallel` was applied to as a whole, or `apply_mixed_precision`.
        backend: of torch.compile: "inductor" or "aot_eager", whose graphs issue collectives in the order of eager mode, and
            gather again in backward what `reshard_after_forward` says; or another one, which gets the graph as traced.

    Returns:
        `model`, whose class is another one; its FQNs are the same.

    Raises:
        ValueError: SimpleFSDP was not applied to `model`, or it is compiled already.
    """
    _validate(model, "compile_model")
    buckets = get_buckets(model)
    model._simple_fsdp_graph_buckets = buckets
    model.__class__ = _model_class(type(model), _build_backend(backend, buckets))
    return model


def compile_blocks(model: nn.Module, backend: str = "inductor") -> nn.Module:
    """Compile the computation of each block of `model` in place; what is not in a block stays in eager mode.

    Args:
        model: one that `data_parallel` was applied to as a whole, or `apply_mixed_precision`. Its blocks are those of the
            bucket plan 'block', with wrappers around them (activation checkpointing) as part of the computation.
        backend: of torch.compile.

    Returns:
        `model`, whose blocks' classes are others; FQNs are the same.

    Raises:
        ValueError: SimpleFSDP was not applied to `model`, it has no blocks, or they are compiled already.
    """
    _validate(model, "compile_blocks")
    blocks = [model.get_submodule(fqn) for fqn in find_blocks(model)]
    if not blocks:
        raise ValueError(
            "compile_blocks: the model has no blocks, elements of a ModuleList, ModuleDict or Sequential. Use compile_model."
        )
    for block in blocks:
        block._simple_fsdp_scopes = [m for m in block.modules() if is_parametrized(m) and m._simple_fsdp_scope]
        block.__class__ = _block_class(type(block), backend)
    return model


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module` was compiled by this file."""
    return "_simple_fsdp_graph_buckets" in module.__dict__ or "_simple_fsdp_scopes" in module.__dict__


def _validate(model: nn.Module, caller: str) -> None:
    if not any(is_parametrized(module) for module in model.modules()):
        raise ValueError(f"{caller}: the model has no SimpleFSDP. Apply data_parallel first.")
    if any(is_compiled(module) for module in model.modules()):
        raise ValueError(f"{caller}: the model, or a part of it, is compiled already.")


def _build_backend(name: str, buckets: list[Bucket]) -> str | Callable:
    resharding = {bucket.reshards for bucket in buckets if bucket.wire.shard is not None}
    if not resharding or name not in ("aot_eager", "inductor"):
        return name
    partitioner = SimpleFSDPPartitioner(None if len(resharding) == 2 else resharding.pop())
    return compat.build_aot_eager(partitioner) if name == "aot_eager" else compat.build_inductor(partitioner)


def _model_class(cls: type[nn.Module], backend: str | Callable) -> type[nn.Module]:
    def run(self: nn.Module, shards: list[list[torch.Tensor]], args: tuple, kwargs: dict[str, Any]) -> Any:
        # all buckets here, as torch.compile allows no side effect inside of activation checkpointing; the graph says what
        # is unsharded, not when
        for bucket, of_bucket in zip(self._simple_fsdp_graph_buckets, shards):
            bucket.open_in_graph(of_bucket)
        out = cls.forward(self, *args, **kwargs)
        for bucket in self._simple_fsdp_graph_buckets:
            bucket.close_in_graph()
        return out

    compiled = torch.compile(run, backend=backend, fullgraph=True)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return compiled(self, [bucket.get_shards_with_autograd() for bucket in self._simple_fsdp_graph_buckets], args, kwargs)

    return _subclass(cls, forward)


@lru_cache(maxsize=None)  # one compiled function, so one cache of compiled code, per class
def _block_class(cls: type[nn.Module], backend: str) -> type[nn.Module]:
    compiled = torch.compile(cls.forward, backend=backend, fullgraph=True)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for module in self._simple_fsdp_scopes:
                scope = module._simple_fsdp_scope
                stack.enter_context(scope.forward(module))
                for bucket in scope.buckets:
                    bucket.read(0)  # here, so that the compiled code finds the parameters unsharded
            return compiled(self, *args, **kwargs)

    return _subclass(cls, forward)


def _subclass(cls: type[nn.Module], forward: Callable) -> type[nn.Module]:
    return type(f"Compiled{cls.__name__}", (cls,), {"__module__": cls.__module__, "forward": forward})
