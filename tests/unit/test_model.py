"""Initial weights of torchtitan's Llama: a pipeline stage has those of the whole model. Oracle: one plain process."""

from __future__ import annotations

import copy

import pytest
import torch
from torchtitan.models.llama3 import llama3_args

from torchtitan_simplefsdp.titan.model import SimpleFSDPTransformer

MODEL_ARGS = copy.deepcopy(llama3_args["debugmodel"])
MODEL_ARGS.vocab_size = 256


def build(keep_layers: tuple[str, ...], first: bool, last: bool, seed: int = 5) -> dict[str, torch.Tensor]:
    """Build a stage as torchtitan's pipeline does, from the whole model on meta, and initialize it."""
    with torch.device("meta"):
        model = SimpleFSDPTransformer(MODEL_ARGS)
    for name in set(model.layers) - set(keep_layers):
        del model.layers[name]
    if not first:
        model.tok_embeddings = None
    if not last:
        model.norm = model.output = None
    model.to_empty(device="cpu")
    model.init_seed = seed
    with torch.no_grad():
        model.init_weights(buffer_device="cpu")
    return dict(model.named_parameters())


@pytest.mark.parametrize("cuts", [(3,), (1, 5), (1, 2, 3, 4, 5)], ids=str)
def test_pipeline_stages_have_the_weights_of_the_whole_model(cuts):
    layers = [str(i) for i in range(MODEL_ARGS.n_layers)]
    whole = build(tuple(layers), first=True, last=True)
    bounds = [0, *cuts, MODEL_ARGS.n_layers]
    stages: dict[str, torch.Tensor] = {}
    for begin, end in zip(bounds, bounds[1:]):
        stages |= build(tuple(layers[begin:end]), first=begin == 0, last=end == MODEL_ARGS.n_layers)
    assert stages.keys() == whole.keys()
    assert all(torch.equal(stages[fqn], whole[fqn]) for fqn in whole)
    other = build(tuple(layers), first=True, last=True, seed=6)
    assert not torch.equal(other["layers.0.attention.wq.weight"], whole["layers.0.attention.wq.weight"])
