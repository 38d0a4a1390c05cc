"""Runs Keras's own trainer, callback and saving tests with every model made in a scope.

    python scripts/keras_own_tests.py                  # all of them
    python scripts/keras_own_tests.py trainer saving   # files with one of these in their name

Each test runs in the scope of two replicas; what does not pass there runs once more without
us. Prints what passes without us only, and exits with 1 if that is more than the exceptions
listed in EXCEPTIONS, each with its reason. Needs the installed Keras to have its test files,
as the wheels of 3.15 do, and pytest.
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

TIMEOUT_SECONDS = 3600

# Tests that cannot pass in a scope, and why.
# By the name of the test function.
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


def outcomes(tests: dict[str, list[str]], scope: bool, plugin_folder: str) -> dict[str, str]:
    """Runs tests, given as the arguments of pytest by file, and returns each one's outcome."""
    environment = dict(os.environ, MIRRORED_SCOPE=str(int(scope)), KERAS_BACKEND="jax")
    environment["PYTHONPATH"] = os.pathsep.join([plugin_folder, environment.get("PYTHONPATH", "")])
    found: dict[str, str] = {}
    for file, arguments in tests.items():
        root = ["--rootdir", str(pathlib.Path(file).parent)]
        # One process a file: a crash or hang in one leaves the others' results.
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *OPTIONS, *root, *arguments],
                env=environment,
                cwd=tempfile.gettempdir(),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            found[f"{file}::timeout"] = "FAILED"
            continue
        for outcome, name in re.findall(
            r"^(PASSED|FAILED|ERROR|SKIPPED) (\S+?)(?: - .*)?$", done.stdout, re.MULTILINE
        ):
            found[f"{file}::{name.split('::', 1)[-1]}"] = outcome
        said = (done.stdout.strip() or done.stderr.strip() or "said nothing").splitlines()
        print(f"  {said[-1]}  {file}", flush=True)
        if not found and done.returncode:
            sys.exit("pytest did not start.")
    return found


def main() -> int:
    """Runs all in a scope, what fails there without us, and compares."""
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        sys.exit("Keras is not installed here.")
    root = pathlib.Path(spec.origin).parent / "src"
    files = [str(file) for pattern in FILES for file in sorted(root.glob(pattern))]
    if len(sys.argv) > 1:
        files = [file for file in files if any(word in file for word in sys.argv[1:])]
    if not files:
        sys.exit(f"{root} has no such test files.")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "in_scope.py").write_text(PLUGIN)
        print("every model in a scope of two replicas:")
        within = outcomes({file: [file] for file in files}, True, folder)
        failed = [name for name, outcome in within.items() if outcome in ("FAILED", "ERROR")]
        again: dict[str, list[str]] = {}
        for name in failed:
            file, test = name.split("::", 1)
            again.setdefault(file, []).append(file if test == "timeout" else name)
        print("what failed, without us:")
        without = outcomes(again, False, folder)
    passed = sum(outcome == "PASSED" for outcome in within.values())
    lost = [name for name in failed if without.get(name) == "PASSED"]
    lost += [name for name in failed if name.endswith("::timeout") and name not in without]
    print(
        f"{passed} pass in a scope; {len(failed) - len(lost)} fail with and without us; "
        f"{len(lost)} in a scope only."
    )
    unexpected = 0
    for name in lost:
        reason = EXCEPTIONS.get(name.split("::")[-1])
        unexpected += reason is None
        print(f"  in a scope only: {name}: {reason or 'UNEXPECTED'}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
