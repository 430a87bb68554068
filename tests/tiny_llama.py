"""A Llama of a few thousand parameters in plain torch, its tensor-parallel plan, and 20 steps of training it.

The tests of `core/` use it so that their processes need not import torchtitan.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DIM, HEADS, LAYERS, SEQ_LEN = 32, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(DIM)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(DIM)
        self.ffn = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.ModuleDict({name: nn.Linear(DIM, DIM, bias=False) for name in "qkv"})
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.wqkv[n](x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for n in "qkv")
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, 64, bias=False)
        self.w2 = nn.Linear(64, DIM, bias=False)
        self.w3 = nn.Linear(DIM, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TinyLlama(nn.Module):
    def __init__(self, vocab_size: int = 256) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.tok_embeddings = nn.Embedding(vocab_size, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def build_tiny_llama(vocab_size: int = 256) -> TinyLlama:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(1234)
    return TinyLlama(vocab_size)


def apply_tp(model: TinyLlama, tp_mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism as torchtitan applies it to Llama, without loss parallel."""
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            tp_mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                **{f"attention.wqkv.{name}": ColwiseParallel() for name in "qkv"},
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "ffn.w1": ColwiseParallel(),
                "ffn.w2": RowwiseParallel(output_layouts=Shard(1)),
                "ffn.w3": ColwiseParallel(),
            },
        )


def get_batch(step: int, samples: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels [samples, SEQ_LEN], the same on every rank; two batches alternate, so losses fall."""
    generator = torch.Generator().manual_seed(step % 2)
    tokens = torch.randint(vocab_size, (samples, SEQ_LEN + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(
    model: nn.Module, dp_rank: int, dp_degree: int, samples: int = 16, steps: int = 20, forward: nn.Module | None = None
) -> dict[str, list]:
    """Train with AdamW on this rank's slice of each batch.

    Returns:
        full tensors, as trained: `losses` (this rank's part), `gradients` of the last step and `parameters`.
    """
    forward = model if forward is None else forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens, labels = get_batch(step, samples, model.vocab_size)
        mine = slice(dp_rank * samples // dp_degree, (dp_rank + 1) * samples // dp_degree)
        logits = forward(tokens[mine])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[mine].flatten(), reduction="sum") / labels.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {
        "losses": losses,
        "gradients": [get_full(p.grad) for p in model.parameters()],
        "parameters": [get_full(p) for p in model.parameters()],
    }


def get_full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
