"""SimpleFSDP (arXiv:2411.00284) for any nn.Module, and its adapter to torchtitan's TOML-driven trainer.

The names below are loaded when they are first used, so that importing the package costs nothing: the launcher reports a
mistyped variable without waiting seconds for torch. The adapter lives in torchtitan_simplefsdp.titan.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_simplefsdp.core.accumulation import accumulate_gradients
    from torchtitan_simplefsdp.core.data_parallel import apply_mixed_precision, data_parallel
    from torchtitan_simplefsdp.core.grad_norm import clip_grad_norm_
    from torchtitan_simplefsdp.core.initialize import mesh_invariant_init
    from torchtitan_simplefsdp.core.parametrize import disable_gather
    from torchtitan_simplefsdp.core.precision import MixedPrecisionPolicy

__all__ = [
    "MixedPrecisionPolicy",
    "accumulate_gradients",
    "apply_mixed_precision",
    "clip_grad_norm_",
    "data_parallel",
    "disable_gather",
    "mesh_invariant_init",
]

_MODULES = {
    "MixedPrecisionPolicy": "precision",
    "accumulate_gradients": "accumulation",
    "apply_mixed_precision": "data_parallel",
    "clip_grad_norm_": "grad_norm",
    "data_parallel": "data_parallel",
    "disable_gather": "parametrize",
    "mesh_invariant_init": "initialize",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.core.{_MODULES[name]}"), name)
