"""Training that is not in lockstep learns as much as training that is."""

from __future__ import annotations

import pathlib
import runpy

import pytest

import mirrored

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(str(EXAMPLES / "parameter_server.py"))["main"]


def test_digits_are_read_as_well_out_of_step(main, capsys):
    """An MLP, seeded: within one point of the synchronous accuracy, in as many gradients."""
    synchronous = main("sync")
    assert synchronous > 0.85
    for staleness in ("async", mirrored.bounded(4)):
        assert main(staleness) > synchronous - 0.01
    assert "images are read correctly" in capsys.readouterr().out
