"""Bucket plans and scopes of small models, against lists by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tiny_llama import build_tiny_llama
from torchtitan_simplefsdp.core.bucket_plan import build_bucket_plan, find_blocks, get_scopes

IN_LAYER = (
    "attention_norm.weight",
    *(f"attention.{name}.weight" for name in ("wqkv.q", "wqkv.k", "wqkv.v", "wo")),
    "ffn_norm.weight",
    *(f"ffn.{name}.weight" for name in ("w1", "w2", "w3")),
)


def linear() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)  # 16 bytes


class Model(nn.Module):
    """Parts by name, without a forward of interest."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Wrapped(nn.Module):
    """What activation checkpointing or a compiler puts around a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def build_plan(model: nn.Module, bucket_plan, param_dtype=None) -> list[list[str]]:
    return build_bucket_plan(model, bucket_plan, param_dtype)


def test_a_llama_has_a_bucket_per_block_and_those_before_and_after():
    model = build_tiny_llama()
    assert build_plan(model, "block") == [
        ["tok_embeddings.weight"],
        [f"layers.0.{name}" for name in IN_LAYER],
        [f"layers.1.{name}" for name in IN_LAYER],
        ["norm.weight", "output.weight"],
    ]
    assert build_plan(model, None) == [[fqn] for fqn, _ in model.named_parameters()]


def test_blocks_are_the_elements_of_the_outermost_containers():
    experts = nn.ModuleList([linear(), linear()])
    model = Model(
        stem=linear(),
        encoder=nn.ModuleList([Model(experts=experts, gate=linear()), nn.Sequential(linear(), linear())]),
        decoder=nn.ModuleDict({"a": linear()}),
    )
    assert find_blocks(model) == ["encoder.0", "encoder.1", "decoder.a"]
    assert build_plan(model, "block") == [
        ["stem.weight"],
        ["encoder.0.experts.0.weight", "encoder.0.experts.1.weight", "encoder.0.gate.weight"],
        ["encoder.1.0.weight", "encoder.1.1.weight"],
        ["decoder.a.weight"],
    ]


def test_a_sequential_around_a_list_of_blocks_is_no_list_of_blocks():
    backbone = Model(layers=nn.ModuleList([linear(), linear()]))
    assert find_blocks(nn.Sequential(backbone, linear())) == ["0.layers.0", "0.layers.1"]
    assert find_blocks(nn.Sequential(linear(), linear())) == ["0", "1"]
    assert build_plan(nn.Sequential(backbone, linear()), "block") == [
        ["0.layers.0.weight"],
        ["0.layers.1.weight"],
        ["1.weight"],
    ]


def test_a_model_without_blocks_is_one_bucket():
    assert find_blocks(Model(a=linear(), b=linear())) == []
    assert build_plan(Model(a=linear(), b=linear()), "block") == [["a.weight", "b.weight"]]


def build_tied() -> nn.Module:
    model = Model(embedding=linear(), layers=nn.ModuleList([linear()]), output=linear())
    model.output.weight = model.embedding.weight
    return model


def test_a_tied_parameter_is_in_one_bucket_under_its_first_name():
    model = build_tied()
    assert build_plan(model, "block") == [["embedding.weight"], ["layers.0.weight"]]
    assert build_plan(model, [["output", "layers.0"]]) == [["embedding.weight", "layers.0.weight"]]
    assert build_plan(model, [["output.weight", "embedding"]]) == [["embedding.weight"], ["layers.0.weight"]]


@pytest.mark.parametrize(
    "mib, param_dtype, plan",
    [
        (32 / 2**20, None, [["0.weight", "1.weight"], ["2.weight"]]),
        (31 / 2**20, None, [["0.weight"], ["1.weight"], ["2.weight"]]),
        (31 / 2**20, torch.bfloat16, [["0.weight", "1.weight", "2.weight"]]),  # of what is gathered
        (1e-9, None, [["0.weight"], ["1.weight"], ["2.weight"]]),  # a larger parameter has a bucket of its own
        (1, None, [["0.weight", "1.weight", "2.weight"]]),
    ],
)
def test_sizes_fill_buckets_in_order_up_to_the_limit(mib, param_dtype, plan):
    sizes = nn.Sequential(linear(), linear(), linear() if param_dtype is None else nn.Linear(2, 1, bias=False))
    assert build_plan(sizes, mib, param_dtype) == plan


def test_listed_modules_and_parameters_and_each_other_one_alone():
    model = build_tiny_llama()
    plan = build_plan(model, [["layers.1.ffn", "output.weight"], ["layers.0.attention"]])
    assert len(plan) == 21 - 3 - 3
    assert [bucket for bucket in plan if len(bucket) > 1] == [
        [f"layers.0.attention.{name}.weight" for name in ("wqkv.q", "wqkv.k", "wqkv.v", "wo")],
        [*(f"layers.1.ffn.{name}.weight" for name in ("w1", "w2", "w3")), "output.weight"],
    ]
    assert build_plan(model, [[""]]) == [[fqn for fqn, _ in model.named_parameters()]]


@pytest.mark.parametrize(
    "bucket_plan, error, message",
    [
        (
            [["layers.0.attn"]],
            ValueError,
            "data_parallel: bucket_plan names 'layers.0.attn', which the model does not have. "
            "Did you mean 'layers.0.attention'?",
        ),
        ([["zzz"]], ValueError, "data_parallel: bucket_plan names 'zzz', which the model does not have."),
        (
            [["layers.0"], ["layers.0.ffn_norm.weight"]],
            ValueError,
            "data_parallel: bucket_plan puts parameter 'layers.0.ffn_norm.weight' into two buckets.",
        ),
        (
            ["layers.0", "layers.1"],
            TypeError,
            "data_parallel: bucket_plan is a list of lists of FQNs, got 'layers.0' in place of a list.",
        ),
        *(
            (
                wrong,
                ValueError,
                f"data_parallel: unknown bucket_plan {wrong!r}. Valid: 'block', a size in MiB above 0, a list of lists "
                "of FQNs of parameters or modules, or None (one collective per parameter).",
            )
            for wrong in ("blocks", "25", 0, -1.0, True, float("nan"))
        ),
    ],
)
def test_a_wrong_plan_says_what_is_right(bucket_plan, error, message):
    with pytest.raises(error) as caught:
        build_plan(build_tiny_llama(), bucket_plan)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "owners, scopes",
    [
        (["tok_embeddings"], ["tok_embeddings"]),
        (["norm", "output"], ["norm", "output"]),  # a forward that holds both would be the model's
        (["layers.0.attention_norm", "layers.0.attention.wo", "layers.0.ffn.w1"], ["layers.0"]),
        (["layers.0.ffn.w1", "layers.0.ffn.w2"], ["layers.0.ffn"]),
        (["layers.0.attention.wqkv.q", "layers.0.attention.wqkv.k"], ["layers.0.attention"]),  # a dict has no forward
        (["layers.0.ffn.w1"], ["layers.0.ffn.w1"]),
        (["layers.0.ffn.w1", "layers.1.ffn.w1", "output"], ["output", "layers.0.ffn.w1", "layers.1.ffn.w1"]),
    ],
)
def test_the_scope_is_the_innermost_module_of_a_block_that_reads_all(owners, scopes):
    model = build_tiny_llama()
    assert get_scopes(model, owners, find_blocks(model)) == scopes


def test_the_scope_is_inside_of_what_is_wrapped_around_a_block():
    model = Model(layers=nn.ModuleList([Wrapped(Model(a=linear(), b=linear()))]))
    assert find_blocks(model) == ["layers.0"]
    assert get_scopes(model, ["layers.0.inner.a", "layers.0.inner.b"], ["layers.0"]) == ["layers.0.inner"]


def test_a_list_inside_of_a_block_has_no_forward_to_be_a_scope():
    model = Model(layers=nn.ModuleList([Model(experts=nn.ModuleList([linear(), linear()]))]))
    owners = ["layers.0.experts.0", "layers.0.experts.1"]
    assert get_scopes(model, owners, find_blocks(model)) == ["layers.0"]


def test_a_tied_parameter_has_the_scopes_of_all_its_owners():
    assert get_scopes(build_tied(), ["embedding", "output", "embedding"], ["layers.0"]) == ["embedding", "output"]
