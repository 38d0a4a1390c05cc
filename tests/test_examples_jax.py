"""The examples for JAX users run, and learn."""

from __future__ import annotations

import pathlib
import runpy

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(name):
    return runpy.run_path(str(EXAMPLES / name))["main"]()


def test_nnx(capsys):
    assert run("nnx_mlp.py")["accuracy"] > 0.9


def test_equinox(capsys):
    assert run("functional_equinox.py") < 0.2


def test_reproducible(capsys):
    results = run("reproducible.py")
    assert list(results) == [1, 2, 4, 8]
    assert len(set(results.values())) == 1


def test_grain(capsys):
    assert run("grain_loader.py") < 0.01
