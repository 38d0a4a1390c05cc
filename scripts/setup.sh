#!/bin/sh
# Makes .venv: the locked packages, then this project, editable. Nothing to do is quick to see.
set -eu
cd "$(dirname "$0")/.."
. scripts/python.sh

venv=.venv
here=$(pwd -P)
inputs=$(cat pyproject.toml requirements/*.txt scripts/*.sh | cksum)
wanted="$here $inputs"

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# step TEXT COMMAND...: says what it does, and shows the command's own words only if it fails.
step() {
    echo "setup: $1"
    shift
    if ! "$@" >"$venv/setup.log" 2>&1; then
        cat "$venv/setup.log" >&2
        fail "this failed: $*" "the lines above say why; then run 'make setup' again"
    fi
}

# A .venv is kept if it runs, has pip, was made at this place (its scripts hold the path), and is
# of the Python asked for.
keep_venv() {
    is_supported "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    [ "$(cat "$venv/.place" 2>/dev/null || echo "$here")" = "$here" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of "$venv/bin/python")" ]
}

if [ -z "${PYTHON:-}" ] && [ "$(cat "$venv/.ready" 2>/dev/null)" = "$wanted" ] && is_supported "$venv/bin/python"; then
    exit 0
fi
if keep_venv; then
    [ "$(cat "$venv/.ready" 2>/dev/null)" = "$wanted" ] && exit 0
else
    choose_python
    echo "setup: making $venv with $python ($(version_of "$python"))"
    make_venv "$venv"
fi
rm -f "$venv/.ready"
echo "$here" >"$venv/.place"

python=$venv/bin/python
version=$(version_of "$python")
lock=requirements/py$(echo "$version" | tr -d .).txt
pip_install="$python -m pip install --disable-pip-version-check --no-input"
if [ -f "$lock" ]; then
    count=$(grep -c '^[a-z]' "$lock")
    step "installing the $count packages of $lock (a few minutes the first time)" \
        $pip_install --require-hashes -r "$lock"
    step "installing mirrored, editable" $pip_install --no-deps --no-build-isolation -e .
else
    echo "setup: no lock for Python $version in requirements/, so the newest packages are taken"
    step "installing mirrored, editable, and what it needs (a few minutes the first time)" \
        $pip_install -e '.[dev]'
fi
echo "$wanted" >"$venv/.ready"
echo "setup: done"
