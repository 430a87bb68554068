"""What debug.seed decides, through ./run_train.sh: the same seed gives the same bits, also one that was drawn."""

from __future__ import annotations

import re

from .training_runs import LOSS, REPOSITORY, run_train


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


def test_a_seed_checkpoint_of_one_process_holds_the_weights_that_every_layout_draws(runs, tmp_path):
    made = run_train(1, "--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--debug.seed", "42", cwd=tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    layout = ["--training.local_batch_size", "4", "--parallelism.tensor_parallel_degree", "2"]
    seed_checkpoint = str(tmp_path / "outputs" / "checkpoint" / "step-0")
    load = ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.initial_load_path", seed_checkpoint]
    # another seed, so weights that were not loaded would be others
    assert runs.get_scalars(4, *layout) == runs.get_result(4, *layout, *load, seed="43").scalars
