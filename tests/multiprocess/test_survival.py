"""A run that was killed, stopped or preempted ends with the bits of one that was not."""

import signal

import pytest
import survival

from mirrored.testing import Fault


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return survival.uninterrupted(tmp_path_factory.mktemp("whole") / "run", 2)


@pytest.mark.conformance(49)
@pytest.mark.parametrize(
    "faults",
    [
        [Fault(16, 1, signal.SIGKILL), Fault(30, 0, signal.SIGTERM)],
        [Fault(25, 0, signal.SIGKILL)],
        [Fault(12, 1, signal.SIGSTOP)],
    ],
    ids=["killed and preempted", "worker 0 killed", "stopped"],
)
def test_bit_for_bit(tmp_path, expected, faults):
    found, finished = survival.interrupted(tmp_path / "run", 2, faults)
    assert found == expected
    assert "starting all workers again" in finished.stderr
