"""Bucketing: from a bucket plan and how each parameter is read to buckets, their scopes and their schedule.

Not here: the plan (bucket_plan.py), installing anything (data_parallel.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import takewhile

from torch import nn

from .bucket import Bucket, Member
from .bucket_plan import find_blocks, get_block, get_scopes
from .parametrize import Parametrization, Scope
from .schedule import Schedule


@dataclass
class Buckets:
    """What `parametrize` needs beside how each parameter is read.

    Args:
        places: per module and name of a parameter its bucket and its place in it.
        scopes: per module what its forward opens.
    """

    places: dict[nn.Module, dict[str, tuple[Bucket, int]]] = field(default_factory=dict)
    scopes: dict[nn.Module, Scope] = field(default_factory=dict)


def build_buckets(
    model: nn.Module,
    plan: list[list[str]],
    parametrizations: dict[nn.Module, dict[str, Parametrization]],
    reshard_after_forward: bool | None,
) -> Buckets:
    """Return the buckets of `plan`; one whose parameters do not fit on one wire is divided into several.

    Parameters of one wire have the same dtypes and the same ranks. Those without ranks (degree 1) need no bucket.
    """
    owners = _get_owners(model)
    blocks = find_blocks(model)
    behind = _get_fqns_behind(list(owners), blocks)
    schedule = Schedule()
    buckets = Buckets()
    for fqns in plan:
        by_wire: dict[Hashable, list[str]] = {}
        for fqn in fqns:
            module, name = owners[fqn][0][1:]
            how = parametrizations[module][name]
            if how.wire.reduction.has_ranks:
                key = how.wire.param_dtype, how.wire.reduction, how.accumulates
                by_wire.setdefault(key, []).append(fqn)
        reshards = reshard_after_forward is not False
        if reshard_after_forward is None and fqns[0] in behind:
            reshards = False
        for members in by_wire.values():
            bucket = _build_bucket(members, owners, parametrizations, reshards)
            bucket.schedule = schedule
            schedule.buckets.append(bucket)
            for index, fqn in enumerate(members):
                for _, module, name in owners[fqn]:
                    buckets.places.setdefault(module, {})[name] = bucket, index
            for scope in get_scopes(model, [owner for fqn in members for owner, _, _ in owners[fqn]], blocks):
                module = model.get_submodule(scope)
                bucket.scopes.append(module)
                buckets.scopes.setdefault(module, Scope(schedule)).buckets.append(bucket)
    if schedule.buckets:
        buckets.scopes.setdefault(model, Scope(schedule)).is_model = True
    return buckets


def _get_fqns_behind(fqns: list[str], blocks: list[str]) -> set[str]:
    """Return the parameters behind the last block: final norm and output of a language model."""
    behind = takewhile(lambda fqn: get_block(fqn, blocks) is None, reversed(fqns))
    return set(behind) if blocks else set()


# (FQN of the module, the module, name there)
_Owner = tuple[str, nn.Module, str]


def _get_owners(model: nn.Module) -> dict[str, list[_Owner]]:
    """Return per parameter, by its first FQN, every place where it is stored: several for a tied one."""
    first_fqns = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    owners: dict[str, list[_Owner]] = {fqn: [] for fqn in first_fqns.values()}
    for module_fqn, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[first_fqns[id(parameter)]].append((module_fqn, module, name))
    return owners


def _build_bucket(
    fqns: list[str],
    owners: dict[str, list[_Owner]],
    parametrizations: dict[nn.Module, dict[str, Parametrization]],
    reshards: bool,
) -> Bucket:
    places = [owners[fqn][0][1:] for fqn in fqns]
    how = [parametrizations[module][name] for module, name in places]
    members = [Member(fqn, *place, h.tensor_parallel) for fqn, place, h in zip(fqns, places, how)]
    wire = how[0].wire._replace(cuts=tuple(h.wire.cuts[0] for h in how))
    return Bucket(members, wire, how[0].accumulates, reshards)
