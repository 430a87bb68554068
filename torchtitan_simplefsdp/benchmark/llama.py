"""A Llama in plain torch, its tensor-parallel plan, and random data for it: what every contender trains.

RMSNorm, rotary embeddings, SwiGLU, causal attention, as in torchtitan's llama3, so that processes need not import
torchtitan (seconds, and hundreds of MiB that are nobody's parameters).

Not here: data parallelism (contenders.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .options import Options


class Attention(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings to [batch, heads, seq_len, head_dim]; halves of the head are the pairs."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention, self.feed_forward = Attention(dim, head_dim), FeedForward(dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(options.vocab, options.dim)
        self.layers = nn.ModuleList(Block(options.dim, options.head_dim) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.dim)
        self.output = nn.Linear(options.dim, options.vocab, bias=False)
        frequencies = 10000.0 ** -(torch.arange(0, options.head_dim, 2) / options.head_dim)
        angles = torch.outer(torch.arange(options.seq_len), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.cos, self.sin)
        return self.output(self.norm(h))


def build_llama(options: Options, device: torch.device) -> Llama:
    """Return the model, with the same weights on every rank and in every call."""
    torch.manual_seed(1234)
    with device:
        return Llama(options)


def count_parameters(options: Options) -> int:
    """Return the number of parameters of the model, of which none is built."""
    return sum(parameter.numel() for parameter in build_llama(options, torch.device("meta")).parameters())


def apply_tp(model: Llama, tp_mesh: DeviceMesh) -> None:
    """Apply tensor and sequence parallelism in place, as torchtitan does to its llama3 without loss parallel."""
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward.w3": ColwiseParallel(),
    }
    parallelize_module(model, tp_mesh, plan)


def build_batch(options: Options, dp_rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's tokens and labels, [batch, seq_len] each; ranks of a tensor-parallel group get the same."""
    generator = torch.Generator().manual_seed(dp_rank)
    tokens = torch.randint(options.vocab, (options.batch, options.seq_len + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run_step(forward: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], tokens: int) -> torch.Tensor:
    """Run forward and backward of this rank's part of a batch of `tokens`; return its part of the loss."""
    inputs, labels = batch
    logits = forward(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / tokens
    loss.backward()
    return loss.detach()
