"""Registration: the TrainSpecs and datasets that this plugin adds to torchtitan.

Not here: reading the configuration or replacing torchtitan's globals; registering changes nothing else.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import get_train_spec, Llama3StateDictAdapter
from torchtitan.protocols import train_spec as torchtitan_train_spec
from torchtitan.protocols.train_spec import TrainSpec

from .dataloader import build_dataloader
from .datasets import register_datasets
from .config.job_config import SERVED_MODELS
from .loss import build_loss
from .metrics import SimpleFSDPMetricsProcessor
from .model import SimpleFSDPTransformer
from .parallelize import parallelize_llama
from .validation import Validator


def build_train_spec() -> TrainSpec:
    """Return torchtitan's llama3 TrainSpec (flavors, tokenizer, HF adapter, pipeline) under SimpleFSDP."""
    return replace(
        get_train_spec(),
        model_cls=SimpleFSDPTransformer,
        parallelize_fn=parallelize_llama,
        build_dataloader_fn=build_dataloader,
        build_loss_fn=build_loss,
        build_validator_fn=Validator,
        build_metrics_processor_fn=_build_metrics_processor,
        state_dict_adapter=QuietStateDictAdapter,
    )


def register() -> None:
    """Register the model names and datasets of this plugin with torchtitan; a second call does nothing."""
    register_datasets()
    for name in SERVED_MODELS:
        if name not in torchtitan_train_spec._extra_train_specs:
            torchtitan_train_spec.register_train_spec(name, build_train_spec())


def _build_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: Any = None, tag: str | None = None
) -> SimpleFSDPMetricsProcessor:
    return SimpleFSDPMetricsProcessor(job_config, parallel_dims, tag)


class QuietStateDictAdapter(Llama3StateDictAdapter):
    """torchtitan's, without its warning in every run whose `hf_assets_path` has a tokenizer but no index of weights."""

    def __init__(self, model_args: Any, hf_assets_path: str | None) -> None:
        has_index = os.path.isfile(os.path.join(hf_assets_path or "", "model.safetensors.index.json"))
        super().__init__(model_args, hf_assets_path if has_index else None)
        self.hf_assets_path = hf_assets_path
