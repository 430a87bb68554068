"""Compiled models, as one graph and block by block: the bits of eager mode, and the gathers of theory in each graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from torch import fx
from torch.distributed.tensor import DTensor

from tests.tiny_llama import LAYERS, build_tiny_llama, train
from torchtitan_simplefsdp import accumulate_gradients
from torchtitan_simplefsdp.core import compat
from torchtitan_simplefsdp.graph.compile import compile_blocks, compile_model
from torchtitan_simplefsdp.graph import partition
from torchtitan_simplefsdp.graph.gathers import is_gather

from .meshes import get_dp_rank_and_degree
from .test_buckets import BACKWARD, BLOCKS, build, FORWARD


def find_differences(compile_: Callable, mode: str, plan: str, reshard: bool | None, checkpointed: str, tp: int) -> list[str]:
    train_here = partial(train, dp_rank=get_dp_rank_and_degree(tp)[0], dp_degree=get_dp_rank_and_degree(tp)[1], steps=4)
    oracle = train_here(build(mode, "parameter", False, tp))
    model = build(mode, plan, reshard, tp, checkpointed)
    names = [fqn for fqn, _ in model.named_parameters()]
    trained = train_here(compile_(model, "aot_eager"))
    assert [fqn for fqn, _ in model.named_parameters()] == names
    return [kind for kind in oracle if not all(map(torch.equal, trained[kind], oracle[kind]))]


@pytest.mark.parametrize(
    "world_size, compile_, mode, plan, reshard, checkpointed, tp",
    [
        (2, compile_model, "fully_shard", "block", True, "", 1),
        (2, compile_model, "fully_shard", "MiB", None, "selective", 1),
        (2, compile_model, "replicate", "block", None, "full", 1),
        (4, compile_model, "hybrid_shard", "MiB", False, "", 1),
        (4, compile_model, "fully_shard", "block", True, "full", 2),
        (2, compile_blocks, "fully_shard", "block", True, "", 1),
        (2, compile_blocks, "fully_shard", "block", False, "full", 1),
        (2, compile_blocks, "replicate", "block", None, "selective", 1),
    ],
)
def test_compiled_models_train_bitwise_like_eager_ones(
    ranks, world_size, compile_, mode, plan, reshard, checkpointed, tp
):
    differences = ranks.run(find_differences, world_size, compile_, mode, plan, reshard, checkpointed, tp)
    assert differences == [[]] * world_size


def count_gathers(reshard: bool | None, checkpointed: str) -> list[tuple[int, int]]:
    """Return the all_gathers of forward and backward graph, per graph that is compiled."""
    counts = []
    cut = compat.cut_joint_graph

    def counted(graph: fx.GraphModule, inputs: list, **keywords):
        graphs = cut(graph, inputs, **keywords)
        counts.append(tuple(sum(map(is_gather, part.graph.nodes)) for part in graphs))
        return graphs

    model = compile_model(build("fully_shard", "block", reshard, checkpointed=checkpointed), "aot_eager")
    with mock.patch.object(compat, "cut_joint_graph", counted):
        train(model, *get_dp_rank_and_degree(), steps=2)
    return counts


@pytest.mark.parametrize(
    "reshard, checkpointed, backward",
    [
        (True, "", BLOCKS - 1),  # backward needs no weight of the embedding
        (None, "", BLOCKS - 2),
        (False, "", 0),
        (True, "full", BLOCKS - 1),  # a recomputed block takes what backward gathered
        (False, "full", 0),
    ],
)
def test_the_backward_graph_gathers_again_what_is_resharded(ranks, reshard, checkpointed, backward):
    assert ranks.run(count_gathers, 2, reshard, checkpointed) == [[(BLOCKS, backward)]] * 2


def record_order_in_graphs() -> list[str]:
    """Return the order of collectives and of blocks' attention in the forward and the backward graph."""
    orders = []
    letters = {"all_gather_into_tensor": "g", "reduce_scatter_tensor": "r"}

    def get_letter(node: fx.Node) -> str:
        name = str(node.target)
        if "wait_tensor" in name:
            return "w" if is_gather(node.args[0]) else "d"
        if "_scaled_dot_product_flash_attention_for_cpu" in name:
            return "c"
        return next((letter for part, letter in letters.items() if part in name), "")

    order_collectives = partition.order_collectives

    def recorded(graph: fx.GraphModule) -> None:
        order_collectives(graph)
        orders.append("".join(map(get_letter, graph.graph.nodes)))

    model = compile_model(build("fully_shard", "block", True), "aot_eager")
    with mock.patch.object(partition, "order_collectives", recorded):
        train(model, *get_dp_rank_and_degree(), steps=1)
    return orders


def test_collectives_of_the_graphs_have_the_order_of_eager_mode(ranks):
    assert ranks.run(record_order_in_graphs, 2) == [["".join(FORWARD), "".join(BACKWARD)]] * 2


def look_at_graphs(compile_: Callable) -> list[tuple[int, int]]:
    """Return per graph that Dynamo makes how many inputs it has and how many of them are DTensors."""
    graphs = []

    def backend(graph: fx.GraphModule, inputs: list) -> fx.GraphModule:
        graphs.append((len(inputs), sum(isinstance(tensor, DTensor) for tensor in inputs)))
        return graph

    model = compile_(build("fully_shard", "block", True), backend)
    train(model, *get_dp_rank_and_degree(), steps=2)
    return graphs


def test_one_graph_takes_plain_shards_and_equal_blocks_share_one_graph(ranks):
    tokens, parameters_of_block = 1, 9
    assert ranks.run(look_at_graphs, 2, compile_model) == [[(3 + LAYERS * parameters_of_block + tokens, 0)]] * 2
    activations = 1
    assert ranks.run(look_at_graphs, 2, compile_blocks) == [[(parameters_of_block + activations, 0)]] * 2


def compare_inductor_with_eager(compile_: Callable) -> None:
    train_here = partial(train, dp_rank=get_dp_rank_and_degree()[0], dp_degree=get_dp_rank_and_degree()[1], steps=3)
    oracle = train_here(build("fully_shard", "block", True))
    compilers = (importlib.import_module(f"torch.{name}.config") for name in ("_inductor", "_functorch", "_dynamo"))
    settings = {compiler: compiler.save_config_portable() for compiler in compilers}
    trained = train_here(compile_(build("fully_shard", "block", True), "inductor"))
    assert {compiler: compiler.save_config_portable() for compiler in settings} == settings
    # fused kernels round in other places, and AdamW's first steps divide by roots of tiny numbers
    torch.testing.assert_close(trained["losses"], oracle["losses"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("compile_", [compile_model, compile_blocks])
def test_inductor_trains_like_eager_up_to_rounding(ranks, compile_):
    ranks.run(compare_inductor_with_eager, 2, compile_)


def accumulate_compiled(compile_: Callable) -> bool:
    results = []
    for maybe_compile in (lambda model, _: model, compile_):
        model = maybe_compile(build("hybrid_shard", "block", True), "aot_eager")
        with accumulate_gradients(model):
            for seed in range(2):
                tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(seed))
                model(tokens).float().logsumexp(-1).sum().backward()
        results.append([parameter.grad.to_local() for parameter in model.parameters()])
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("compile_", [compile_model, compile_blocks])
def test_compiled_models_accumulate_like_eager_ones(ranks, compile_):
    assert ranks.run(accumulate_compiled, 4, compile_) == [True] * 4


def check_errors() -> None:
    for compile_ in (compile_model, compile_blocks):
        with pytest.raises(ValueError, match=f"{compile_.__name__}: the model has no SimpleFSDP. Apply data_parallel first."):
            compile_(build_tiny_llama())
        model = compile_(build("replicate", "block", None))
        with pytest.raises(ValueError, match="the model, or a part of it, is compiled already"):
            compile_model(model)
    with pytest.raises(ValueError, match="the model has no blocks"):
        compile_blocks(build("replicate", "block", None).output)


def test_what_cannot_be_compiled_is_refused(ranks):
    ranks.run(check_errors, 2)


