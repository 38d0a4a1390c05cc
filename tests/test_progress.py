"""Progress of custom loops: it tells the truth, costs nothing, and never gets in the way."""

from __future__ import annotations

import builtins
import os
import pty
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored
from mirrored import _progress


@pytest.fixture
def quick(monkeypatch):
    """A line after every item, so that tests need not wait."""
    monkeypatch.setattr(_progress._Lines, "seconds", 0.0)


def lines_of(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_items_pass_unchanged_and_are_counted(quick, capsys):
    assert list(mirrored.progress("abc", "letters")) == ["a", "b", "c"]
    lines = lines_of(capsys)
    assert [re.match(r"letters: (\d/3), .*", line)[1] for line in lines] == [
        "1/3",
        "2/3",
        "3/3",
        "3/3",
    ]
    assert "left" in lines[0]
    assert "taken" in lines[-1]


def test_without_a_terminal_the_end_is_always_told(capsys):
    assert list(mirrored.progress(number for number in range(3))) == [0, 1, 2]
    (line,) = lines_of(capsys)
    assert re.fullmatch(r"3, \d+\.\d/s, 0\.\d s taken", line)


def test_a_distributed_dataset(two, capsys):
    batches = mirrored.progress(two.distribute_dataset(np.arange(10.0), 4), "epoch 1")
    assert len(batches) == 3
    for batch in batches:
        batches.report(mean=two.reduce("mean", batch, axis=0), batch=batch)
    (line,) = lines_of(capsys)
    assert line.startswith("epoch 1: 3/3, ")
    assert line.endswith(", mean=8.5, batch=8 | 9")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (np.float32(2.0), "2"),
        (7, "7"),
        (jnp.asarray(0.25), "0.25"),
        (jnp.ones((2, 3)), "float32[2, 3]"),
        ("warm-up", "warm-up"),
        (mirrored.PerReplica([1.0, 2.5]), "1 | 2.5"),
    ],
)
def test_values_as_they_are_written(value, text, capsys):
    steps = mirrored.progress(range(1))
    for _ in steps:
        steps.report(value=value)
    assert lines_of(capsys)[0].endswith(f", value={text}")


def test_variables_and_values_that_keep_their_last(two, capsys):
    with two.scope():
        variable = mirrored.Variable(3.5)
    steps = mirrored.progress(range(3))
    for step in steps:
        steps.report(weight=variable)
        if step == 1:
            steps.report(accuracy=0.5)
    assert lines_of(capsys)[0].endswith(", weight=3.5, accuracy=0.5")


def test_reporting_does_not_wait_for_the_device(quick, monkeypatch, capsys):
    read = []
    monkeypatch.setattr(_progress, "_is_ready", lambda value: False)
    monkeypatch.setattr(_progress, "_written", lambda value: read.append(value) or "3")
    steps = mirrored.progress(range(4))
    for _ in steps:
        assert read == []
        steps.report(loss=jnp.ones(()))
    lines = lines_of(capsys)
    assert "loss" not in lines[-2]
    # After the last step there is nothing to hold up.
    assert lines[-1].endswith("loss=3")


def test_a_loop_that_runs_ahead_still_shows_values():
    class Later:
        def __init__(self):
            self.ready = False

    values = _progress._Values()
    first, second = Later(), Later()
    readiness = pytest.MonkeyPatch()
    readiness.setattr(_progress, "_is_ready", lambda value: value.ready)
    readiness.setattr(_progress, "_written", lambda value: "first" if value is first else "second")
    try:
        values.add({"loss": first})
        assert values.text() == ""
        values.add({"loss": second})
        first.ready = True
        assert values.text() == "loss=first"
        assert values.text() == "loss=first"
        second.ready = True
        assert values.text() == "loss=second"
    finally:
        readiness.undo()


def test_donated_values_and_guards_do_no_harm(quick, capsys):
    steps = mirrored.progress(range(2))
    with jax.transfer_guard("disallow"):
        for _ in steps:
            gone = jax.device_put(1.0)
            gone.delete()
            steps.report(gone=gone, step=jax.device_put(np.float32(2.0)))
    assert lines_of(capsys)[-1].endswith("gone=?, step=2")


def test_errors_of_the_source_and_of_the_loop_pass(quick, capsys):
    def source():
        yield 1
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        list(mirrored.progress(source()))
    with pytest.raises(ZeroDivisionError):
        for number in mirrored.progress(range(5), "loop"):
            _ = 1 // (2 - number)
    assert re.match(r"loop: stopped at 2/5, ", lines_of(capsys)[-1])


def test_leaving_the_loop_lets_go_of_the_source():
    closed = []

    def source():
        try:
            yield from range(5)
        finally:
            closed.append(True)

    for _ in mirrored.progress(source()):
        break
    assert closed == [True]


def test_a_broken_display_does_not_end_the_loop(quick, monkeypatch):
    class Closed:
        def write(self, text):
            raise OSError("terminal is gone")

        def isatty(self):
            return False

    monkeypatch.setattr(sys, "stderr", Closed())
    assert list(mirrored.progress(range(3))) == [0, 1, 2]


def test_without_rich(monkeypatch, capsys):
    original = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(mirrored.progress(range(2))) == [0, 1]
    assert len(lines_of(capsys)) == 1


def test_arguments():
    with pytest.raises(TypeError, match=r"progress was given 3 .int.*\n.*\nhint: .*range"):
        mirrored.progress(3)
    with pytest.raises(ValueError, match="total=-1"):
        mirrored.progress([], total=-1)
    unknown = mirrored.progress(number for number in ())
    assert unknown
    with pytest.raises(TypeError, match="not known"):
        len(unknown)
    assert len(mirrored.progress(iter([]), total=4)) == 4


def on_a_terminal(body):
    """Runs a program on a pseudo-terminal; returns its result and what it wrote there."""
    program = "import time, mirrored\n" + textwrap.dedent(body)
    controller, terminal = pty.openpty()
    environment = {
        **os.environ,
        "PYTHONPATH": os.path.dirname(mirrored.__path__[0]),
        "TERM": "xterm",
        "COLUMNS": "100",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
    )
    os.close(terminal)
    written = b""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:
            break
        if not chunk:
            break
        written += chunk
    os.close(controller)
    return process.wait(30), written.decode()


def test_a_bar_on_a_terminal():
    code, text = on_a_terminal(
        """
        steps = mirrored.progress(range(20), "epoch [1]")
        for step in steps:
            time.sleep(0.03)
            steps.report(loss=1 / (step + 1))
            if step == 10:
                print("a line of the loop")
        print("after")
        """
    )
    assert code == 0
    assert "epoch [1]" in text
    assert "20/20" in text
    assert "loss=0.05" in text
    assert "a line of the loop" in text
    # The cursor was hidden and is shown again.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize(
    "ending", ["raise KeyError('left')", "break", "raise KeyboardInterrupt", "raise SystemExit(3)"]
)
@pytest.mark.parametrize("held", [False, True])
def test_the_terminal_is_restored_however_the_loop_ends(ending, held):
    code, text = on_a_terminal(
        f"""
        steps = mirrored.progress(range(20))
        for step in {"(held := iter(steps))" if held else "steps"}:
            {ending}
        """
    )
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert (code == 0) == (ending == "break")
    assert ("KeyError" in text) == ("KeyError" in ending)


def test_the_rate_leaves_out_what_came_before_the_first_look():
    """The first items took the compilation with them."""
    tally = _progress._Tally("epoch 1", 10)
    tally.count = 2
    tally.rate(100.0)
    tally.count = 8
    assert tally.rate(103.0) == 2.0
    assert tally.pace(103.0) == "2.0/s, 1.0 s left"
