"""Bucket plan: which parameters travel in one collective, and in whose forward they are read.

Not here: what a bucket does (bucket.py). Everything here is a pure function of names, sizes and module classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from os.path import commonprefix

import torch
from torch import nn

BucketPlan = str | int | float | Sequence[Sequence[str]] | None

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def build_bucket_plan(model: nn.Module, bucket_plan: BucketPlan, param_dtype: torch.dtype | None) -> list[list[str]]:
    """Return the FQNs of each bucket's parameters, tied ones once, every parameter in one bucket.

    See `bucket_plan` of `data_parallel`.
    """
    parameters = dict(model.named_parameters())
    if bucket_plan is None:
        return [[fqn] for fqn in parameters]
    if bucket_plan == "block":
        return _group_by_block(list(parameters), find_blocks(model))
    if isinstance(bucket_plan, (int, float)) and not isinstance(bucket_plan, bool) and bucket_plan > 0:
        sizes = {fqn: p.numel() * (param_dtype or p.dtype).itemsize for fqn, p in parameters.items()}
        return _group_by_size(sizes, bucket_plan * 2**20)
    if isinstance(bucket_plan, Sequence) and not isinstance(bucket_plan, str):
        return _group_as_listed(model, parameters, bucket_plan)
    raise ValueError(
        f"data_parallel: unknown bucket_plan {bucket_plan!r}. Valid: 'block', a size in MiB above 0, a list of lists of FQNs "
        "of parameters or modules, or None (one collective per parameter)."
    )


def find_blocks(model: nn.Module) -> list[str]:
    """Return the FQNs of the blocks: the elements of the outermost ModuleLists, ModuleDicts and Sequentials.

    A Sequential around a ModuleList or ModuleDict (a backbone and its head) is not a list of blocks.
    """
    blocks: list[str] = []

    def walk(module: nn.Module, prefix: str) -> None:
        is_list = isinstance(module, _CONTAINERS)
        if isinstance(module, nn.Sequential):
            is_list = not any(isinstance(inner, _WITHOUT_FORWARD) for inner in module.modules())
        for name, child in module.named_children():
            if is_list:
                blocks.append(prefix + name)
            else:
                walk(child, f"{prefix}{name}.")

    walk(model, "")
    return blocks


def get_block(fqn: str, blocks: Sequence[str]) -> str | None:
    """Return the block that a module or parameter is in, or is; None: it is in none."""
    return next((block for block in blocks if fqn == block or fqn.startswith(f"{block}.")), None)


def get_scopes(model: nn.Module, owners: Sequence[str], blocks: Sequence[str]) -> list[str]:
    """Return the FQNs of the modules whose forward reads the parameters of these owners ('' is the model).

    Inside a block that is the innermost module with a forward that holds all of them (so a wrapper around a block, as
    activation checkpointing has, is outside), elsewhere each owner itself.
    """
    by_block: dict[str, list[str]] = {}
    scopes: list[str] = []
    for owner in dict.fromkeys(owners):
        block = get_block(owner, blocks)
        if block is None:
            scopes.append(owner)
        else:
            by_block.setdefault(block, []).append(owner)
    for inside in by_block.values():
        path = commonprefix([owner.split(".") for owner in inside])
        while path and isinstance(model.get_submodule(".".join(path)), _WITHOUT_FORWARD):
            path = path[:-1]
        scopes.append(".".join(path))
    return scopes


def _group_by_block(fqns: list[str], blocks: list[str]) -> list[list[str]]:
    """One bucket per block; the parameters between two blocks (before the first, after the last) form one, too."""
    plan: list[list[str]] = []
    last: str | None = ""
    for fqn in fqns:
        block = get_block(fqn, blocks)
        if not plan or block != last:
            plan.append([])
        plan[-1].append(fqn)
        last = block
    return plan


def _group_by_size(sizes: dict[str, int], limit: float) -> list[list[str]]:
    plan: list[list[str]] = []
    used = 0
    for fqn, size in sizes.items():
        if not plan or used + size > limit:
            plan.append([])
            used = 0
        plan[-1].append(fqn)
        used += size
    return plan


def _group_as_listed(
    model: nn.Module, parameters: dict[str, nn.Parameter], listed: Sequence[Sequence[str]]
) -> list[list[str]]:
    """The listed buckets; a parameter in none of them has a collective of its own."""
    modules = dict(model.named_modules())
    first_names = {id(parameter): fqn for fqn, parameter in parameters.items()}
    names = {fqn: first_names[id(p)] for fqn, p in model.named_parameters(remove_duplicate=False)}  # of tied ones, all
    bucket_of: dict[str, int] = {}
    for number, entries in enumerate(listed):
        if isinstance(entries, str):
            raise TypeError(f"data_parallel: bucket_plan is a list of lists of FQNs, got {entries!r} in place of a list.")
        for entry in entries:
            if entry not in names and entry not in modules:
                close = difflib.get_close_matches(str(entry), [*names, *modules], n=1)
                suggestion = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"data_parallel: bucket_plan names {entry!r}, which the model does not have.{suggestion}")
            for name, fqn in names.items():
                if name == entry or entry == "" or name.startswith(f"{entry}."):
                    if bucket_of.setdefault(fqn, number) != number:
                        raise ValueError(f"data_parallel: bucket_plan puts parameter {fqn!r} into two buckets.")
    plan: dict[int | str, list[str]] = {}
    for fqn in parameters:
        plan.setdefault(bucket_of.get(fqn, fqn), []).append(fqn)
    return list(plan.values())
