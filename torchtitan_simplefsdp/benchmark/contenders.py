"""Contenders: what is compared, as a table from names to how a model is made parallel and compiled.

Every build function takes the same model with the same weights, on every rank, and returns what is called in a step.
It may raise: the report then shows the error in place of numbers. One function calls `data_parallel`, one compiles.

Not here: torchtitan's own SimpleFSDP (peers.py), how contenders are measured (measure.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy as FSDP2MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from torchtitan_simplefsdp.core.data_parallel import apply_mixed_precision, data_parallel
from torchtitan_simplefsdp.core.precision import MixedPrecisionPolicy
from torchtitan_simplefsdp.graph.compile import compile_blocks, compile_model

from . import peers
from .llama import apply_tp, build_llama, Llama
from .options import MODES, Options

DTYPES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class Setup:
    """What a rank builds contenders with: options, device, and a mesh per mode (data-parallel dims, then TP)."""

    options: Options
    device: torch.device
    meshes: dict[str, DeviceMesh]

    def get_dp_mesh(self, mode: str) -> DeviceMesh:
        return self.meshes[mode][tuple(name for name in self.meshes[mode].mesh_dim_names if name != "tp")]

    def build_model(self, mode: str) -> Llama:
        """Return the model with tensor parallelism, if any, on this rank's device."""
        model = build_llama(self.options, self.device)
        if self.options.tp > 1:
            apply_tp(model, self.meshes[mode or self.options.modes[0]]["tp"])
        return model

    def build_casting_model(self, mode: str) -> Llama:
        """Return the model with mixed precision, if any: for what has none of its own."""
        model = self.build_model(mode)
        if self.options.dtype == "fp32":
            return model
        return apply_mixed_precision(model, MixedPrecisionPolicy(*DTYPES[self.options.dtype]))


def build_setup(options: Options, device: torch.device) -> Setup:
    """Build the meshes of all modes; every rank must call it."""
    dims = {
        "fully_shard": {"fsdp": options.dp},
        "replicate": {"dp_replicate": options.dp},
        "hybrid_shard": {"dp_replicate": 2, "fsdp": options.dp // 2},
    }
    tp = {"tp": options.tp} if options.tp > 1 else {}
    named = {mode: {**dims[mode], **tp} for mode in options.modes}
    meshes = {m: init_device_mesh(device.type, tuple(d.values()), mesh_dim_names=tuple(d)) for m, d in named.items()}
    return Setup(options, device, meshes)


Build = Callable[[Setup, str], nn.Module]


class Contender(NamedTuple):
    """One line of the comparison per mode.

    Args:
        build: from the setup and the mode to the module that a step calls.
        modes: those it has; none: it is the same in every mode.
        compiled: whether its like without communication is `none+compile`.
        load: imports what it needs, before memory is looked at.
    """

    build: Build
    modes: tuple[str, ...] = MODES
    compiled: bool = False
    load: Callable[[], Any] | None = None


def build_none(setup: Setup, mode: str, compiled: bool) -> nn.Module:
    """The model on this rank's part of the batch, without communication of data parallelism."""
    model = setup.build_casting_model(mode)
    return torch.compile(model, fullgraph=True, backend="inductor") if compiled else model


def build_ddp(setup: Setup, mode: str) -> nn.Module:
    """DistributedDataParallel, which averages gradients instead of summing them; buffers are constants."""
    group = setup.get_dp_mesh(mode).get_group()
    return DistributedDataParallel(setup.build_casting_model(mode), process_group=group, forward_sync_buffers=False)


def build_fsdp2(setup: Setup, mode: str, compiled: bool, reshard: bool = True) -> nn.Module:
    """FSDP2 and torch.compile as torchtitan applies both to its llama3: per block, last norm and output together."""
    model, mesh = setup.build_model(mode), setup.get_dp_mesh(mode)
    shard = partial(fully_shard, mesh=mesh, mp_policy=FSDP2MixedPrecisionPolicy(*DTYPES[setup.options.dtype]))
    shard(model.tok_embeddings, reshard_after_forward=reshard)
    for index, block in enumerate(model.layers):
        if compiled:
            model.layers[index] = block = torch.compile(block, fullgraph=True, backend="inductor")
        shard(block, reshard_after_forward=reshard)
    shard([model.norm, model.output], reshard_after_forward=False)  # backward needs them at once
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
    return model


def build_ours(setup: Setup, mode: str, backend: str | None = None, scope: str = "model", **keywords: Any) -> nn.Module:
    """SimpleFSDP; `keywords` are those of `data_parallel`, `backend` and `scope` those of `compile_ours`."""
    policy = MixedPrecisionPolicy(*DTYPES[setup.options.dtype])
    model = data_parallel(setup.build_model(mode), setup.get_dp_mesh(mode), mode=mode, mp_policy=policy, **keywords)
    return compile_ours(model, backend, scope) if backend else model


def compile_ours(model: nn.Module, backend: str, scope: str) -> nn.Module:
    """Compile each 'block' by itself, between eager collectives, or the whole 'model', collectives included."""
    return compile_model(model, backend) if scope == "model" else compile_blocks(model, backend)


def build_torchtitan(setup: Setup, mode: str, compiled: bool) -> nn.Module:
    """torchtitan 0.2.2's own SimpleFSDP (torchtitan.experiments.simple_fsdp)."""
    model = peers.apply_torchtitan(setup.build_model(mode), setup.get_dp_mesh(mode), mode, *DTYPES[setup.options.dtype])
    return torch.compile(model, fullgraph=True, backend="inductor") if compiled else model


def _ours(**keywords: Any) -> Contender:
    return Contender(partial(build_ours, **keywords), compiled="backend" in keywords)


_SHARDED = ("fully_shard", "hybrid_shard")

CONTENDERS: dict[str, Contender] = {
    "none": Contender(partial(build_none, compiled=False), ()),
    "none+compile": Contender(partial(build_none, compiled=True), (), compiled=True),
    "ddp": Contender(build_ddp, ("replicate",)),
    "fsdp2": Contender(partial(build_fsdp2, compiled=False), _SHARDED),
    "fsdp2+keep": Contender(partial(build_fsdp2, compiled=False, reshard=False), _SHARDED),
    "fsdp2+compile": Contender(partial(build_fsdp2, compiled=True), _SHARDED, compiled=True),
    "torchtitan": Contender(partial(build_torchtitan, compiled=False), load=peers.load),
    "torchtitan+inductor": Contender(partial(build_torchtitan, compiled=True), compiled=True, load=peers.load),
    "ours": _ours(),
    "ours+keep": _ours(reshard_after_forward=False),
    "ours+parameter": _ours(bucket_plan=None),
    "ours+exact": _ours(reduction="exact"),
    "ours+exact+keep": _ours(reduction="exact", reshard_after_forward=False),
    "ours+25MiB": _ours(bucket_plan=25),
    "ours+blocks": _ours(backend="inductor", scope="block"),
    "ours+exact+blocks": _ours(reduction="exact", backend="inductor", scope="block"),
    "ours+exact+blocks+keep": _ours(
        reduction="exact", backend="inductor", scope="block", reshard_after_forward=False
    ),
    "ours+graph+aot_eager": _ours(backend="aot_eager"),
    "ours+graph": _ours(backend="inductor"),
    "ours+exact+graph": _ours(reduction="exact", backend="inductor"),
}


class Row(NamedTuple):
    """A contender in a mode; mode "" for one that is the same in all."""

    contender: str
    mode: str


def build_rows(names: list[str], modes: tuple[str, ...]) -> list[Row]:
    """Return the lines of a comparison: those without communication first, then mode by mode.

    Raises: ValueError for a name that is not in `CONTENDERS`.
    """
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise ValueError(f"benchmark: unknown contenders: {', '.join(unknown)}. Contenders: {', '.join(CONTENDERS)}.")
    rows = [Row(name, "") for name in names if not CONTENDERS[name].modes]
    return rows + [Row(name, mode) for mode in modes for name in names if mode in CONTENDERS[name].modes]
