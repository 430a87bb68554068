#!/usr/bin/env bash
# Runs the tests: ./run_tests.sh [pytest arguments]; paths among them are relative to this folder.
# Works from any directory; the first start installs what is missing (scripts/setup_env.sh).
set -euo pipefail
repo="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source "$repo/scripts/setup_env.sh"
choose_python dev
cd "$repo"
exec "$PYTHON" -m pytest "$@"
