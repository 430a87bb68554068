#!/usr/bin/env bash
# Trains a model: ./run_train.sh [--config FILE] [--section.key VALUE ...]; --help lists every option and variable.
# Works from any directory; the first start installs what is missing (scripts/setup_env.sh).
set -euo pipefail
export SIMPLEFSDP_STARTED="${EPOCHREALTIME:-$(date +%s)}"  # for the log line about the time to step 1
repo="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$repo/scripts/setup_env.sh"
choose_python
exec "$PYTHON" -m torchtitan_simplefsdp.launch "$@"
