"""scripts/slurm_train.sh, with stand-ins for SLURM's commands and for what it starts on each machine."""

import os
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

STAND_INS = {
    "bin/scontrol": 'printf "%s\\n" machine-7 machine-8',
    "bin/srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',  # shift: --kill-on-bad-exit
    "bin/python3": "true",  # an environment that lacks nothing
    "run_train.sh": 'echo "$NNODES $NODE_RANK $NGPU $RDZV_ENDPOINT $RDZV_ID"; printf "<%s>" "$@"; echo',
}


def test_every_machine_starts_one_launcher_that_knows_its_place(tmp_path):
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "NGPU")} | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "machine-[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
        "SLURM_GPUS_ON_NODE": "4",
    }
    command = ["bash", REPOSITORY / "scripts" / "slurm_train.sh", "--config", "a b.toml", "*"]
    run = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "2 0 4 machine-7:23456 123456",
        "<--config><a b.toml><*>",
        "2 1 4 machine-7:23456 123456",
        "<--config><a b.toml><*>",
    ]


def test_a_submission_from_another_folder_is_refused(tmp_path):
    environ = os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path)}
    command = ["bash", REPOSITORY / "scripts" / "slurm_train.sh"]
    run = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (
        2,
        f"slurm_train.sh: no run_train.sh in {tmp_path}. Submit it from the repository's folder.\n",
    )
