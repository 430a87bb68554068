"""The oracle of trainer runs: torchtitan's own llama3 under FSDP2, from the same initial weights, on CPU too.

`--experimental.custom_import tests.fsdp2_peer --model.name fsdp2.llama3` trains it through our entry point, so data,
gradient norm and logging are the same and only the data parallelism differs.
"""

from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.protocols.train_spec import register_train_spec

from torchtitan_simplefsdp.titan.model import get_init_seed
from torchtitan_simplefsdp.titan.train_spec import build_train_spec


def parallelize_llama_fsdp2(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    model.init_seed = get_init_seed(parallel_dims)
    model = parallelize_llama(model, parallel_dims, job_config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no premul-sum, which a divide factor asks for
    return model


register_train_spec("fsdp2.llama3", replace(build_train_spec(), parallelize_fn=parallelize_llama_fsdp2))
