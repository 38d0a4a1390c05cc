"""A worker that dies, stops, fails or is preempted: the others say so, and end."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from mirrored.testing import Run

PROGRAM = pathlib.Path(__file__).parent / "programs" / "steps.py"


@pytest.mark.conformance(51)
def test_an_exception_is_shown_first_and_ends_all(tmp_path):
    with Run([PROGRAM, "raise", 1, tmp_path], 2) as run:
        began = time.monotonic()
        finished = run.finish(60)
    assert finished.code == 1
    report = finished.stderr.partition("mirrored launch: worker 1")[2]
    assert "failed first, with exit code 1, after step 20" in report
    assert "KeyError: 'what went wrong'" in report
    assert time.monotonic() - began < 40


def test_an_exception_in_a_thread_ends_all(tmp_path):
    with Run([PROGRAM, "thread", 0, tmp_path], 2) as run:
        finished = run.finish(60)
    assert finished.code == 1
    assert "KeyError: 'in a thread'" in finished.stderr.partition("worker 0 (host")[2]


@pytest.mark.conformance(49)
@pytest.mark.parametrize(
    ("how", "who"), [("kill", 1), ("kill", 0), ("stop", 1), ("exit", 0), ("exit", 1)]
)
def test_the_others_name_who_died_or_stopped(tmp_path, how, who):
    """Without a launcher, as under Slurm: two programs that know each other by TF_CONFIG."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    workers = [f"localhost:{port}", "localhost:1"]
    programs = []
    for index in (0, 1):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        environment["TF_CONFIG"] = json.dumps(config)
        command = [sys.executable, str(PROGRAM), how, str(who), str(tmp_path)]
        programs.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        )
    try:
        began = time.monotonic()
        _, said = programs[1 - who].communicate(timeout=60)
        seconds = time.monotonic() - began
    finally:
        for program in programs:
            if how != "exit":
                program.kill()
            program.communicate()
    # Starting takes some seconds of these.
    assert seconds < 30
    assert programs[1 - who].returncode == 86
    assert f"WorkerError: worker {who} (host {socket.gethostname()}, pid" in said.decode()
    if how == "exit":
        assert "failed after step 20: SystemExit: 7" in said.decode()
        assert programs[who].returncode == 7
    else:
        assert "its last step was" in said.decode()


@pytest.mark.conformance(50)
def test_preemption_of_one_stops_all_at_one_step(tmp_path):
    with Run([PROGRAM, "preempt", 1, tmp_path], 2) as run:
        finished = run.finish(60).require_success()
    # Before that worker 1 alone has saved something.
    assert (tmp_path / "only" / "step_0000000018" / "mirrored.json").exists()
    saved = [line for line in finished.stderr.splitlines() if "preempted; saved after" in line]
    assert len(saved) == 2
    first, second = (line.rpartition("step ")[2] for line in saved)
    assert first == second
    assert 20 < int(first.rstrip(".")) < 60
    # The second run goes on from there; the program checks that each step counted once.
    # A signal that comes after the last step changes nothing, and nobody waits for it.
    with Run([PROGRAM, "late", 1, tmp_path], 2) as run:
        assert "ended after step 60, 60 counted" in run.finish(60).require_success().stdout


def test_a_save_that_needs_all_names_the_absent(tmp_path):
    with Run([PROGRAM, "alone", 1, tmp_path], 2) as run:
        finished = run.finish(60)
    assert finished.code != 0
    assert "WorkerError: worker 1 (host" in finished.stderr
    assert "did not come to 'save of step 20' within 3 s" in finished.stderr


def test_set_up_names_who_has_not_come(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = {
        "cluster": {"worker": [f"localhost:{port}", "far:1", "away:1"]},
        "task": {"type": "worker", "index": 0},
    }
    environment["TF_CONFIG"] = json.dumps(config)
    finished = subprocess.run(
        [sys.executable, str(PROGRAM), "set-up", "0", str(tmp_path)],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 1
    assert b"workers 1, 2 of 3 have not come" in finished.stderr
