"""The training state of a tiny Llama in any layout, some steps after a seed, built as torchtitan's trainer builds it.

Model, pipeline split, optimizer, scheduler and CheckpointManager are torchtitan's, `parallelize_llama` is ours or
torchtitan's. The model has one layer, as a load's time goes with the number of parameters, and sizes that cut badly:
250 rows of the vocabulary, and 6 of the feed-forward, of which the last of 4 ranks gets none.

Not here: the layouts (checkpoint_layouts.py); what is saved, loaded and compared (checkpoint_matrix.py).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims as torchtitan_parallel_dims
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3 import TransformerModelArgs

from tests.fsdp2_peer import parallelize_llama_fsdp2
from tests.tiny_llama import get_full
from torchtitan_simplefsdp.titan.checkpoint import SimpleFSDPCheckpointManager
from torchtitan_simplefsdp.titan.config.schema import build_schema
from torchtitan_simplefsdp.titan.model import SimpleFSDPTransformer
from torchtitan_simplefsdp.titan.parallelize import parallelize_llama

from .checkpoint_layouts import Layout

MODEL_ARGS = TransformerModelArgs(
    dim=24, n_layers=1, n_heads=4, vocab_size=250, multiple_of=1, ffn_dim_multiplier=0.1, max_seq_len=16
)
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # in names under torch.compile and activation checkpointing


class TrainState:
    """The part of torchtitan's Trainer that is in a checkpoint."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


class TrainingState:
    """A new optimizer, scheduler, train state and checkpoint manager for the parts of a model.

    Args:
        folder: of the checkpoints.
        exclude: parts of a checkpoint that `manager.load` leaves alone.
    """

    def __init__(
        self, layout: Layout, model_parts: list[nn.Module], folder: Path, exclude: tuple[str, ...] = ()
    ) -> None:
        config = build_config(layout)
        config.checkpoint.folder, config.checkpoint.exclude_from_loading = str(folder), list(exclude)
        self.model_parts = model_parts
        self.optimizers = build_optimizers(model_parts, config.optimizer, get_parallel_dims(layout))
        self.lr_schedulers = build_lr_schedulers(self.optimizers, config.lr_scheduler, config.training.steps)
        self.train_state = TrainState()
        self.manager = (CheckpointManager if layout.core else SimpleFSDPCheckpointManager)(
            dataloader=None,
            model_parts=model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self.train_state},
            checkpoint_config=config.checkpoint,
            sd_adapter=None,
        )

    def step(self, seed: int) -> None:
        """Take an optimizer step with gradients that are drawn per parameter."""
        for fqn, parameter, _ in self._get_parameters():
            key = hashlib.blake2b(f"{seed}/{self.train_state.step}/{fqn}".encode(), digest_size=4).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):  # every rank has drawn the same, so nothing is sent
                gradient = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.grad = gradient
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.lr_schedulers.step()
        self.train_state.step += 1
        self.train_state.ntokens_seen += 1000 * seed

    @torch.no_grad()
    def get_snapshot(self) -> dict[str, str]:
        """Return all that a checkpoint must bring back on this rank: numbers, and digests of full tensors, by name."""
        found: dict[str, set[str]] = defaultdict(set)  # more than one value: parts of the model do not agree
        for name, value in self.train_state.state_dict().items():
            found[f"train_state.{name}"].add(repr(value))
        for optimizer, scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
            for name, value in scheduler.state_dict().items():
                found[f"lr_scheduler.{name}"].add(repr(value))
            (group,) = optimizer.param_groups
            for name in group.keys() - {"params"}:
                found[f"optimizer.{name}"].add(repr(group[name]))
        states = {id(p): state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        for fqn, parameter, read in self._get_parameters():
            found[f"model.{fqn}"].add(get_digest(read()))
            for name, value in states.get(id(parameter), {}).items():
                found[f"optimizer.{name}.{fqn}"].add(get_digest(value))
        return {name: " and ".join(sorted(values)) for name, values in found.items()}

    def _get_parameters(self) -> list[tuple[str, nn.Parameter, Callable[[], torch.Tensor]]]:
        """Return FQN, stored parameter, and what a forward reads, which a wrong placement would not be equal to."""
        parameters = []
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                path, _, attribute = name.rpartition(".")
                fqn = name
                for wrapper in WRAPPERS:
                    fqn = fqn.replace(wrapper, "")
                parameters.append((fqn, parameter, partial(getattr, part.get_submodule(path), attribute)))
        return parameters


def build_config(layout: Layout) -> JobConfig:
    schema, _ = build_schema(None)
    config: JobConfig = schema.config_cls()
    config.parallelism.pipeline_parallel_degree = layout.pp
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "float32"  # a forward then reads all bits
    config.training.steps, config.lr_scheduler.warmup_steps, config.optimizer.lr = 100, 50, 1e-2
    config.optimizer.implementation = "for-loop"  # fused AdamW rounds the last few elements of a tensor in another way
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.keep_latest_k = True, 1, 0
    for name, value in layout.config.items():
        section, _, key = name.partition(".")
        setattr(getattr(config, section), key, value)
    return config


def get_parallel_dims(layout: Layout) -> ParallelDims:
    return _build_parallel_dims(layout.replicate, layout.shard, layout.tp, layout.pp)


@cache  # each mesh has process groups, whose idle threads would slow down what follows
def _build_parallel_dims(replicate: int, shard: int, tp: int, pp: int) -> ParallelDims:
    torchtitan_parallel_dims.device_type = "cpu"  # gloo ranks, also on a machine with GPUs
    return ParallelDims(replicate, shard, 1, tp, pp, 1, 1, world_size=replicate * shard * tp * pp)


def build_model_parts(layout: Layout, seed: int) -> list[nn.Module]:
    """Build the parts of the model that this rank has, with the initial weights of a seed."""
    config, dims = build_config(layout), get_parallel_dims(layout)
    parallelize = parallelize_llama_fsdp2 if layout.core else parallelize_llama
    with torch.device("meta"):
        model = SimpleFSDPTransformer(MODEL_ARGS)
    if dims.pp_enabled:
        torch.manual_seed(seed + dims.get_mesh("pp").get_local_rank())  # as torchtitan seeds
        cpu = torch.device("cpu")
        _, parts, _, _ = pipeline_llm(model, dims, config, cpu, MODEL_ARGS, parallelize, cross_entropy_loss)
    else:
        torch.manual_seed(seed)
        parts = [parallelize(model, dims, config)]
    for part in parts:
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
    return parts


def get_digest(tensor: torch.Tensor) -> str:
    full = get_full(tensor)
    return hashlib.blake2b(f"{full.dtype}{full.shape}".encode() + full.contiguous().numpy().tobytes()).hexdigest()
