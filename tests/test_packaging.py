"""What is published installs in an empty environment, and works there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile

import mirrored

ROOT = pathlib.Path(__file__).parent.parent

SMOKE = """
import importlib.metadata, pathlib, sys
import mirrored, mirrored.testing
assert sys.prefix in mirrored.__file__, mirrored.__file__
assert importlib.metadata.version("mirrored") == mirrored.__version__
assert (pathlib.Path(mirrored.__file__).parent / "py.typed").exists()
mirrored.testing.use_cpu_devices(2)
import jax.numpy as jnp, optax
strategy = mirrored.MirroredStrategy()
with strategy.scope():
    w = mirrored.Variable(1.0, name="w")
    optimizer = mirrored.Optimizer(optax.sgd(0.01))
def replica_step(x):
    loss, gradient = mirrored.value_and_grad(lambda: mirrored.mean((w * x) ** 2), w)
    optimizer.apply_gradients([(gradient, w)])
step = mirrored.function(lambda x: strategy.run(replica_step, args=(x,)))
for batch in strategy.distribute_dataset(jnp.arange(1.0, 8.0), batch_size=4):
    step(batch)
print(f"{float(w):.5f}")
"""


def run(*command, **options):
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def test_wheel_and_sdist(tmp_path):
    build = (sys.executable, "-m", "hatchling", "build", "-d")
    run(*build, str(tmp_path), "-t", "sdist", "-t", "wheel", cwd=ROOT)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")

    # All modules and nothing else; from the sdist the same.
    modules = {f"mirrored/{path.relative_to(ROOT / 'src/mirrored')}" for path in sources()}
    packed = {name for name in names(wheel) if ".dist-info/" not in name}
    assert packed == modules
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    run(*build, str(tmp_path / "again"), "-t", "wheel", cwd=unpacked)
    assert names(*(tmp_path / "again").glob("*.whl")) == names(wheel)

    # Empty but for what the wheel asks for, which comes from here: nothing is downloaded.
    venv.create(tmp_path / "empty", with_pip=False)
    python = str(tmp_path / "empty/bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
        "--quiet", "--disable-pip-version-check", str(wheel))  # fmt: skip
    (site,) = (tmp_path / "empty").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    bare.pop("XLA_FLAGS", None)
    assert run(python, "-c", SMOKE, cwd=tmp_path, env=bare) == "0.22667\n"
    assert "doctor" in run(str(tmp_path / "empty/bin/mirrored"), "--help", cwd=tmp_path, env=bare)


def sources():
    return [
        path
        for path in (ROOT / "src/mirrored").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == mirrored.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {mirrored.__version__}" in changelog
    assert "EffVer" in changelog
    assert "Semantic" not in changelog
