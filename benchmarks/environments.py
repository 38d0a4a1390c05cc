"""What the benchmarks need beside this repository: an environment for each peer, and the images.

Owns the folder ``.bench``. An environment is made once from its pins in ``requirements/`` and made
anew when those change; one that cannot be made leaves its peer out, and says why.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FOLDER = HERE.parent / ".bench"
PEERS = ("tensorflow", "torch")
# Seconds that an installation may take.
PATIENCE = 1200
IMAGES_PACKAGE = "dataset-fashion-mnist"


class UnavailableError(RuntimeError):
    """Something that a benchmark needs cannot be had on this machine."""


def _run(command: list[str], what: str, **more: object) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False, **more
        )
    except OSError as error:
        raise UnavailableError(f"{what} failed: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{what} did not end within {PATIENCE} s") from error
    if done.returncode:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise UnavailableError(f"{what} failed with {done.returncode}:\n{last}")


def python_of(peer: str, given: str | None = None) -> str:
    """The Python of a peer: the given one, else $BENCH_PEER_PYTHON, else one made here."""
    variable = f"BENCH_{peer.upper()}_PYTHON"
    given = given or os.environ.get(variable)
    if given:
        _run([given, "-c", f"import {peer}"], f"importing {peer} with {given}")
        return given
    pins = HERE / "requirements" / f"{peer}.txt"
    wanted = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
    folder = FOLDER / peer
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and ready.read_text() == wanted and python.exists():
        return str(python)
    print(f"making .bench/{peer} from benchmarks/requirements/{peer}.txt (minutes)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], f"making {folder}")
    # This environment's pip installs into the other: not every Python brings one along.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    _run([*pip, "install", "--quiet", "--no-input", "-r", str(pins)], f"installing {peer}")
    ready.write_text(wanted)
    return str(python)


def fashion_folder(given: str | None = None) -> str:
    """The folder of Fashion-MNIST: given, installed, or out of Debian's package."""
    installed, own = pathlib.Path("/usr/share/datasets/fashion-mnist"), FOLDER / "fashion-mnist"
    for folder in [pathlib.Path(given)] if given else [installed, own]:
        if (folder / "train-images-idx3-ubyte.gz").exists():
            return str(folder)
    if given:
        raise UnavailableError(f"{given} has no train-images-idx3-ubyte.gz")
    print(f"taking {IMAGES_PACKAGE} out of Debian's archive into .bench/fashion-mnist", flush=True)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as place:
        # Neither needs to be root, and nothing is installed.
        try:
            _run(["apt-get", "download", IMAGES_PACKAGE], "downloading it", cwd=place)
            (package,) = pathlib.Path(place).glob("*.deb")
            _run(["dpkg-deb", "-x", str(package), place], "unpacking it")
        except (UnavailableError, ValueError) as error:
            raise UnavailableError(
                f"Fashion-MNIST is not here, and {error}\n"
                f"hint: apt install {IMAGES_PACKAGE}, or name its folder with --fashion."
            ) from error
        shutil.move(f"{place}{installed}", own)
    return str(own)
