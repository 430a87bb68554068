"""SimpleFSDP (arXiv:2411.00284) for any nn.Module, and its adapter to torchtitan's TOML-driven trainer.

Importing this package imports torch only; the adapter lives in torchtitan_simplefsdp.titan.
"""

from torchtitan_simplefsdp.core.data_parallel import apply_mixed_precision, data_parallel
from torchtitan_simplefsdp.core.parametrize import disable_gather
from torchtitan_simplefsdp.core.precision import MixedPrecisionPolicy

__all__ = ["MixedPrecisionPolicy", "apply_mixed_precision", "data_parallel", "disable_gather"]
