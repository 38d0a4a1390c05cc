"""Checkpoints as files: written whole or not at all, and never believed unchecked.

Owns the directory layout: ``step_N/arrays`` is Orbax's, ``step_N/mirrored.json`` the
manifest, which is written last and knows the checksum of every other file. What the
arrays mean is in ``_tree``.
"""

from __future__ import annotations

import functools
import json
import re
import uuid
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
import numpy as np
from etils import epath

from mirrored._errors import MissingDependencyError

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise MissingDependencyError(
        fact="mirrored.checkpoint needs Orbax, which is not installed.",
        expected="the package orbax-checkpoint.",
        hint="pip install 'mirrored[checkpoint]'",
    ) from error

_MANIFEST = "mirrored.json"
_ARRAYS = "arrays"
_FORMAT = 1
_NAME = re.compile(r"step_(\d+)$")
_PARTIAL = re.compile(r"\.partial_(\d+)_")
_CHUNK_BYTES = 1 << 24


@final
class DamagedError(Exception):
    """A directory that is not a whole checkpoint; says why."""


@final
class Storage:
    """The checkpoints of one directory."""

    def __init__(self, directory: Any) -> None:
        self.directory = epath.Path(directory)

    def steps(self) -> list[int]:
        """Lists the steps for which there is a directory, whole or not, newest first."""
        return sorted({step for step, _ in self._found(_NAME)}, reverse=True)

    def _found(self, pattern: re.Pattern[str]) -> list[tuple[int, epath.Path]]:
        if not self.directory.exists():
            return []
        matches = ((pattern.match(path.name), path) for path in self.directory.iterdir())
        return [(int(match[1]), path) for match, path in matches if match]

    def _candidates(self, wanted: int | None) -> list[tuple[int, epath.Path]]:
        """Lists what may be a whole checkpoint, newest first.

        Killed between writing the last file and giving the directory its name, a writer
        leaves a whole checkpoint under the name it was written in.
        """
        unnamed = [
            (step, path) for step, path in self._found(_PARTIAL) if (path / _MANIFEST).exists()
        ]
        named = self._found(_NAME)
        if wanted is not None:
            named = [(step, path) for step, path in named if step == wanted]
            unnamed = [(step, path) for step, path in unnamed if step == wanted]
        ranked = [(step, 1, path) for step, path in named]
        ranked += [(step, 0, path) for step, path in unnamed]
        ranked.sort(key=lambda one: one[:2], reverse=True)
        return [(step, path) for step, _, path in ranked]

    def path(self, step: int) -> epath.Path:
        """Returns where the checkpoint of ``step`` is."""
        return self.directory / f"step_{step:010d}"

    def write(self, step: int, arrays: Mapping[str, np.ndarray], content: dict[str, Any]) -> None:
        """Writes a checkpoint; it exists once its manifest does."""
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / f".partial_{step}_{uuid.uuid4().hex[:8]}"
        partial.mkdir()
        # Orbax does not store arrays without elements.
        stored = {name: array for name, array in arrays.items() if array.size}
        if stored:
            with _checkpointer() as checkpointer:
                checkpointer.save(
                    partial / _ARRAYS,
                    args=ocp.args.PyTreeSave(stored, ocdbt_target_data_file_size=None),
                )
        manifest = {
            "format": _FORMAT,
            "step": step,
            "arrays": {
                name: {"shape": list(array.shape), "dtype": str(array.dtype)}
                for name, array in arrays.items()
            },
            "content": content,
            "files": {name: _checksum(path) for name, path in _files(partial)},
        }
        body = json.dumps(manifest)
        text = json.dumps({"checksum": zlib.crc32(body.encode()), "manifest": body})
        (partial / _MANIFEST).write_text(text)
        final_path = self.path(step)
        if final_path.exists():
            # A checkpoint of the same step, damaged or from a run that was taken back.
            final_path.rmtree()
        partial.rename(final_path)

    def _read_manifest(self, path: epath.Path) -> dict[str, Any]:
        """Reads a manifest and checks every file against it.

        Raises:
          DamagedError: if anything is missing or different.
        """
        try:
            wrapped = json.loads((path / _MANIFEST).read_text())
            body = wrapped["manifest"]
            if zlib.crc32(body.encode()) != wrapped["checksum"]:
                msg = "its manifest has another checksum than when it was written"
                raise DamagedError(msg)
            manifest = json.loads(body)
        except (FileNotFoundError, NotADirectoryError) as error:
            msg = "it was never finished: it has no manifest"
            raise DamagedError(msg) from error
        except (ValueError, KeyError, TypeError) as error:
            msg = f"its manifest cannot be read ({error})"
            raise DamagedError(msg) from error
        if manifest["format"] != _FORMAT:
            msg = f"it has format {manifest['format']}, not {_FORMAT}"
            raise DamagedError(msg)
        found = dict(_files(path))
        for name, expected in manifest["files"].items():
            if name not in found:
                msg = f"its file {name} is missing"
                raise DamagedError(msg)
            if _checksum(found[name]) != expected:
                msg = f"its file {name} is not what was written"
                raise DamagedError(msg)
        return manifest

    def _read_arrays(self, path: epath.Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
        """Reads the arrays of a checkpoint whose manifest was checked."""
        described = manifest["arrays"]
        arrays = {
            name: np.zeros(one["shape"], jax.numpy.dtype(one["dtype"]))
            for name, one in described.items()
            if 0 in one["shape"]
        }
        stored = [name for name in described if name not in arrays]
        if stored:
            wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
            with _checkpointer() as checkpointer:
                read = checkpointer.restore(
                    path / _ARRAYS, args=ocp.args.PyTreeRestore(restore_args=wanted)
                )
            arrays |= {name: np.asarray(read[name]) for name in stored}
        return {name: arrays[name] for name in described}

    def read_newest(
        self, wanted: int | None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """Reads the newest whole checkpoint, or that of one step; warns of damaged ones."""
        for _, path in self._candidates(wanted):
            try:
                manifest = self._read_manifest(path)
                return manifest, self._read_arrays(path, manifest)
            except DamagedError as error:
                warnings.warn(
                    f"mirrored: the checkpoint {path} is not used: {error}; "
                    "the one before it is, if there is one.",
                    stacklevel=2,
                )
        return None

    def delete_old(self, keep: int, newest: int, *, later_too: bool) -> None:
        """Deletes what is no longer wanted once the checkpoint of ``newest`` is written.

        That is all but the newest ``keep``, what was never finished, and, if
        ``later_too``, checkpoints of later steps: they belong to a run that was taken
        back to an earlier one, and must not be restored in place of what follows it.
        """
        steps = self.steps()
        kept = [step for step in steps if step <= newest][:keep]
        if not later_too:
            kept += [step for step in steps if step > newest]
        for step in steps:
            if step not in kept:
                self.path(step).rmtree()
        for _, path in self._found(_PARTIAL):
            path.rmtree()


def _files(directory: epath.Path) -> Iterator[tuple[str, epath.Path]]:
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            yield from ((f"{path.name}/{name}", inner) for name, inner in _files(path))
        elif path.name != _MANIFEST:
            yield path.name, path


def _checksum(path: epath.Path) -> list[int]:
    size, checksum = 0, 0
    with path.open("rb") as file:
        for part in iter(functools.partial(file.read, _CHUNK_BYTES), b""):
            size += len(part)
            checksum = zlib.crc32(part, checksum)
    return [size, checksum]


def _checkpointer() -> Any:
    """Makes an Orbax checkpointer for this process alone: it waits for no other."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=own,
        active_processes={own},
        barrier_sync_key_prefix=f"mirrored-{own}-{uuid.uuid4().hex[:8]}",
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
