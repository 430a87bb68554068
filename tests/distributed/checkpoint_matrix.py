"""The checkpoint matrix: save under every layout, load every checkpoint under every layout, compare every bit.

The oracle is one process: torchtitan's plain model with the same seed and the same gradients, stepped by the same
optimizer, without data parallelism, meshes or checkpoints. A layout that loads starts from another seed, so a load that
does nothing is seen.

Not here: the layouts (checkpoint_layouts.py), the state (checkpoint_state.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .checkpoint_layouts import get_seed, LAYOUTS
from .ranks import RankPool

PRELOAD = ["torchtitan.models.llama3", "torchtitan.components.checkpoint"]  # imported once for all ranks


class Matrix(NamedTuple):
    """What `run_matrix` found, by name of layout.

    Args:
        saved_keys: the names and shapes in a layout's checkpoint.
        differences: what of a state is not that of the oracle: of the (layout, None) as it was saved, of a
            (saved under, loaded under) after loading.
        collectives: collectives on floating-point tensors while a layout saved or loaded.
    """

    saved_keys: dict[str, dict[str, Any]]
    differences: dict[tuple[str, str | None], list[str]]
    collectives: dict[str, list[str]]


def run_matrix(pool: RankPool, folder: Path, report: Callable[[str], None] = print) -> Matrix:
    """Save under every layout and load every checkpoint under every layout; `folder` gets the checkpoints."""
    (oracles,) = pool.run(get_oracles, 1, folder)
    matrix = Matrix({}, {}, {})
    for name, layout in LAYOUTS.items():
        report(f"save: {name}")
        results = pool.run(save, layout.world_size, name, folder)
        matrix.saved_keys[name] = results[0][0]
        matrix.differences[name, None] = find_differences([snapshot for _, snapshot, _ in results], oracles[name])
        matrix.collectives[name] = [op for _, _, collectives in results for op in collectives]
    for name, layout in LAYOUTS.items():
        report(f"load: {name}")
        results = pool.run(load_all, layout.world_size, name, folder)
        for saved in LAYOUTS:
            snapshots = [snapshots[saved] for snapshots, _ in results]
            matrix.differences[saved, name] = find_differences(snapshots, oracles[saved])
        matrix.collectives[name] += [op for _, collectives in results for op in collectives]
    return matrix


def find_differences(snapshots: list[dict[str, str]], oracle: dict[str, str]) -> list[str]:
    """Return the names whose value is missing, or other than the oracle's on any of the ranks."""
    values: dict[str, set[str]] = {name: set() for name in oracle}
    for snapshot in snapshots:
        for name, value in snapshot.items():
            values.setdefault(name, set()).add(value)
    return sorted(name for name, found in values.items() if found != {oracle.get(name)})


# What follows runs on ranks, which alone import torchtitan.


def get_oracles(folder: Path) -> dict[str, dict[str, str]]:
    """Return the state of one process per seed, by name of the layout that has this seed."""
    return {name: build_stepped("core, one process", get_seed(name), folder).get_snapshot() for name in LAYOUTS}


def build_stepped(name: str, seed: int, folder: Path) -> Any:
    """Return the state some steps after `seed`; the number of steps depends on the seed too."""
    from .checkpoint_state import build_model_parts, TrainingState

    state = TrainingState(LAYOUTS[name], build_model_parts(LAYOUTS[name], seed), folder)
    for _ in range(1 + seed % 3):
        state.step(seed)
    return state


def save(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Save under a layout; return what the checkpoint has, the state on this rank, collectives on tensors."""
    from torch.distributed.checkpoint import FileSystemReader

    from .collective_counter import FloatCollectives

    state = build_stepped(name, get_seed(name), folder / str(get_seed(name)))
    with FloatCollectives() as collectives:
        state.manager.save(state.train_state.step)
    checkpoint = folder / str(get_seed(name)) / f"step-{state.train_state.step}"
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    keys = {key: getattr(entry, "size", None) for key, entry in metadata.items()}
    return keys, state.get_snapshot(), collectives.seen


def load_all(name: str, folder: Path) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Load each checkpoint under a layout; return the states on this rank and the collectives on tensors.

    Optimizer and scheduler are new for each; the model has the weights of another seed, at last those loaded before.
    """
    from .checkpoint_state import build_model_parts, TrainingState
    from .collective_counter import FloatCollectives

    model_parts = build_model_parts(LAYOUTS[name], seed=0)
    snapshots, seen = {}, []
    for saved in LAYOUTS:
        state = TrainingState(LAYOUTS[name], model_parts, folder / str(get_seed(saved)))
        with FloatCollectives() as collectives:
            assert state.manager.load()
        seen += collectives.seen
        snapshots[saved] = state.get_snapshot()
    return snapshots, seen
