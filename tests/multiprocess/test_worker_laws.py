"""Real processes give what one gives: reductions, variables, training, uneven batches, input."""

import json
import os
import re

import numpy as np
import pytest
from conftest import make_strategy
from programs import laws, state

from mirrored.testing import Run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where one process with two replicas has saved, and where the workers save."""
    root = tmp_path_factory.mktemp("state")
    state.save_one_epoch(make_strategy(2), root / "one")
    return root


def found(workers, cpu_devices, *arguments):
    with Run([laws.__file__, *arguments], workers, cpu_devices=cpu_devices) as run:
        output = run.finish(90).require_success().stdout
    lines = sorted(line for line in output.splitlines() if "FOUND" in line)
    return [json.loads(line.partition("FOUND ")[2]) for line in lines]


@pytest.fixture(scope="module")
def three_workers(saved):
    return found(3, 1, saved / "three", saved / "one")


@pytest.fixture(scope="module")
def two_by_two(saved):
    return found(2, 2, saved / "two-by-two", saved / "one", "initialize")


@pytest.mark.conformance(48)
def test_host_values_and_initial_values(three_workers, two_by_two):
    drawn = np.random.default_rng(0).normal(size=(4, 3)).astype("f4").tolist()
    for workers, mean in ((three_workers, 1.0), (two_by_two, 0.5)):
        for worker in workers:
            assert worker["sum"] == len(workers)
            assert worker["mean"] == mean
            assert worker["initial"] == drawn
            # Worker 0's -0.0, to the bit; it is too large to travel with the message.
            assert worker["large"] == [True, 0.0]
            assert worker["count"] == 1.0
            assert worker["assigned"] == np.ones((4, 3)).tolist()


@pytest.mark.conformance(40)
def test_each_worker_gets_its_rows(three_workers, two_by_two):
    for kind in ("rows", "batches"):
        assert [worker[kind] for worker in two_by_two] == [
            [[[0, 1], [2, 3]], [[8, 9], [10, 11]]],
            [[[4, 5], [6, 7]], [[12, 13], []]],
        ]
        assert [worker[kind] for worker in three_workers] == [
            [[[0, 1, 2]], [[8, 9]]],
            [[[3, 4, 5]], [[10, 11]]],
            [[[6, 7]], [[12, 13]]],
        ]
    assert [worker["pieces"] for worker in two_by_two] == [
        [[[0, 0], [1]], [[2, 2], []]],
        [[[10, 10], [11]], [[12, 12], []]],
    ]
    assert [worker["pieces"] for worker in three_workers] == [
        [[[first, first]], [[first + 1]], [[first + 2, first + 2]]] for first in (0, 10, 20)
    ]


def test_who_reads_what_is_said(three_workers, two_by_two):
    for workers, rows in (
        (three_workers, [["0 to 2"], ["3 to 5"], ["6 to 7"]]),
        (two_by_two, [["0 to 1", "2 to 3"], ["4 to 5", "6 to 7"]]),
    ):
        for own, worker in enumerate(workers):
            lines = [line for line in worker["explained"][1:]]
            expected = []
            for number, parts in enumerate(rows):
                who = f"process {number}" + (" (this one)" if number == own else "")
                expected.append(f"{who} reads every batch and keeps")
                expected += [f"rows {part} of 8" for part in parts]
            assert [line.rpartition(": ")[2] for line in lines] == expected
            said = worker["explained pieces"][1:]
            heads = [line for line in said if line.startswith("process")]
            assert heads == [
                line.replace("every batch and keeps", "its own pipeline, batch by batch for")
                for line in expected
                if line.startswith("process")
            ]
            assert len(said) - len(heads) == sum(map(len, rows))


def test_workers_that_read_different_data_are_told(three_workers, two_by_two):
    for workers in (three_workers, two_by_two):
        assert ["worker 1 than on worker 0" in worker["refused"] for worker in workers] == [
            number == 1 for number in range(len(workers))
        ]


def test_training_is_that_of_one_process(three_workers, two_by_two):
    for workers, replicas in ((three_workers, 3), (two_by_two, 4)):
        one = laws.find(make_strategy(replicas))
        for worker in workers:
            for name in ("losses", "means", "final"):
                np.testing.assert_allclose(worker[name], one[name], rtol=2e-6)
            for name in ("steps", "ids", "random", "gathered", "uneven"):
                assert worker[name] == one[name], name


@pytest.mark.conformance(33)
def test_state_in_shards_goes_to_other_numbers_of_workers_and_back(
    three_workers, two_by_two, saved
):
    """Batches whose last one leaves most replicas without a row, over 1, 2, 3 and 4 replicas."""
    expected = state.go_on(make_strategy(1), saved / "one")
    assert expected["step"] == 3
    assert expected["steps"] == pytest.approx(6.0, rel=1e-6)
    first = state.save_one_epoch(make_strategy(1), saved / "again")
    for workers, name in ((three_workers, "three"), (two_by_two, "two-by-two")):
        for worker in workers:
            np.testing.assert_allclose(worker["state"]["first"], first, rtol=2e-6)
            assert worker["state"]["on"]["step"] == 3
        # What they saved is what one process with two replicas goes on from.
        for on in (
            *(w["state"]["on"] for w in workers),
            state.go_on(make_strategy(2), saved / name),
        ):
            for part in ("losses", "weights", "steps"):
                np.testing.assert_allclose(on[part], expected[part], rtol=5e-6, err_msg=part)


def test_nnx_is_that_of_one_device(three_workers, two_by_two):
    one = state.train_nnx(make_strategy(1))
    for worker in (*three_workers, *two_by_two):
        for part in ("losses", "mean"):
            np.testing.assert_allclose(worker["state"]["nnx"][part], one[part], rtol=2e-5)


def test_workers_do_not_differ(three_workers, two_by_two):
    own = ("refused", "local", "rows", "batches", "pieces", "explained", "explained pieces")
    for workers in (three_workers, two_by_two):
        first, *others = ({**worker, **dict.fromkeys(own)} for worker in workers)
        for other in others:
            assert other == first
    assert [worker["local"] for worker in two_by_two] == [[0, 1], [2, 3]]


def test_one_collective_a_step(three_workers):
    """Gloo is given its arrays one by one: the gradients of all variables are one of them."""
    (collective,) = three_workers[0]["collectives"]
    result = collective.partition(" all-reduce(")[0].partition(" = ")[2]
    # 4 x 3 weights and 3 biases; beside them the loss.
    assert sorted(re.findall(r"f32\[\d*\]", result)) == ["f32[15]", "f32[]"]


def test_workers_share_the_processors(three_workers, two_by_two):
    """Each with all of them, they would take the time of each other by spinning."""
    cores = len(os.sched_getaffinity(0))
    assert {worker["threads"] for worker in three_workers} == {str(max(cores // 3, 1))}
    # Two devices in a process wait for each other: two threads each.
    assert {worker["threads"] for worker in two_by_two} == {str(max(cores, 4))}
