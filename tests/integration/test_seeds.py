"""What debug.seed decides, through ./run_train.sh: the same seed gives the same bits, also one that was drawn."""

from __future__ import annotations

import re

from .training_runs import LOSS, REPOSITORY


def get_drawn_seed(log: str) -> str:
    return re.search(r"initial weights drawn from seed (\d+)", log)[1]


def test_a_drawn_seed_is_logged_and_gives_the_same_bits_when_it_is_set(runs, tmp_path):
    config = (REPOSITORY / "train_configs" / "llama3_debug.toml").read_text()
    (tmp_path / "no_seed.toml").write_text(config.split("[debug]")[0].replace('"torchtitan_simple', f'"{REPOSITORY}/torchtitan_simple'))
    without = ["--config", str(tmp_path / "no_seed.toml"), "--training.local_batch_size", "4"]
    first, second = (runs.get_result(2, *without, "--job.description", str(i), seed=None) for i in range(2))
    assert get_drawn_seed(first.log) != get_drawn_seed(second.log)
    assert first.scalars[LOSS] != second.scalars[LOSS]
    set_to_it = runs.get_result(2, *without, seed=get_drawn_seed(first.log))
    assert set_to_it.scalars == first.scalars
    again = runs.get_result(2, *without, "--job.description", "again", seed=get_drawn_seed(first.log))
    assert again.scalars == first.scalars
