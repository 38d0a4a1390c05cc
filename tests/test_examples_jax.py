"""The examples for JAX users run, and learn."""

from __future__ import annotations

import pathlib
import re
import runpy

import numpy as np

from mirrored.testing import Run

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(name, *arguments, **options):
    return runpy.run_path(str(EXAMPLES / name))["main"](*arguments, **options)


def test_custom_loop(capsys):
    assert run("custom_loop.py", epochs=3) > 0.8
    assert "Number of devices: 8" in capsys.readouterr().out


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


def test_checkpoint_and_resume(tmp_path, capsys):
    whole = run("checkpoint_resume.py", tmp_path / "whole", epochs=2)
    run("checkpoint_resume.py", tmp_path / "parts", epochs=2, stop_after=33)
    resumed = run("checkpoint_resume.py", tmp_path / "parts", epochs=2)
    # 1,797 images in batches of 64 are 29 steps: it stopped in the second epoch.
    assert "interrupted after step 33" in capsys.readouterr().out
    np.testing.assert_array_equal(resumed, whole)


def test_several_workers(tmp_path):
    """As the README starts it; the last line is that of worker 0."""
    program = [str(EXAMPLES / "several_workers.py"), str(tmp_path)]
    with Run(program, workers=2) as started:
        finished = started.finish(120)
    finished.require_success()
    # 2,000 rows in batches of 64 are 32 steps an epoch.
    ended = re.findall(r"worker (\d) ended after step (\d+)", finished.stdout)
    assert sorted(ended) == [("0", "160"), ("1", "160")]


def pairs():
    return [
        (before, before.with_name(f"{before.stem.removesuffix('_tf')}{after}.py"))
        for before in sorted(EXAMPLES.glob("*_tf.py"))
        for after in ("", "_mirrored")
        if before.with_name(f"{before.stem.removesuffix('_tf')}{after}.py").exists()
    ]


def test_before_and_after_have_the_same_shape():
    """TensorFlow is not installed here; that both are read side by side can be checked."""
    assert len(pairs()) >= 2
    for before, after in pairs():
        texts = [path.read_text() for path in (before, after)]
        compile(texts[0], str(before), "exec")
        strategies = [set(re.findall(r"\.(\w+Strategy)\(", text)) for text in texts]
        assert strategies[0] & strategies[1], before
        assert all("strategy.scope()" in text for text in texts), before
