"""The thread behind an iterator: order, errors, buffers, and how it ends."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
from conftest import wait_until

import mirrored
from mirrored import DataError

BOTH = pytest.mark.parametrize("prefetch", [0, 1, 3])


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "mirrored-data"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Every test of this file leaves no thread behind."""
    yield
    gc.collect()
    wait_until(lambda: not threads())


def first_row(batch):
    return int(np.asarray(batch.components()[0])[0])


# --- buffers --------------------------------------------------------------------------------


def aligned(count):
    """Memory that JAX's CPU client uses without a copy, if it is given it."""
    raw = np.zeros(4 * count + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + 4 * count].view(np.float32)


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize("rows", [64, 61])
@BOTH
def test_a_source_may_use_its_buffer_again(replicas, rows, prefetch):
    strategy = mirrored.MirroredStrategy(jax.devices()[:replicas])
    buffer = aligned(rows * 16).reshape(rows, 16)

    def source():
        for number in range(6):
            buffer[:] = number
            yield buffer
        buffer[:] = -1

    batches = list(strategy.distribute_dataset(source, prefetch=prefetch))
    for number, batch in enumerate(batches):
        assert {float(value) for value in np.unique(batch.stacked)} == {float(number)}


def test_arrays_changed_after_a_batch_do_not_change_it(two):
    data = aligned(64).reshape(32, 2)
    batch = next(iter(two.distribute_dataset(data, 32, prefetch=0)))
    data += 1
    assert not np.asarray(batch.stacked).any()


# --- reading ahead --------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_as_many_batches_as_asked_are_ready(two, prefetch):
    made = []

    def source():
        for number in itertools.count():
            made.append(number)
            yield np.full(4, number)

    iterator = iter(two.distribute_dataset(source, prefetch=prefetch))
    assert made == []
    for taken in range(1, 4):
        assert first_row(next(iterator)) == taken - 1
        wait_until(lambda ready=taken + prefetch: len(made) == ready)
        time.sleep(0.02)
        assert len(made) == taken + prefetch
    iterator.close()


def test_without_prefetch_there_is_no_thread(two):
    seen = set()

    def source():
        for _ in range(3):
            seen.add(threading.current_thread())
            yield np.ones(4)

    assert len(list(two.distribute_dataset(source, prefetch=0))) == 3
    assert seen == {threading.main_thread()}


def test_the_source_runs_in_the_context_of_its_consumer(two):
    seen = []

    def source():
        seen.append(mirrored.get_strategy())
        yield np.ones(4)

    with two.scope():
        list(two.distribute_dataset(source))
    assert seen == [two]


def test_two_iterators_side_by_side(two):
    dataset = two.distribute_dataset([np.full(2, number) for number in range(4)])
    pairs = [(first_row(one), first_row(other)) for one, other in zip(dataset, dataset)]
    assert pairs == [(0, 0), (1, 1), (2, 2), (3, 3)]


# --- errors ---------------------------------------------------------------------------------


class OwnError(Exception):
    pass


@BOTH
def test_an_error_of_the_source_comes_after_the_batches_before_it(two, prefetch):
    def source():
        yield np.full(4, 0)
        yield np.full(4, 1)
        raise OwnError("disk on fire")

    iterator = iter(two.distribute_dataset(source, prefetch=prefetch))
    assert [first_row(next(iterator)) for _ in range(2)] == [0, 1]
    with pytest.raises(OwnError, match="disk on fire") as caught:
        next(iterator)
    assert "source" in [entry.name for entry in caught.traceback]
    # Not the end of the data: whoever goes on must hear that some of it is missing.
    for _ in range(2):
        with pytest.raises(DataError, match="failed before, with OwnError: disk on fire") as again:
            next(iterator)
        assert isinstance(again.value.__cause__, OwnError)


@BOTH
def test_an_error_in_a_batch_comes_in_order(two, prefetch):
    dataset = two.distribute_dataset([np.ones(4), np.array(["text"])], prefetch=prefetch)
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(DataError, match="batch 1: element is an array of <U4"):
        next(iterator)


# --- ending ---------------------------------------------------------------------------------


class Endless:
    """A source that knows how often it was closed."""

    def __init__(self):
        self.closed = 0

    def __iter__(self):
        try:
            for number in itertools.count():
                yield np.full(4, number)
        finally:
            self.closed += 1


@BOTH
def test_break_lets_go_of_the_source(two, prefetch):
    source = Endless()
    for batch in two.distribute_dataset(source, prefetch=prefetch):
        if first_row(batch) == 2:
            break
    wait_until(lambda: source.closed == 1)


@BOTH
def test_an_exception_in_the_loop_lets_go_of_the_source(two, prefetch):
    source = Endless()
    with pytest.raises(OwnError):
        for _ in two.distribute_dataset(source, prefetch=prefetch):
            raise OwnError
    wait_until(lambda: source.closed == 1)


@BOTH
def test_closing_waits_for_the_source(two, prefetch):
    source = Endless()
    iterator = iter(two.distribute_dataset(source, prefetch=prefetch))
    next(iterator)
    iterator.close()
    assert source.closed == 1
    assert not threads()
    with pytest.raises(DataError, match="was closed"):
        next(iterator)


def test_the_next_loop_waits_for_a_source_that_was_left_behind(two):
    inside = threading.Lock()
    overlaps = []

    def source():
        for number in range(50):
            overlaps.append(not inside.acquire(blocking=False))
            time.sleep(0.002)
            inside.release()
            yield np.full(4, number)

    dataset = two.distribute_dataset(source)
    for _ in range(5):
        for batch in dataset:
            assert first_row(batch) == 0
            break
    assert not any(overlaps)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_batches_taken_are_freed(two, prefetch):
    dataset = two.distribute_dataset([np.full((4, 1), n) for n in range(20)], prefetch=prefetch)
    gc.collect()
    before = len(jax.live_arrays())
    for _batch in dataset:
        # This one, the ones ahead, and the one before it that the loop has just let go of.
        assert len(jax.live_arrays()) - before <= prefetch + 2
    del _batch


@BOTH
def test_a_batch_is_not_kept_while_the_source_takes_its_time(two, prefetch):
    kept = []
    taken = threading.Event()
    gc.collect()
    before = len(jax.live_arrays())

    def source():
        yield np.ones(4)
        taken.wait(5 if prefetch else 0)
        kept.append(len(jax.live_arrays()) - before)
        yield np.ones(4)

    iterator = iter(two.distribute_dataset(source, prefetch=prefetch))
    next(iterator)
    taken.set()
    next(iterator)
    assert kept == [0]


class OwnIterator:
    """An iterator with workers of its own, as Grain's."""

    def __init__(self):
        self.closed = 0

    def __iter__(self):
        return self

    def __next__(self):
        return np.ones(4)

    def close(self):
        self.closed += 1


@BOTH
def test_an_iterator_made_for_the_loop_is_closed_and_another_is_not(two, prefetch):
    made = OwnIterator()
    own = iter(two.distribute_dataset(lambda: made, prefetch=prefetch))
    next(own)
    own.close()
    assert made.closed == 1
    given = OwnIterator()
    own = iter(two.distribute_dataset(given, prefetch=prefetch))
    next(own)
    own.close()
    assert given.closed == 0


def run_program(body, interrupt_after=None):
    """Runs a program with a source that blocks; returns its result and how long it took."""
    program = textwrap.dedent(
        """
        import threading, time
        import mirrored.testing
        mirrored.testing.use_cpu_devices(2)
        import numpy as np
        import mirrored

        strategy = mirrored.MirroredStrategy()

        def blocking():
            yield np.ones(4)
            print("blocked", flush=True)
            threading.Event().wait()

        def endless():
            while True:
                yield np.ones((64, 784), "f")
        """
    ) + textwrap.dedent(body)
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(mirrored.__path__[0])}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        if interrupt_after is not None:
            while interrupt_after not in process.stdout.readline():
                pass
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
        started = time.monotonic()
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err, time.monotonic() - started
    finally:
        process.kill()


def test_ctrl_c_is_heard_while_the_source_blocks():
    code, _, err, seconds = run_program(
        "for batch in strategy.distribute_dataset(blocking): pass", interrupt_after="blocked"
    )
    assert "KeyboardInterrupt" in err
    assert code != 0
    assert seconds < 10


def test_ctrl_c_loses_no_batch():
    code, out, err, _ = run_program(
        """
        go_on = threading.Event()

        def source():
            for number in range(3):
                yield np.full(4, number)
            print("waiting", flush=True)
            go_on.wait()
            yield np.full(4, 3)

        iterator = iter(strategy.distribute_dataset(source))
        seen = []
        while len(seen) < 4:
            try:
                seen.append(int(next(iterator).stacked[0, 0]))
            except KeyboardInterrupt:
                go_on.set()
        print(seen)
        """,
        interrupt_after="waiting",
    )
    assert (code, "[0, 1, 2, 3]" in out) == (0, True), err


@pytest.mark.parametrize("source", ["blocking", "endless"])
def test_the_interpreter_ends_with_threads_at_work(source):
    code, out, err, _ = run_program(
        f"""
        # With so much read ahead the threads are in the middle of JAX at the end.
        data = strategy.distribute_dataset({source}, prefetch=500)
        iterators = [iter(data) for _ in range(3)]
        for iterator in iterators:
            next(iterator)
        print("end")
        """
    )
    assert (code, err) == (0, "")
    assert "end" in out
