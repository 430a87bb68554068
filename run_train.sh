#!/usr/bin/env bash
# Trains a model: ./run_train.sh [--config FILE] [--section.key VALUE ...]; --help lists every option and variable.
# Works from any directory; the first start installs what is missing (scripts/setup_env.sh).
set -euo pipefail
started="${EPOCHREALTIME:-$(date +%s)}"
export SIMPLEFSDP_STARTED="${started/,/.}"  # for the log line about the time to step 1; some locales write a comma
repo="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$repo/scripts/setup_env.sh"
choose_python
exec "$PYTHON" -m torchtitan_simplefsdp.launch "$@"
