"""Runs the tests, as many groups of files side by side as there are cores (four at most).

With arguments it is ``pytest`` with these arguments. A group's output is shown when it ends, and
only its last lines if all passed. The groups that take longest come first; a file that no group
names is in the last one.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
GROUPS = {
    "keras: exact": ["test_keras_exact.py"],
    "workers": ["multiprocess/test_*.py", "test_launch.py", "test_data_processes.py"],
    "keras": ["test_keras_*.py"],
    "parameter servers": ["test_parameter_server_*.py"],
    "documents": ["test_docs.py", "test_examples_*.py", "test_benchmarks.py", "test_doctor.py"],
    "laws": ["test_laws.py", "test_gradients.py", "test_shards.py", "test_reproducible.py"],
    "nnx and functional": ["test_nnx*.py", "test_functional.py", "test_debug.py"],
    "data": ["test_data*.py", "test_progress.py"],
    "the rest": ["**/test_*.py"],
}
MOST_AT_ONCE = 4
COMMAND = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
# Workers and servers that tests have started are ended by their pytest.
SECONDS_TO_STOP = 20
# What pytest returns where no test was found, as in a group whose files are all gone.
NO_TESTS = 5


def files_of_groups() -> dict[str, list[str]]:
    """Gives every test file to the first group that names it."""
    taken: set[Path] = set()
    found = {}
    for name, patterns in GROUPS.items():
        files = {path for pattern in patterns for path in TESTS.glob(pattern)} - taken
        taken |= files
        if files:
            found[name] = [str(path) for path in sorted(files)]
    return found


class Runs:
    """The groups that are running, so that all can be ended."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self.stopped = False
        self.passed_tests = 0
        self.failed_tests = 0

    def run(self, name: str, files: list[str]) -> bool:
        """Runs a group and shows how it went; says whether all its tests passed."""
        with self._lock:
            if self.stopped:
                return False
            process = subprocess.Popen(
                [*COMMAND, *files], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self._processes.append(process)
        output, _ = process.communicate()
        passed = process.returncode in (0, NO_TESTS)
        with self._lock:
            self.passed_tests += counted("passed", output)
            self.failed_tests += counted("failed", output) + counted("errors?", output)
            if not self.stopped:
                print(summary(name, output) if passed else f"--- {name}\n{output}", flush=True)
        return passed

    def stop(self) -> None:
        """Starts no other group, and ends those that did not hear Ctrl-C themselves."""
        with self._lock:
            self.stopped = True
        for process in self._processes:
            try:
                process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                process.terminate()


def closing_line(output: str) -> str:
    """How pytest says it went; what processes of tests print may come after it."""
    found = re.findall(r"^=+ (.* in [0-9.]+s\b.*?) =+$", output, re.MULTILINE)
    return found[-1] if found else "no tests"


def counted(outcome: str, output: str) -> int:
    """How many tests of a group came out so."""
    return sum(map(int, re.findall(rf"(\d+) {outcome}\b", closing_line(output))))


def summary(name: str, output: str) -> str:
    """The lines of a group's output that are worth a look although all passed."""
    skipped = re.findall(r"^SKIPPED .*$", output, re.MULTILINE)
    return "\n".join([f"--- {name}: {closing_line(output)}", *skipped])


def main() -> int:
    """Runs everything; returns the exit status."""
    if len(sys.argv) > 1:
        return subprocess.call([sys.executable, "-m", "pytest", *sys.argv[1:]])
    started = time.monotonic()
    groups, runs = files_of_groups(), Runs()
    at_once = min(MOST_AT_ONCE, os.cpu_count() or 1)
    print(f"tests: {len(groups)} groups of files, {at_once} at a time", flush=True)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(runs.run, name, files): name for name, files in groups.items()}
        try:
            concurrent.futures.wait(futures)
        except KeyboardInterrupt:
            runs.stop()
            return 130
    failed = [name for future, name in futures.items() if not future.result()]
    minutes = (time.monotonic() - started) / 60
    result = f"failed in {', '.join(failed)}" if failed else "all passed"
    print(f"tests: {result} in {minutes:.1f} minutes")
    print(f"{runs.passed_tests} passed, {runs.failed_tests} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
