#!/bin/sh
# Every static check, each to its end; fails if one of them failed. `make check` sets up first.
set -u
cd "$(dirname "$0")/.."
bin=.venv/bin
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1 # else pyright asks the network for a newer version

failed=
check() {
    name=$1
    shift
    if output=$("$@" 2>&1); then
        echo "check: $name ok"
    else
        printf '%s\n' "$output"
        echo "check: $name FAILED ($*)"
        failed="$failed $name"
    fi
}

check ruff "$bin/python" -m ruff check .
check format "$bin/python" -m ruff format --check .
check pyright "$bin/python" -m pyright
check layers "$bin/lint-imports" --no-logo

if [ -n "$failed" ]; then
    echo "check: failed:$failed" >&2
    exit 1
fi
