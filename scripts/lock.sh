#!/bin/sh
# Writes requirements/py3XX.txt from pyproject.toml, one lock for each Python. Pins that still fit
# are kept; `make lock ARGS=--upgrade` takes the newest of everything. Wheels only, so that setting
# up never needs a compiler. uv writes no index address.
set -eu
cd "$(dirname "$0")/.."
. scripts/python.sh

uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    uv=.venv-lock/bin/uv
    if [ ! -x "$uv" ]; then
        choose_python
        echo "lock: installing uv into .venv-lock"
        make_venv .venv-lock
        .venv-lock/bin/python -m pip install --disable-pip-version-check --quiet uv
    fi
fi

for version in 3.11 3.12 3.13; do
    lock=requirements/py$(echo "$version" | tr -d .).txt
    echo "lock: $lock"
    "$uv" pip compile pyproject.toml --extra dev --output-file "$lock" \
        --python-version "$version" --python-platform linux --only-binary :all: --generate-hashes \
        --custom-compile-command "make lock" --quiet "$@"
done
