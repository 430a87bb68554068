"""Entry point of every rank: registration, configuration check, then torchtitan's own main.

`torchrun ... -m torchtitan_simplefsdp.train --job.config_file FILE [overrides]`; ./run_train.sh does that.

Not here: starting ranks (launch.py).
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

import torchtitan.train

from torchtitan_simplefsdp.launch import EXIT_CONFIG_ERROR, exit_with_explanation
from torchtitan_simplefsdp.titan.checkpoint_formats import CheckpointError
from torchtitan_simplefsdp.titan.config.check import ConfigError, parse_job_config
from torchtitan_simplefsdp.titan.rebind import apply_rebinds
from torchtitan_simplefsdp.titan.train_spec import register
from torchtitan_simplefsdp.titan.trainer import SimpleFSDPTrainer, Stopped


# Warnings of torch about things that torchtitan does in every run and that do not matter here; they would be the first
# lines a newcomer sees.
HARMLESS_WARNINGS = (
    "DTensor random operators may not have complete support",  # init_weights draws no DTensor random numbers
    r"DTensor manual_seed\(\) may not have complete support",
    "'set_vital' is deprecated",  # torchdata's own call
    "Set timeout is now only supported for either nccl or gloo",  # mesh dims of size 1 have a fake group
)


def main(argv: list[str]) -> None:
    """Check `argv` and the file it names, then train; a fault ends the process before any process group exists."""
    for message in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message)
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
        # torchrun's default; torchtitan sets another value in every run and warns, which is for a value of the user's
        del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    register()
    try:
        job_config = parse_job_config(argv, int(os.environ.get("WORLD_SIZE") or os.environ.get("NGPU") or 1))
    except ConfigError as error:
        exit_with_explanation(str(error), EXIT_CONFIG_ERROR)
    apply_rebinds(job_config)
    try:
        torchtitan.train.main(SimpleFSDPTrainer)
    except CheckpointError as error:
        exit_with_explanation(str(error), 1)
    except Stopped as stop:
        exit_with_explanation(str(stop), 128 + signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
