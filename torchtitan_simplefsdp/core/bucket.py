"""Bucket: parameters that travel in one collective in eager mode, and when its collectives are issued.

[Note: life of a bucket]
A bucket has scopes: modules whose forward reads its parameters. The first read inside a scope unshards all of them in one
all_gather; later reads take what is there, and when the scopes' forwards have ended it is dropped. On that way
- the all_gather of the next bucket is issued before this one is waited for (schedule.py knows the next one);
- the reduction is issued by the backward of `_UseUnsharded` and waited for by that of `_HandOutGradients`. The engine of
  autograd runs nodes in the reverse order of their creation, and `_HandOutGradients` of a bucket is created when its
  gather is issued, before `_UseUnsharded` of the bucket before. So a reduction is waited for after the backward of one
  more bucket, and nothing but autograd's own order does it.

A read outside of all scopes (of one parameter, by hand, or by a forward that activation checkpointing repeats inside of a
block) gathers that parameter alone.

[Note: reuse of a gather]
Under activation checkpointing and with several microbatches in flight a bucket is read again before the backward of an
earlier read. Without resharding the gathered tensors are still there, and are taken again where no parameter can have been
written since: in a backward, and inside one `accumulate_gradients`. Version counters would not tell: an optimizer that
writes a list of DTensors at once (foreach, fused) leaves them as they are.

Not here: the collectives (unshard.py), dropping what autograd saved (reshard.py), compiled graphs: those read parameters
through `unshard` and their own passes decide when collectives are issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor

from . import compat
from .unshard import TensorParallelSpec, Wire, finish_gather, finish_reduce, start_gather, start_reduce, unshard

if TYPE_CHECKING:
    from .schedule import Schedule


class Member:
    """One parameter of a bucket.

    Args:
        fqn: its (first) name in the model.
        module, name: where it is stored.
        tensor_parallel: how the unsharded parameter is a DTensor; None: it is a plain tensor.
    """

    def __init__(self, fqn: str, module: nn.Module, name: str, tensor_parallel: TensorParallelSpec | None) -> None:
        self.fqn, self.module, self.name, self.tensor_parallel = fqn, module, name, tensor_parallel

    @property
    def stored(self) -> nn.Parameter:
        """The sharded parameter as it is now; an optimizer or a loader may have replaced it."""
        return self.module._parameters[self.name]


class Bucket:
    """See [Note: life of a bucket].

    Args:
        members: its parameters, tied ones once.
        wire: constants of their collectives.
        accumulates: whether inside `accumulate_gradients` the sum over replicas is left for the end.
        reshard_after_forward: whether the unsharded parameters are freed after forward and gathered again in backward.
    """

    def __init__(self, members: list[Member], wire: Wire, accumulates: bool, reshard_after_forward: bool) -> None:
        self.members, self.wire, self.accumulates = members, wire, accumulates
        self.reshards = reshard_after_forward and wire.shard is not None
        self.scopes: list[nn.Module] = []
        self.schedule: Schedule | None = None
        self._reset()

    def _reset(self) -> None:
        self.is_checkpointed = False  # whether the last forward was, so that backward reads the bucket once more
        self.accumulation: object | None = None  # which `accumulate_gradients` runs now
        self._open = 0  # scopes whose forward runs now
        self._left: set[int] = set()  # scopes whose forward has run since the first read
        self._outputs: dict[bool, tuple[torch.Tensor, ...]] = {}  # what reads return, with autograd and without
        self._gather: Gather | None = None  # that the outputs come from
        self._run: tuple[str, int] | None = None  # in which they were read; see Schedule.run
        self._issued: _Issued | None = None  # prefetched
        # A strong reference: were it weak, whether a collective is issued would depend on when each rank collects garbage.
        self._latest: Gather | None = None

    def __getstate__(self) -> dict:
        """A copy of the model starts with nothing gathered."""
        constants = ("members", "wire", "accumulates", "reshards", "scopes", "schedule")
        return {name: getattr(self, name) for name in constants}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._reset()
        self.schedule.buckets.append(self)  # that of the copy, which has no buckets by itself

    @property
    def is_readable(self) -> bool:
        """Whether a scope's forward runs now; in code that is compiled, whether it was unsharded before."""
        return self._open > 0 and (bool(self._outputs) or not torch.compiler.is_compiling())

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters has a gradient to reduce."""
        return any(member.stored.requires_grad for member in self.members)

    def get_shards_with_autograd(self) -> list[torch.Tensor]:
        """Return the local shards, whose gradients reach the stored parameters."""
        stored = [member.stored for member in self.members]
        return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in stored]

    def enter(self) -> None:
        """The forward of a scope begins."""
        self._open += 1

    def leave(self, scope: nn.Module) -> None:
        """The forward of a scope has ended, maybe by an exception."""
        self._open -= 1
        self._left.add(id(scope))
        if self._open == 0 and (len(self._left) == len(self.scopes) or self.schedule.run is None):
            self.drop()

    def open_in_graph(self, shards: Sequence[torch.Tensor]) -> None:
        """Unshard by one node of a graph that torch.compile traces; reads take its results until `close_in_graph`."""
        self._open += 1
        self._outputs = {torch.is_grad_enabled(): self._wrap(unshard(shards, _get_wire(self)))}

    def close_in_graph(self) -> None:
        """Undo `open_in_graph`."""
        self._open -= 1
        self._outputs = {}

    def drop(self) -> None:
        """Forget what was unsharded for reading; what autograd saved lives on, or is a recipe (reshard.py)."""
        self._left.clear()
        self._outputs = {}
        gather, self._gather = self._gather, None
        if gather is not None and (self.reshards or not gather.users):
            gather.drop_gathered()

    def read(self, index: int) -> torch.Tensor:
        """Return the unsharded parameter, which all reads of this forward share."""
        with_autograd = torch.is_grad_enabled()
        if torch.compiler.is_compiling():  # opened in this graph, or outside of it for a block that is compiled alone
            return self._outputs.get(with_autograd, self._outputs.get(not with_autograd))[index]
        run = self.schedule.run
        if self._run != run:  # what another one has left, which may have raised
            self.drop()
            self._run = run
        if with_autograd not in self._outputs:
            with compat.hide_from_checkpoint():
                self._outputs[with_autograd] = self._unshard()
        return self._outputs[with_autograd][index]

    def _unshard(self) -> tuple[torch.Tensor, ...]:
        if self._gather is None:
            gather, link, token = self._take_issued()
            self.schedule.advance(self, gather)
            self._gather = gather
        else:  # it was read before, with autograd or without
            gather, link, token = self._gather, *_link(self._gather)
        return self._wrap(_UseUnsharded.apply(token, link))

    def _wrap(self, unsharded: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            tensor if member.tensor_parallel is None else member.tensor_parallel.wrap(tensor)
            for tensor, member in zip(unsharded, self.members)
        )

    def prefetch(self) -> None:
        """Issue the gather that the next read needs, and place its reduction one bucket later in backward."""
        if self._issued is None and not self.is_unsharded_in(self.schedule.run):
            gather = self._get_gather()
            self._issued = _Issued(self.schedule.run, gather, *_link(gather))

    def is_unsharded_in(self, run: tuple[str, int] | None) -> bool:
        """Whether the bucket was read already in this run; see Schedule.run."""
        return self._run == run

    @property
    def is_finished(self) -> bool:
        """A prefetched gather is not waited for before a read takes it."""
        return False

    def drop_gathered(self) -> None:
        """Drop what is there for reads, and wait for a prefetched gather that nobody read."""
        self.drop()
        issued, self._issued = self._issued, None
        if issued is not None and not issued.gather.users:
            issued.gather.drop_gathered()

    def _take_issued(self) -> tuple[Gather, _Link, torch.Tensor]:
        issued, self._issued = self._issued, None
        if issued is None:
            gather = self._get_gather()
        elif issued.run == self.schedule.run and issued.gather.is_current:
            if issued.token.requires_grad == torch.is_grad_enabled():
                return issued.gather, issued.link, issued.token
            gather = issued.gather
        else:
            issued.gather.drop_gathered()
            gather = self._get_gather()
        return gather, *_link(gather)

    def _get_gather(self) -> Gather:
        """Return a gather that is issued: the latest, see [Note: reuse of a gather], or a new one."""
        gather = self._latest
        if gather is not None and gather.is_unsharded:
            is_accumulating = self.accumulation is not None and gather.accumulation is self.accumulation
            if is_accumulating or compat.get_backward_id() is not None:
                return gather
        self._latest = gather = Gather(self)
        gather.issue()
        return gather


class Gather:
    """The unsharded parameters of a bucket for one forward and its backward.

    `users` counts the forwards whose backward is still to come.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.users = bucket, 0
        self.accumulation = bucket.accumulation
        self.is_saved = False  # whether autograd saved one of its tensors, as a recipe
        self.is_checkpointed = False  # whether backward will run its forward again
        self.previous: Gather | None = None  # of the bucket that was read before this one
        self.parameters = [member.stored for member in bucket.members]
        self.shards = [compat.get_local(parameter) for parameter in self.parameters]
        self._versions = self._get_versions()
        self._started: torch.Tensor | None = None
        self._is_started = False
        self._tensors: tuple[torch.Tensor, ...] | None = None

    @property
    def is_unsharded(self) -> bool:
        """Whether the tensors are there or under way."""
        return self._is_started or self._tensors is not None

    @property
    def is_finished(self) -> bool:
        """Whether the tensors are there."""
        return self._tensors is not None

    @property
    def is_trained(self) -> bool:
        """Whether a reduction will free the tensors."""
        return self.bucket.is_trained

    @property
    def is_current(self) -> bool:
        """Whether the bucket's parameters are those that were gathered and were not seen to be written since."""
        stored = (member.stored for member in self.bucket.members)
        return not self.is_written and all(a is b for a, b in zip(self.parameters, stored))

    @property
    def is_written(self) -> bool:
        """Whether a local shard was seen to be written since the gather was issued first."""
        return self._versions != self._get_versions()

    def _get_versions(self) -> list[int]:
        return [tensor._version for tensor in (*self.parameters, *self.shards)]

    def issue(self) -> None:
        """Issue the all_gather unless the tensors are there."""
        if not self.is_unsharded:
            if self.is_written:
                raise RuntimeError(
                    f"data_parallel: parameters of the bucket of {self.bucket.members[0].fqn!r} were written between a forward "
                    "and its backward, which gathers them again. Step after backward, or use reshard_after_forward=False."
                )
            with torch.no_grad():
                self._started, self._is_started = start_gather(self.shards, self.bucket.wire), True

    def get(self) -> tuple[torch.Tensor, ...]:
        """Return the unsharded TP-local tensors, outside of autograd; gathers if need be."""
        if not self.is_finished:
            self.issue()
            with torch.no_grad():
                tensors = finish_gather(self._started, self.shards, self.bucket.wire)
            # aliases, as the Function that returns these gives them a graph, which leads back to here
            self._tensors = tuple(tensor.detach() for tensor in tensors)
            self._started, self._is_started = None, False
            if self.bucket.reshards:
                self.bucket.schedule.register(self, self._tensors)
        return self._tensors

    def drop_gathered(self) -> None:
        """Free the tensors; those that someone else holds live on."""
        if self._started is not None:
            compat.wait(self._started)
        if self._tensors is not None and self.bucket.reshards:
            self.bucket.schedule.unregister(self._tensors)
        self._started, self._is_started, self._tensors = None, False, None


class _Link:
    """Joins the two nodes that a bucket has in the graph of one forward."""

    def __init__(self, gather: Gather) -> None:
        self.gather = gather
        self.wire = _get_wire(gather.bucket)
        self.device = gather.shards[0].device
        self.reduction: tuple[torch.Tensor, Wire, list[int]] | None = None  # issued


class _Issued(NamedTuple):
    """A prefetched gather, the run that it was issued in, and its first node, whose output is the token."""

    run: tuple[str, int] | None
    gather: Gather
    link: _Link
    token: torch.Tensor


def _link(gather: Gather) -> tuple[_Link, torch.Tensor]:
    """Return a link and the output of its first node; apart, as together they would be a cycle of references."""
    link = _Link(gather)
    return link, _HandOutGradients.apply(link, *gather.parameters)


class _HandOutGradients(torch.autograd.Function):
    """Backward: wait for the reduction and give each stored parameter the gradient of its shard."""

    @staticmethod
    def forward(ctx: FunctionCtx, link: _Link, *stored: torch.Tensor) -> torch.Tensor:
        ctx.link = link
        return torch.empty(0, device=link.device)  # no value, only the edge of the graph

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        link: _Link = ctx.link
        parameters = link.gather.parameters
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        if link.reduction is not None:
            started, wire, indices = link.reduction
            link.reduction = None
            for index, gradient in zip(indices, finish_reduce(started, wire)):
                gradients[index] = _like_stored(gradient.to(parameters[index].dtype), parameters[index])
        return None, *gradients


class _UseUnsharded(torch.autograd.Function):
    """Forward: the unsharded parameters. Backward: issue the reduction of their gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, token: torch.Tensor, link: _Link) -> tuple[torch.Tensor, ...]:
        ctx.link = link
        ctx.set_materialize_grads(False)  # a parameter that is not used has no gradient, as in FSDP2
        if token.requires_grad and compat.get_backward_id() is None:
            link.gather.users += 1
        outputs = tuple(tensor.view_as(tensor) for tensor in link.gather.get())
        frozen = [not parameter.requires_grad for parameter in link.gather.parameters]
        ctx.mark_non_differentiable(*(output for output, is_frozen in zip(outputs, frozen) if is_frozen))
        return outputs

    @staticmethod
    @once_differentiable  # the collectives have no gradient of their own; a double backward must not pass silently
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        link: _Link = ctx.link
        link.reduction = None
        link.gather.users -= 1
        if link.gather.users <= 0:
            link.gather.drop_gathered()
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if indices:
            wire = link.wire.select(indices)
            link.reduction = start_reduce([gradients[index] for index in indices], wire), wire, indices
        return torch.empty(0, device=link.device), None


def _get_wire(bucket: Bucket) -> Wire:
    """Return the constants of a read now: inside `accumulate_gradients` its backward leaves the sum over replicas."""
    if bucket.accumulates and bucket.members[0].module._simple_fsdp_accumulates:
        return bucket.wire._replace(reduction=bucket.wire.reduction.without_replicas())
    return bucket.wire


def _like_stored(gradient: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    if not isinstance(stored, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, stored.device_mesh, stored.placements, run_check=False, shape=stored.shape, stride=stored.stride()
    )
