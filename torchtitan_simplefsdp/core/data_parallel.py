"""data_parallel: SimpleFSDP for any nn.Module, in replicate, fully_shard or hybrid_shard mode.

Not here: training loops, loss scaling, meshes. The gradient is the SUM over the data-parallel ranks, so divide the loss
by what the whole batch holds (torchtitan divides by the global token count) or by the degree.
"""

from __future__ import annotations

import math
import warnings

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import compat
from .bucket_plan import BucketPlan, build_bucket_plan
from .bucketing import Buckets, build_buckets
from .parameter import build_cast, build_sharded_parameter
from .parametrize import Parametrization, is_parametrized, parametrize
from .placements import is_cut_as_dtensor_describes, validate_mode
from .precision import MixedPrecisionPolicy
from .reduction import validate_reduction


def data_parallel(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mode: str = "replicate",
    mp_policy: MixedPrecisionPolicy | None = None,
    shard_dim: int = 0,
    reduction: str = "native",
    bucket_plan: BucketPlan = "block",
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """Apply SimpleFSDP to `model` in place: store parameters as DTensors, gather them when they are read.

    Every rank must hold the same parameter values when this is called (or meta tensors), as with `fully_shard`.
    Parameters that are DTensors already (tensor parallelism) keep their placements on the inner mesh dims. Tied
    parameters stay tied, frozen ones stay frozen and cost no reduction, buffers are untouched, FQNs do not change.

    Reading `module.weight` gathers a copy, so initialize a meta model after `to_empty` inside
    `with torch.no_grad(), mesh_invariant_init(model):`, where reads return the stored parameters.

    Args:
        model: any module; on the mesh's device or on meta.
        device_mesh: the data-parallel mesh: 1D for 'replicate' and 'fully_shard', 2D (replicate, shard) for
            'hybrid_shard'.
        mode: 'replicate' (DDP), 'fully_shard' (FSDP) or 'hybrid_shard' (HSDP).
        mp_policy: dtypes of gather and reduction; None: parameters and gradients keep their dtype.
        shard_dim: tensor dim along which parameters are sharded; negative counts from the end. Unused by 'replicate'.
            A parameter without dims is replicated.
        reduction: 'native' sums gradients with the backend's collectives, as FSDP2 does; 'exact' in one fixed order,
            so that all modes give the same bits at any number of ranks (see [Note: exact sum] in reduction.py). Up to
            two ranks both give the same.
        bucket_plan: which parameters share one all_gather and one reduction. 'block': those of each block, an element of
            the model's ModuleLists, ModuleDicts or Sequentials (the outermost), and those between blocks; a number: as
            many MiB as that of unsharded parameters in their order; a list of lists of FQNs of parameters or modules;
            None: each parameter alone. The bits are the same for all plans, but for native sums over more than two ranks.
        reshard_after_forward: True: free a bucket's unsharded parameters after the forward that read them and gather them
            again in backward; False: keep them until then, which costs their memory and saves a gather; None: as True, but
            keep those behind the last block, which backward needs at once. Same bits. Parameters must not be written between
            a forward and its backward, which is noticed only if torch counts the write (foreach and fused ones it does not).

    Returns:
        `model`, whose gradients are summed (not averaged) over the data-parallel ranks.

    Raises:
        ValueError: unknown mode or reduction, mesh of another number of dims or with ranks out of order, shard_dim out of
            range, model (or part) that has data parallelism already, parameter on another device, bucket_plan that is
            unknown, names what the model does not have, or puts a parameter into two buckets.
        TypeError: `device_mesh`, `mp_policy`, `bucket_plan` or `reshard_after_forward` of another type.
        NotImplementedError: a dim cut by tensor parallelism so unevenly that DTensor cannot describe its shards.

    Source: arXiv:2411.00284, section 3; upstream `torchtitan/experiments/simple_fsdp/simple_fsdp.py`, whose signature
    this keeps. Differs: collectives on local tensors instead of `redistribute`, uneven shards, ties, frozen parameters.
    """
    mp_policy = _validate_policy("data_parallel", mp_policy)
    validate_mode(mode, device_mesh)
    validate_reduction(reduction, device_mesh)
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise TypeError(
            f"data_parallel: reshard_after_forward must be True, False or None, got {reshard_after_forward!r}."
        )
    _validate_model("data_parallel", model)
    if (threads := compat.get_gloo_threads(device_mesh)) > 1:
        warnings.warn(
            f"data_parallel: the gloo process groups of this mesh have {threads} worker threads each. Those race in torch "
            "(compat.use_one_gloo_thread says how), which can corrupt memory. Import data_parallel before init_process_group.",
            stacklevel=2,
        )
    plan = build_bucket_plan(model, bucket_plan, mp_policy.param_dtype)
    placed = _place_parameters(model, device_mesh, mode, mp_policy, shard_dim, reduction)
    _install(placed, build_buckets(model, plan, {module: how for module, _, how in placed}, reshard_after_forward))
    return model


def apply_mixed_precision(model: nn.Module, mp_policy: MixedPrecisionPolicy) -> nn.Module:
    """Apply a mixed-precision policy in place to a model without data parallelism (degree 1).

    Parameters are cast to `param_dtype` when they are read, as `data_parallel` does, so one process computes what each
    rank of many would. Storage is untouched. Nothing is reduced, so `reduce_dtype` has no effect.

    Raises:
        ValueError: model (or part) that has data parallelism already.
        TypeError: `mp_policy` of another type.
    """
    mp_policy = _validate_policy("apply_mixed_precision", mp_policy)
    _validate_model("apply_mixed_precision", model)
    placed = [
        (module, {}, {name: build_cast(module._parameters[name], mp_policy) for name in names})
        for module, names in _modules_with_parameters(model)
    ]
    _install(placed, Buckets())
    return model


def _validate_policy(caller: str, mp_policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    if mp_policy is None:
        return MixedPrecisionPolicy()
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"{caller}: mp_policy must be a torchtitan_simplefsdp.MixedPrecisionPolicy or None, "
            f"got {type(mp_policy).__module__}.{type(mp_policy).__qualname__}."
        )
    return mp_policy


def _validate_model(caller: str, model: nn.Module) -> None:
    for fqn, module in model.named_modules():
        where = f"module {fqn!r}" if fqn else "the model"
        if is_parametrized(module):
            raise ValueError(f"{caller}: {where} has SimpleFSDP already. Apply it once per module.")
        for wrapper in (FSDPModule, DistributedDataParallel):
            if isinstance(module, wrapper):
                raise ValueError(
                    f"{caller}: {where} is wrapped by {wrapper.__name__} already. Pass the bare model: "
                    "SimpleFSDP replaces fully_shard and DistributedDataParallel."
                )


def _modules_with_parameters(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    owned = ((module, [n for n, p in module._parameters.items() if p is not None]) for module in model.modules())
    return [(module, names) for module, names in owned if names]


# Per module: its new stored parameters by name, and how each of its parameters is read.
_Placed = list[tuple[nn.Module, dict[str, nn.Parameter], dict[str, Parametrization]]]


def _place_parameters(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mode: str,
    mp_policy: MixedPrecisionPolicy,
    shard_dim: int,
    reduction: str,
) -> _Placed:
    """Compute every new parameter before anything is installed, so a fault leaves the model as it was."""
    fqns = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    memo: dict[int, tuple[nn.Parameter, Parametrization]] = {}  # tied parameters: one object stays one object
    placed: _Placed = []
    for module, names in _modules_with_parameters(model):
        stored, how = {}, {}
        for name in names:
            parameter = module._parameters[name]
            if id(parameter) not in memo:
                _validate_parameter(fqns[id(parameter)], parameter, device_mesh, mode, shard_dim)
                memo[id(parameter)] = build_sharded_parameter(
                    parameter, device_mesh, mode, mp_policy, shard_dim, reduction
                )
            stored[name], how[name] = memo[id(parameter)]
        placed.append((module, stored, how))
    return placed


def _validate_parameter(
    fqn: str, parameter: nn.Parameter, device_mesh: DeviceMesh, mode: str, shard_dim: int
) -> None:
    if parameter.device.type not in (device_mesh.device_type, "meta"):
        raise ValueError(
            f"data_parallel: parameter {fqn!r} is on {parameter.device}, the mesh on {device_mesh.device_type!r}. "
            f'Move the model with model.to("{device_mesh.device_type}"), or build it under torch.device("meta").'
        )
    if mode != "replicate" and parameter.ndim > 0 and not -parameter.ndim <= shard_dim < parameter.ndim:
        raise ValueError(
            f"data_parallel: shard_dim={shard_dim} is out of range for parameter {fqn!r} of shape "
            f"{list(parameter.shape)}. Use shard_dim=0, or apply data_parallel to submodules with a dim of their own."
        )
    if isinstance(parameter, DTensor):
        shared = set(parameter.device_mesh.mesh_dim_names or ()) & set(device_mesh.mesh_dim_names or ())
        if shared:
            raise ValueError(
                f"data_parallel: parameter {fqn!r} is a DTensor on mesh dim {sorted(shared)[0]!r} already, which is "
                f"also a data-parallel dim. Pass a mesh of the other dims."
            )
        if mode != "replicate" and parameter.ndim > 0:
            dim = shard_dim % parameter.ndim
            cuts = [p.is_shard(dim) for p in parameter.placements]
            tp = math.prod(parameter.device_mesh.size(i) for i, is_cut in enumerate(cuts) if is_cut)
            degree = device_mesh.size(device_mesh.ndim - 1)
            if not is_cut_as_dtensor_describes(parameter.size(dim), tp, degree):
                raise NotImplementedError(
                    f"data_parallel: dim {dim} of parameter {fqn!r}, of size {parameter.size(dim)}, is cut by tensor "
                    f"parallelism into {tp} pieces too uneven to be cut again into {degree} shards. Pad it to a multiple "
                    f"of {tp * degree}, or change the degrees."
                )


def _install(placed: _Placed, buckets: Buckets) -> None:
    for module, stored, how in placed:
        module._parameters.update(stored)
        parametrize(module, how, buckets.places.get(module, {}), buckets.scopes.get(module))
    for module, scope in buckets.scopes.items():
        if not is_parametrized(module):
            parametrize(module, {}, {}, scope)
