"""Traced Llama: one training step of rank 0 of many, on FakeTensors of the real shapes.

The process group is fake; the step goes through `parallelize_llama`, as a run's does, so what is seen is what a run
issues. One layer is traced; equal layers repeat (graph/segments.py). Fake tensors are on CPU: attention is the CPU
kernel, which counts and moves what the flash kernel of a GPU does.

Not here: pipeline parallelism, the optimizer, what the events mean (graph/).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import llama3_args

from torchtitan_simplefsdp.core import compat
from torchtitan_simplefsdp.graph.trace import Collective, Compute, trace_step

from .config.data_parallel_mode import get_data_parallel_mode
from .config.job_config import SERVED_MODELS
from .config.schema import build_schema
from .model import SimpleFSDPTransformer
from .parallelize import MESH_DIMS, parallelize_llama
from .rebind import apply_rebinds

EMBEDDING, LAYER, HEAD = "tok_embeddings", "layer", "head"


class Layout(NamedTuple):
    """Degrees of a step and what it computes.

    Args:
        flavor: of torchtitan's llama3, as '8B'.
        replicate, shard, tp: degrees; their product is the number of ranks.
        local_batch: sequences per data-parallel rank.
        seq_len: tokens per sequence.
        checkpoint: activation checkpointing: 'none', 'selective' (per op, torchtitan's default list) or 'full'.
    """

    flavor: str
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    local_batch: int = 1
    seq_len: int = 8192
    checkpoint: str = "selective"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard * self.tp


class TracedLlama(NamedTuple):
    """What a step does. Events of EMBEDDING and HEAD (norm, output, loss) occur once, of LAYER in each of the `layers`.

    Args:
        parameters: parameters of the whole model, of all layers.
        tp_local_parameters: those that one rank would hold without data parallelism.
    """

    events: list[Collective | Compute]
    layers: int
    parameters: int
    tp_local_parameters: int


def trace_llama(layout: Layout, param_dtype: str = "bfloat16", reduce_dtype: str = "float32") -> TracedLlama:
    """Trace a step of rank 0 of a layout, in a process without a process group."""
    whole = llama3_args[layout.flavor]
    config = _build_job_config(layout, param_dtype, reduce_dtype)
    apply_rebinds(config)
    with _fake_process_group(layout.ranks):
        # fake groups exist outside of fake tensors: a mesh holds its ranks in a real tensor
        dims = ParallelDims(
            layout.replicate, layout.shard, cp=1, tp=layout.tp, pp=1, ep=1, etp=1, world_size=layout.ranks
        )
        mode = get_data_parallel_mode(layout.replicate, layout.shard, 1)
        meshes = [
            dims.get_mesh(names) for names in ([MESH_DIMS[mode]] if mode else []) + ([["tp"]] if layout.tp > 1 else [])
        ]
        with torch.device("meta"):
            model = SimpleFSDPTransformer(dataclasses.replace(whole, n_layers=1, max_seq_len=layout.seq_len))
        parameters = _count_parameters(model, whole.n_layers)
        parallelize_llama(model, dims, config)
        events = _trace(model, layout, meshes)
        tp_local_parameters = _count_parameters(model, whole.n_layers)
    return TracedLlama(events, whole.n_layers, parameters, tp_local_parameters)


def _build_job_config(layout: Layout, param_dtype: str, reduce_dtype: str) -> JobConfig:
    config = build_schema(None)[0].config_cls()
    config.model.name, config.model.flavor = SERVED_MODELS[0], layout.flavor
    config.training.mixed_precision_param, config.training.mixed_precision_reduce = param_dtype, reduce_dtype
    config.simple_fsdp.reduction = "native"
    # each parameter alone and gathered once: graph/schedules.py puts buckets and second gathers together from these
    config.simple_fsdp.bucket_plan = "parameter"
    config.parallelism.fsdp_reshard_after_forward = "never"
    config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option = layout.checkpoint, "op"
    config.activation_checkpoint.preserve_rng_state = False  # there is nothing random in Llama
    config.parallelism.disable_loss_parallel = True
    return config


@contextmanager
def _fake_process_group(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=compat.build_fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _count_parameters(model: nn.Module, layers: int) -> int:
    """Count those of a model with one layer as if it had `layers`; with tensor parallelism those of one rank."""
    in_layer = sum(_get_tp_local_size(p) for p in model.layers.parameters())
    return sum(_get_tp_local_size(p) for p in model.parameters()) + (layers - 1) * in_layer


def _get_tp_local_size(parameter: torch.Tensor) -> int:
    if isinstance(parameter, DTensor) and "tp" in parameter.device_mesh.mesh_dim_names:
        tp = parameter.device_mesh.mesh_dim_names.index("tp")
        if not parameter.placements[tp].is_replicate():  # Shard or _StridedShard
            return -(-parameter.numel() // parameter.device_mesh.size(tp))
    return parameter.numel()


def _trace(model: nn.Module, layout: Layout, meshes: list[DeviceMesh]) -> list[Collective | Compute]:
    # DTensor runs each new op once more, on the global shape; under fake tensors a trace cannot tell it from a real one.
    # A copy takes these: the model's first step prefetches nothing, so each collective is in the module that needs it.
    copied = copy.deepcopy(model)
    loss = Loss()
    with compat.FakeTensorMode(allow_non_fake_inputs=True):  # the models are on meta
        tokens = torch.zeros(layout.local_batch, layout.seq_len, dtype=torch.int64)
        labels = torch.zeros_like(tokens)

        def step(model: nn.Module) -> None:
            loss(model.to_empty(device="cpu")(tokens), labels).backward()

        step(copied)
        return trace_step(lambda: step(model), build_labels(model, loss), meshes)


class Loss(nn.Module):
    """torchtitan's loss as a module, so that it has a place in the trace."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy_loss(logits, labels)


def build_labels(model: nn.Module, loss: Loss) -> list[tuple[str, nn.Module]]:
    """Return the parts of a model for `trace_step`: EMBEDDING, LAYER (of several LAYER0, LAYER1, ...) and HEAD."""
    layers = list(model.layers.values())
    labels = [LAYER] if len(layers) == 1 else [f"{LAYER}{number}" for number in range(len(layers))]
    return [
        (EMBEDDING, model.tok_embeddings),
        *zip(labels, layers),
        *((HEAD, part) for part in (model.norm, model.output, loss)),
    ]
