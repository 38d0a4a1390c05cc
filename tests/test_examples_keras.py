"""The Keras example says what it does, and it is true."""

from __future__ import annotations

import pathlib
import sys

import mirrored

EXAMPLES = str(pathlib.Path(__file__).parent.parent / "examples")


def test_the_demo_compares_all_devices_with_one(capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    demo = __import__("demo")
    assert demo.main() < 1e-4
    printed = capsys.readouterr().out
    assert f"Number of devices: {mirrored.MirroredStrategy().num_replicas_in_sync}" in printed
    assert printed.splitlines()[-1].startswith("8 devices and 1 device end with the same weights")
    del sys.modules["demo"]
