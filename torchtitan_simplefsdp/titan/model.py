"""The Llama model of torchtitan with mesh-invariant init.

Not here: the model itself, which is torchtitan's; parallelisms (parallelize.py).
"""

from __future__ import annotations

import torch
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer

from torchtitan_simplefsdp.core.initialize import mesh_invariant_init


def get_init_seed(parallel_dims: ParallelDims) -> int:
    """Return the seed that all ranks share; torchtitan has seeded torch with it plus the pipeline rank."""
    pp_mesh = parallel_dims.get_optional_mesh("pp")
    return (torch.initial_seed() - (pp_mesh.get_local_rank() if pp_mesh else 0)) % 2**64


class SimpleFSDPTransformer(Transformer):
    """torchtitan's Llama; `init_weights` gives the same weights on every mesh and every pipeline split."""

    init_seed: int | None = None
    """Seed shared by all ranks; None: `torch.initial_seed()`. `parallelize_llama` sets it."""

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialize the stored (sharded) parameters in place; `buffer_device` as in torchtitan."""
        with mesh_invariant_init(self, self.init_seed):
            super().init_weights(buffer_device=buffer_device)
