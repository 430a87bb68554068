"""Parametrization: properties that gather a parameter when the module reads it, and the context that disables them.

A module that owns parameters gets a subclass of its class with one property per parameter. The class holds no state:
it is cached per (class, names), and each property looks up its instance, so two models with other meshes or policies
live in one process. `module._parameters`, FQNs and `state_dict` keep the sharded DTensors. Every read of a parameter by
attribute, `hasattr` included, is a collective: all ranks must make it, or none.

Not here: how a parameter is gathered (unshard.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .bucket import Bucket
from .reshard import save_recipes
from .schedule import Schedule
from .unshard import TensorParallelSpec, Wire, unshard

_gather_enabled = True


@contextmanager
def disable_gather() -> Iterator[None]:
    """Make reads of parameters return the sharded DTensors themselves: for initialization, inspection, state dicts.

    Nests; the previous value is restored on exit. Not for use while a forward runs.
    """
    global _gather_enabled
    previous, _gather_enabled = _gather_enabled, False
    try:
        yield
    finally:
        _gather_enabled = previous


@dataclass(frozen=True)
class Parametrization:
    """How one parameter of one module is read by itself. Immutable, so copies of the module share it.

    Args:
        wire: gather and complete reduction, as in a bucket of this parameter alone.
        accumulates: whether inside `accumulate_gradients` the sum over replicas is left for the end.
        tensor_parallel: how the unsharded parameter is a DTensor; None: it is a plain tensor.
    """

    wire: Wire
    accumulates: bool
    tensor_parallel: TensorParallelSpec | None

    def __deepcopy__(self, memo: dict) -> Parametrization:
        return self  # process groups and meshes are not copied


@dataclass
class Scope:
    """What the forward of a module opens.

    Args:
        schedule: that of the whole model.
        buckets: those that the forward reads.
        is_model: whether this is the module that SimpleFSDP was applied to.
    """

    schedule: Schedule
    buckets: list[Bucket] = field(default_factory=list)
    is_model: bool = False

    @contextmanager
    def forward(self, module: nn.Module) -> Iterator[None]:
        """Run the forward of `module` inside."""
        with ExitStack() as stack:
            if self.is_model:
                stack.enter_context(self.schedule.forward())
            for bucket in self.buckets:
                bucket.enter()
                stack.callback(bucket.leave, module)
            if any(bucket.reshards for bucket in self.buckets):
                stack.enter_context(save_recipes(self.schedule))
            yield


def is_parametrized(module: nn.Module) -> bool:
    """Return whether the module's own parameters are gathered on access already, or its forward opens buckets."""
    return "_simple_fsdp" in module.__dict__


def get_buckets(model: nn.Module) -> list[Bucket]:
    """Return the buckets of all parameters of `model`, each once."""
    places = (place for m in model.modules() if is_parametrized(m) for place in m._simple_fsdp_buckets.values())
    return list(dict.fromkeys(bucket for bucket, _ in places))


def parametrize(
    module: nn.Module,
    parametrizations: dict[str, Parametrization],
    buckets: dict[str, tuple[Bucket, int]],
    scope: Scope | None,
) -> None:
    """Install gather on access for the named own parameters of `module`, in place.

    Args:
        buckets: per parameter its bucket and its place there; without one it is read by itself.
        scope: what the forward of the module opens; None: nothing.
    """
    module._simple_fsdp = parametrizations
    module._simple_fsdp_buckets = buckets
    module._simple_fsdp_scope = scope
    module._simple_fsdp_accumulates = False  # see accumulation.py
    module.__class__ = _parametrized_class(type(module), tuple(parametrizations), scope is not None)


@lru_cache(maxsize=None)
def _parametrized_class(cls: type[nn.Module], names: tuple[str, ...], has_scope: bool) -> type[nn.Module]:
    inherited_modifiers = getattr(cls, "_fqn_modifiers", lambda self: {})
    namespace: dict = {name: property(_getter(name)) for name in names}
    namespace.update(
        __module__=cls.__module__,
        _simple_fsdp_stored=property(lambda self: SimpleNamespace(**self._parameters)),
        # torch.distributed.checkpoint resolves FQNs with getattr, which would gather every parameter once per save
        # or load. Its hook for renamed children redirects the last step to the stored parameters.
        _fqn_modifiers=lambda self: {**inherited_modifiers(self), **dict.fromkeys(names, "_simple_fsdp_stored")},
        extra_repr=_extra_repr_without_gather(cls),
    )
    if has_scope:
        namespace["forward"] = _forward_in_scope(cls)
    return type(f"SimpleFSDP{cls.__name__}", (cls,), namespace)


def _extra_repr_without_gather(cls: type[nn.Module]):
    def extra_repr(self: nn.Module) -> str:
        with disable_gather():  # Linear looks at its bias, and print(model) on one rank must not wait for the others
            return cls.extra_repr(self)

    return extra_repr


def _forward_in_scope(cls: type[nn.Module]):
    def forward(self: nn.Module, *args, **kwargs):
        if torch.compiler.is_compiling():  # see graph/compile.py
            return cls.forward(self, *args, **kwargs)
        with self._simple_fsdp_scope.forward(self):
            return cls.forward(self, *args, **kwargs)

    return forward


def _getter(name: str):
    def read(self: nn.Module) -> torch.Tensor:
        stored = self._parameters[name]
        if stored is None or not _gather_enabled:
            return stored
        how = self._simple_fsdp[name]
        if how.wire.shard and not isinstance(stored, DTensor):
            raise TypeError(
                f"data_parallel: parameter {name!r} of {type(self).__name__} was replaced by a plain tensor after sharding. "
                "Copy new values into the sharded parameter instead, or replace it before data_parallel."
            )
        if name in self._simple_fsdp_buckets:
            bucket, index = self._simple_fsdp_buckets[name]
            if bucket.is_readable:
                return bucket.read(index)
        wire = how.wire
        if self._simple_fsdp_accumulates and how.accumulates:
            wire = wire._replace(reduction=wire.reduction.without_replicas())
        local = stored.to_local() if isinstance(stored, DTensor) else stored
        (unsharded,) = unshard((local,), wire)
        return how.tensor_parallel.wrap(unsharded) if how.tensor_parallel else unsharded

    return read
