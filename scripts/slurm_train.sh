#!/usr/bin/env bash
# Trains on several machines of a SLURM cluster; submit it from the repository's folder, which all machines share:
#   sbatch --nodes 32 scripts/slurm_train.sh --config train_configs/llama3_70b.toml [overrides]
# sbatch options before the script's name win over the lines below; a cluster may also want --partition and --account.
#SBATCH --job-name=simplefsdp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail
repo="$SLURM_SUBMIT_DIR"  # SLURM runs a copy of this script from a folder of its own
if [ ! -x "$repo/run_train.sh" ]; then
    echo "slurm_train.sh: no run_train.sh in $repo. Submit it from the repository's folder." >&2
    exit 2
fi
# Once here, so that the machines do not all install into the shared folder at the same time.
source "$repo/scripts/setup_env.sh"
choose_python

read -r head_machine < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NNODES="$SLURM_JOB_NUM_NODES"
export NGPU="${NGPU:-${SLURM_GPUS_ON_NODE:-8}}"
export RDZV_ENDPOINT="$head_machine:$((20000 + SLURM_JOB_ID % 10000))"  # another port for another job on the same machine
export RDZV_ID="$SLURM_JOB_ID"
# One launcher per machine. --kill-on-bad-exit: the others would wait for a machine that has failed.
exec srun --kill-on-bad-exit=1 bash -c 'NODE_RANK="$SLURM_NODEID" exec "$@"' bash "$repo/run_train.sh" "$@"
