"""Keras over two real processes gives what it gives in one, killed or not."""

import json
import pathlib

import numpy as np

from mirrored.testing import Run

PROGRAM = pathlib.Path(__file__).parent / "programs" / "keras_fit.py"


def found(mode, directory, workers, cpu_devices, **options):
    arguments = [PROGRAM, mode, directory]
    with Run(arguments, workers, cpu_devices=cpu_devices, **options) as run:
        finished = run.finish(120).require_success()
    lines = [line for line in finished.stdout.splitlines() if "FOUND" in line]
    return [json.loads(line.partition("FOUND ")[2]) for line in lines], finished.stderr


def test_keras_over_workers_is_that_of_one_process(tmp_path):
    (one,), _ = found("whole", tmp_path / "one", 1, 2)
    resumed, said = found("kill", tmp_path / "killed", 2, 1, max_restarts=1)
    assert "starting all workers again" in said
    # Killed in the third epoch, resumed after the second.
    first, second = resumed
    assert first == second
    for worker in resumed:
        assert len(worker["predict"]) == 45
        for name, value in one["last"].items():
            np.testing.assert_allclose(worker["last"][name], value, rtol=1e-5)
        np.testing.assert_allclose(worker["evaluate"], one["evaluate"], rtol=1e-5)
        np.testing.assert_allclose(worker["predict"], one["predict"], rtol=1e-4, atol=1e-6)
