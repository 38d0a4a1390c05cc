"""Runs Keras's own trainer, callback and saving tests with every model made in a scope.

    python scripts/keras_own_tests.py            # all of them, twice: without us and with us
    python scripts/keras_own_tests.py trainer    # files whose name has "trainer"

Prints what passes without us and not with us, and exits with 1 if that is more than the
exceptions listed in EXCEPTIONS, each with its reason. Needs the installed Keras to have its
test files, as the wheels of 3.15 do, and pytest.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

FILES = ("trainers/*_test.py", "callbacks/*_test.py", "saving/*_test.py")

OPTIONS = ["-p", "in_scope", "-p", "no:cacheprovider", "-q", "-rA", "--tb=line", "--no-header"]
OPTIONS += ["-W", "ignore", "-c", os.devnull]

# Tests that cannot pass in a scope, and why.
EXCEPTIONS: dict[str, str] = {}

PLUGIN = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import mirrored.testing
mirrored.testing.use_cpu_devices(2)
import keras
import mirrored
import pytest

if os.environ.get("MIRRORED_SCOPE") == "1":
    STRATEGY = mirrored.MirroredStrategy()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(item):
        with STRATEGY.scope():
            yield
"""


def outcomes(files: list[pathlib.Path], scope: bool, plugin_folder: str) -> dict[str, str]:
    """Runs the files and returns each test's outcome."""
    environment = dict(os.environ, MIRRORED_SCOPE=str(int(scope)), KERAS_BACKEND="jax")
    environment["PYTHONPATH"] = os.pathsep.join([plugin_folder, environment.get("PYTHONPATH", "")])
    found: dict[str, str] = {}
    for file in files:
        # One process a file: a crash or hang in one leaves the others' results.
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    *OPTIONS,
                    "--rootdir",
                    str(file.parent),
                    str(file),
                ],
                env=environment,
                cwd=tempfile.gettempdir(),
                capture_output=True,
                text=True,
                timeout=900,
                check=False,
            )
        except subprocess.TimeoutExpired:
            found[f"{file.name}::TIMEOUT"] = "FAILED"
            continue
        for outcome, name in re.findall(
            r"^(PASSED|FAILED|ERROR|SKIPPED) (\S+?)(?: - .*)?$", done.stdout, re.MULTILINE
        ):
            found[f"{file.name}::{name.split('::', 1)[-1]}"] = outcome
        print(f"  {file.name}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return found


def main() -> int:
    """Runs everything twice and compares."""
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        sys.exit("Keras is not installed here.")
    root = pathlib.Path(spec.origin).parent / "src"
    files = sorted(file for pattern in FILES for file in root.glob(pattern))
    if len(sys.argv) > 1:
        files = [file for file in files if sys.argv[1] in file.name]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "in_scope.py").write_text(PLUGIN)
        print("without us:")
        without = outcomes(files, False, folder)
        print("every model in a scope of two replicas:")
        within = outcomes(files, True, folder)
    passing = [name for name, outcome in without.items() if outcome == "PASSED"]
    lost = [name for name in passing if within.get(name) != "PASSED"]
    unexpected = [name for name in lost if name not in EXCEPTIONS]
    print(f"{len(passing)} pass without us, {len(passing) - len(lost)} of them in a scope.")
    for name in lost:
        print(f"  not in a scope: {name}: {EXCEPTIONS.get(name, 'UNEXPECTED')}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
