# Chooses the Python environment for run_train.sh and run_tests.sh, which source this file with $repo set.
#
# choose_python [EXTRA] sets PYTHON to
#   1. the current interpreter (the variable PYTHON, else python3, else python) if it has all of pyproject.toml's
#      dependencies and those of the optional EXTRA, otherwise
#   2. .venv/bin/python of this checkout, installing there first what is missing.
# Either way the package itself comes from this checkout, even where another copy of it is installed.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
fail() { say "$@"; exit 1; }

choose_python() {
    local extra="${1:-}" missing
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON='$PYTHON' is not a command. Set it to a Python interpreter, or unset it."
        case "$PYTHON" in  # the callers change the working directory
            /*) ;;
            */*) PYTHON="$PWD/$PYTHON" ;;
        esac
    else
        PYTHON="$(command -v python3 || command -v python)" ||
            fail "found neither python3 nor python. Install Python 3.10 or newer, or name it in the variable PYTHON."
    fi
    missing="$(list_missing "$PYTHON")"
    if [ -n "$missing" ]; then
        use_venv
    fi
    # PYTHON is exported so that whatever the tests start uses the same environment. The working directory stays
    # importable (a custom TRAIN_FILE may live there), but behind this checkout: it could hold another one.
    export PYTHON PYTHONSAFEPATH=1 PYTHONPATH="$repo:${PYTHONPATH:+$PYTHONPATH:}$PWD"
}

list_missing() { "$1" "$repo/scripts/missing_packages.py" "$repo/pyproject.toml" $extra 2>/dev/null || echo "a working Python"; }

use_venv() {
    local venv="$repo/.venv" base="$PYTHON"
    # Holds the files the last complete installation came from, or "installing". A .venv without it was made by hand:
    # it is used and completed, but never removed.
    local stamp="$venv/installed-from" wanted
    wanted="$(cat "$repo/pyproject.toml" "$repo/constraints.txt")"
    PYTHON="$venv/bin/python"
    if venv_is_ready; then
        return
    fi
    [ -w "$repo" ] || fail "$base lacks $missing, and $repo is not writable. Activate an environment that has them."
    if command -v flock >/dev/null; then
        exec 9<"$repo/constraints.txt"
        flock -n 9 || { say "another start is installing into .venv; waiting for it"; flock 9; }
    fi
    if ! venv_is_ready; then
        install_venv
    fi
    exec 9<&-
}

venv_is_ready() {
    [ -x "$PYTHON" ] || return 1
    [ ! -e "$stamp" ] || [ "$(cat "$stamp")" = "$wanted" ] || return 1
    [ -z "$(list_missing "$PYTHON")" ]
}

install_venv() {
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$base is $("$base" --version 2>&1). Name a Python 3.10 or newer in the variable PYTHON."
    "$base" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$base cannot make a virtual environment (module venv or ensurepip is missing). On Debian and Ubuntu: apt install python3-venv."
    say "$base lacks $missing"
    say "installing into $venv; this happens once and takes some minutes"
    if [ ! -e "$venv" ] || [ "$(cat "$stamp" 2>/dev/null)" = installing ]; then
        rm -rf "$venv" && mkdir "$venv" && echo installing >"$stamp"
    elif [ -e "$stamp" ]; then
        echo installing >"$stamp"
    fi
    # Without a writable HOME pip has no place for its cache; an empty one would mean the root folder.
    if [ ! -w "${HOME:-}" ]; then
        export PIP_NO_CACHE_DIR=1
    fi
    # stdout stays free for the output of what was started. PYTHONPATH could make pip believe that packages are there.
    (
        unset PYTHONPATH
        cd "$repo" &&
        "$base" -m venv .venv &&
        "$PYTHON" -m pip install --no-input --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
    ) >&2 || fail "installing into $venv failed, see above. Put that right and start again."
    if [ -e "$stamp" ]; then
        printf '%s\n' "$wanted" >"$stamp"
    fi
    say "installed"
}
