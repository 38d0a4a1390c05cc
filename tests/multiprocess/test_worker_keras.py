"""Keras over two real processes gives what it gives in one, killed or not."""

import json

import numpy as np
from conftest import make_strategy
from programs import keras_fit

from mirrored.testing import Run


def test_keras_over_workers_is_that_of_one_process(tmp_path):
    """Shuffled from different seeds, uneven batches, killed and resumed within an epoch."""
    one = keras_fit.train(make_strategy(2), tmp_path / "one", seed=0, killed=False)
    with Run([keras_fit.__file__, tmp_path / "two"], 2, max_restarts=1) as run:
        finished = run.finish(120).require_success()
    assert "starting all workers again" in finished.stderr
    lines = [line for line in finished.stdout.splitlines() if "FOUND" in line]
    first, second = (json.loads(line.partition("FOUND ")[2]) for line in lines)
    assert first == second
    assert first["steps"] == one["steps"] == 24
    assert len(first["predict"]) == 45
    for name, value in one["last"].items():
        np.testing.assert_allclose(first["last"][name], value, rtol=1e-5)
    for kind, logs in one["others"].items():
        for name, values in logs.items():
            np.testing.assert_allclose(
                first["others"][kind][name], values, rtol=1e-5, err_msg=f"{kind} {name}"
            )
    np.testing.assert_allclose(first["evaluate"], one["evaluate"], rtol=1e-5)
    np.testing.assert_allclose(first["predict"], one["predict"], rtol=1e-4, atol=1e-6)
