"""A run that was killed, stopped or preempted ends with the bits of one that was not."""

import signal

import pytest
import survival

from mirrored.testing import Fault


@pytest.mark.conformance(49)
def test_bit_for_bit(tmp_path):
    """One run, interrupted in every way; each attempt goes on from the one before."""
    expected = survival.uninterrupted(tmp_path / "whole", 2)
    faults = [
        Fault(10, 1, signal.SIGKILL),
        Fault(20, 0, signal.SIGTERM),
        Fault(30, 1, signal.SIGSTOP),
        Fault(40, 0, signal.SIGKILL),
    ]
    found, finished = survival.interrupted(tmp_path / "run", 2, faults)
    assert found == expected
    said = finished.stderr
    assert said.count("starting all workers again") == 4
    assert said.count("was killed by SIGKILL") >= 2
    assert "the run was preempted and saved after step" in said
    assert "was stopped (SIGSTOP)" in said
