"""Convert a model's weights between a DCP folder, a Hugging Face folder and one .pt file, in any direction.

    python scripts/convert_checkpoint.py --input outputs/checkpoint --output exported --to hf --dtype bfloat16
    python scripts/convert_checkpoint.py --input exported --output outputs/start --to dcp
    python scripts/convert_checkpoint.py --input outputs/checkpoint/step-10 --output model.pt

The weights only. A run starts from a DCP folder with --checkpoint.initial_load_path and --checkpoint.initial_load_model_only.
Flavor and tokenizer are those of the TOML file, which flags such as --model.flavor override, as in ./run_train.sh.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

import torch

from torchtitan_simplefsdp.launch import EXIT_CONFIG_ERROR
from torchtitan_simplefsdp.launch_args import build_module_args, LaunchError
from torchtitan_simplefsdp.titan.checkpoint_formats import CheckpointError, find_checkpoint, PT_SUFFIXES
from torchtitan_simplefsdp.titan.config.check import ConfigError, parse_job_config
from torchtitan_simplefsdp.titan.convert import convert
from torchtitan_simplefsdp.titan.train_spec import register
from torchtitan_simplefsdp.titan.weights import NO_DIST_WARNING

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sources = "a step's folder, a folder of step-N ones (the latest), a Hugging Face folder, a .pt file"
    parser.add_argument("--input", required=True, help=sources)
    parser.add_argument("--output", required=True, type=Path, help="what to write; must not exist")
    parser.add_argument("--to", choices=["dcp", "hf", "pt"], help="format to write (default: pt if --output ends in .pt)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: as they are)")
    parser.add_argument("--config", help="TOML file (default: train_configs/llama3_debug.toml)")
    args, overrides = parser.parse_known_args(argv)
    to = args.to or ("pt" if args.output.suffix in PT_SUFFIXES else None)
    if to is None:
        parser.error(f"--output {args.output} may be a folder of either format: add --to dcp or --to hf")

    warnings.filterwarnings("ignore", NO_DIST_WARNING)
    register()
    config = ["--config", args.config] if args.config else []
    try:
        job_config = parse_job_config(build_module_args([*config, *overrides], os.environ), 1, model_only=True)
        source = find_checkpoint(args.input)
        convert(job_config, source, args.output, to, DTYPES.get(args.dtype))
    except (LaunchError, ConfigError, CheckpointError) as error:
        print(f"convert_checkpoint.py: {str(error).removeprefix('run_train.sh: ')}", file=sys.stderr)
        return EXIT_CONFIG_ERROR
    print(f"{source.path} ({source.format}) -> {args.output} ({to})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
