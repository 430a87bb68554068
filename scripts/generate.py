"""Generate text from a checkpoint: one of this trainer, of torchtitan, or a Hugging Face folder.

    python scripts/generate.py --checkpoint outputs/checkpoint --prompt "The"
    python scripts/generate.py --checkpoint outputs/checkpoint/step-10 --tp 4 --prompt "The" --prompt "A list is"

--checkpoint is one step's folder, a folder of step-N ones (the latest is taken), a folder with .safetensors files or a .pt
file. Flavor and tokenizer are those of the TOML file, which flags such as --model.flavor override, as in ./run_train.sh.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

from torchtitan_simplefsdp.launch import EXIT_CONFIG_ERROR, exit_with_explanation, launch_script
from torchtitan_simplefsdp.launch_args import build_module_args, LaunchError
from torchtitan_simplefsdp.rank import end_with_launcher

TP_FLAG = "--parallelism.tensor_parallel_degree"


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and the flags of the configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", required=True, help="folder or .pt file")
    parser.add_argument("--prompt", action="append", required=True, help="text to go on with; several: give it again")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks, started by this command (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens per prompt (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (default)")
    parser.add_argument("--top-k", type=int, help="draw among the k most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing, for each prompt by itself (default: 0)")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per prompt")
    parser.add_argument("--config", help="TOML file (default: train_configs/llama3_debug.toml)")
    args, overrides = parser.parse_known_args(argv)
    for name, is_valid, allowed in (
        ("tp", args.tp is None or args.tp >= 1, "at least 1"),
        ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 <= args.temperature < float("inf"), "at least 0"),
        ("top_k", args.top_k is None or args.top_k >= 1, "at least 1"),
        ("seed", 0 <= args.seed < 2**63, "from 0 to 2**63 - 1"),
    ):
        if not is_valid:
            parser.error(f"--{name.replace('_', '-')}={getattr(args, name)} must be {allowed}")
    return args, overrides


def run(args: argparse.Namespace, overrides: list[str], world_size: int) -> None:
    """Generate on this rank; rank 0 prints."""
    # not at the top: the launcher of several ranks needs none of it
    from torchtitan_simplefsdp.titan.checkpoint_formats import CheckpointError, find_checkpoint
    from torchtitan_simplefsdp.titan.config.check import ConfigError, parse_job_config
    from torchtitan_simplefsdp.titan.generate import generate, GenerationError, Sampling
    from torchtitan_simplefsdp.titan.train_spec import register
    from torchtitan_simplefsdp.titan.weights import NO_DIST_WARNING

    warnings.filterwarnings("ignore", NO_DIST_WARNING)
    register()
    config = ["--config", args.config] if args.config else []
    try:
        module_args = build_module_args([*config, *overrides, TP_FLAG, str(world_size)], os.environ)
        job_config = parse_job_config(module_args, world_size, model_only=True)
        sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.seed)
        completions = generate(job_config, find_checkpoint(args.checkpoint), args.prompt, sampling)
    except (LaunchError, ConfigError, CheckpointError, GenerationError) as error:
        exit_with_explanation(f"generate.py: {str(error).removeprefix('run_train.sh: ')}", EXIT_CONFIG_ERROR)
    if int(os.environ.get("RANK", 0)) != 0:
        return
    if args.json:
        print(json.dumps([completion._asdict() for completion in completions], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(completion.prompt + completion.text for completion in completions))


def main(argv: list[str]) -> int:
    args, overrides = parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", 0))  # of ranks that torchrun started
    if not world_size and args.tp and args.tp > 1:
        return launch_script(Path(__file__), argv, args.tp)
    if args.tp and world_size and args.tp != world_size:
        message = f"generate.py: --tp {args.tp} on {world_size} ranks of torchrun. Leave --tp out."
        exit_with_explanation(message, EXIT_CONFIG_ERROR)
    if world_size:
        end_with_launcher(os.getppid())
    run(args, overrides, world_size or 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
