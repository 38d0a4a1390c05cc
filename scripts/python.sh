# Sourced by setup.sh and lock.sh: choosing a Python, and saying what went wrong.

fail() {
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

# Runs it, because a name on PATH may be a shim for a version that is not installed.
is_supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Sets `python` to $PYTHON, or else to the first that runs. Versions with a lock come first.
choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" || fail "PYTHON=$PYTHON does not run or is older than Python 3.11" \
            "give a Python >= 3.11, for example: make setup PYTHON=/usr/bin/python3.12"
        python=$PYTHON
        return
    fi
    for python in python3.13 python3.12 python3.11 python3 python; do
        if is_supported "$python"; then return; fi
    done
    fail "no Python >= 3.11 found (tried python3.13, python3.12, python3.11, python3, python)" \
        "install one, or name one: make setup PYTHON=/path/to/python3.12"
}

# make_venv FOLDER: a virtual environment with pip, made by $python.
make_venv() {
    rm -rf "$1"
    if "$python" -m venv "$1" >/dev/null 2>&1; then return; fi
    # Some systems ship venv without the pip it would install. The Python's own pip can put one there.
    rm -rf "$1"
    "$python" -m venv --without-pip "$1" >/dev/null 2>&1 || fail "$python cannot make a virtual environment" \
        "install its venv module (on Debian and Ubuntu: apt install python3-venv)"
    "$python" -m pip --disable-pip-version-check --python "$1/bin/python" install --quiet pip || {
        rm -rf "$1"
        fail "$python has no pip to put into $1" "install pip (on Debian and Ubuntu: apt install python3-pip)"
    }
}
