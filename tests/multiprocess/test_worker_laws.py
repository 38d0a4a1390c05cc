"""Two real processes give what one gives: reductions, variables, training, uneven batches."""

import json
import pathlib

import numpy as np
import pytest

from mirrored.testing import Run

PROGRAM = pathlib.Path(__file__).parent / "programs" / "laws.py"


def found(workers, cpu_devices):
    with Run([PROGRAM], workers, cpu_devices=cpu_devices) as run:
        output = run.finish(90).require_success().stdout
    lines = sorted(line for line in output.splitlines() if "FOUND" in line)
    return [json.loads(line.partition("FOUND ")[2]) for line in lines]


@pytest.fixture(scope="module")
def two_workers():
    return found(2, 1)


@pytest.fixture(scope="module")
def two_by_two():
    return found(2, 2)


@pytest.mark.conformance(48)
def test_host_values_and_initial_values(two_workers):
    drawn = np.random.default_rng(0).normal(size=(4, 3)).astype("f4").tolist()
    for worker in two_workers:
        assert worker["sum"] == 2.0
        assert worker["mean"] == 0.5
        assert worker["initial"] == drawn
        # Worker 0's -0.0, to the bit; it is too large to travel with the message.
        assert worker["large"] == [True, 0.0]
        assert worker["count"] == 1.0
        assert worker["assigned"] == np.ones((4, 3)).tolist()


@pytest.mark.conformance(40)
def test_each_worker_gets_its_rows(two_workers):
    assert [worker["rows"] for worker in two_workers] == [
        [[[0, 1, 2, 3]], [[8, 9, 10]]],
        [[[4, 5, 6, 7]], [[11, 12, 13]]],
    ]


def test_training_is_that_of_one_process(two_workers, two_by_two):
    one = found(1, 2)[0]
    for worker in two_workers:
        for name in ("losses", "means", "final"):
            np.testing.assert_allclose(worker[name], one[name], rtol=2e-6)
        for name in ("steps", "ids", "random", "gathered", "uneven"):
            assert worker[name] == one[name], name
    four = found(1, 4)[0]
    for worker in two_by_two:
        for name in ("losses", "means", "final"):
            np.testing.assert_allclose(worker[name], four[name], rtol=2e-6)
        for name in ("steps", "ids", "random", "gathered", "uneven"):
            assert worker[name] == four[name], name


def test_workers_do_not_differ(two_workers, two_by_two):
    for pair in (two_workers, two_by_two):
        first, second = ({**worker, "local": 0, "rows": 0} for worker in pair)
        assert first == second
    assert [worker["local"] for worker in two_by_two] == [[0, 1], [2, 3]]


def test_one_collective_a_step(two_workers):
    assert two_workers[0]["collectives"] == 1
