"""MixedPrecisionPolicy: the dtypes of compute and of gradient reduction, and what None means.

Not here: output or input casting of modules (FSDP2's `output_dtype` and `cast_forward_inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes in which parameters are gathered and gradients are reduced; storage keeps its own dtype.

    Args:
        param_dtype: dtype of the unsharded parameter that the module reads, so of the all_gather and of the
            compute. None: the dtype in which the parameter is stored.
        reduce_dtype: dtype of the reduce_scatter and all_reduce of the gradient. None: the dtype in which the
            gradient arrives, which is `param_dtype`.

    The gradient that the optimizer sees always has the dtype of the stored parameter. Integer parameters are never
    cast. Source: `torch.distributed.fsdp.MixedPrecisionPolicy`, whose two fields of these names mean the same.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(
                    f"MixedPrecisionPolicy: {field} must be a torch.dtype or None, got {dtype!r} "
                    f"({type(dtype).__name__}). Pass for instance torch.bfloat16."
                )
            if not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecisionPolicy: {field} must be a floating-point dtype, got {dtype}. "
                    "Pass for instance torch.bfloat16 or torch.float32."
                )
