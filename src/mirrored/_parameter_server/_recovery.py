"""Checkpoints of all servers at one moment.

Owns the folder: one file a server, then a manifest, then the folder's own name, so that a
checkpoint exists whole or not at all. That no update is under way while it is written
is seen to by ``_coordinator``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, final

from mirrored._errors import CheckpointError
from mirrored._parameter_server._channel import Fields
from mirrored._parameter_server._deployment import Deployment

_MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint_(\d+)$")
_FORMAT = 1


@final
class Checkpoints:
    """The checkpoints in one directory.

    Args:
      directory: a folder that the coordinator and all servers see; a temporary one, on
        this machine, if None.
      keep: how many to keep.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, keep: int = 2) -> None:
        if directory is None:
            directory = tempfile.mkdtemp(prefix="mirrored-servers-")
            # Removed with the object, or when the program ends.
            weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        self.directory = os.path.abspath(os.fspath(directory))
        self._keep = keep

    def save(self, deployment: Deployment, content: Mapping[str, Any]) -> str:
        """Saves what is on the servers; returns the folder."""
        os.makedirs(self.directory, exist_ok=True)
        numbers = self._numbers()
        number = numbers[-1] + 1 if numbers else 0
        partial = os.path.join(self.directory, f".partial_{number}_{uuid.uuid4().hex[:8]}")
        os.makedirs(partial)
        try:
            deployment.settle_rounds()
            servers = [
                deployment.engine.control(server, "save", partial)
                for server in range(deployment.server_count)
            ]
            manifest = {"format": _FORMAT, **content, "servers": servers}
            with open(os.path.join(partial, _MANIFEST), "w", encoding="utf-8") as file:
                json.dump(manifest, file)
                file.flush()
                os.fsync(file.fileno())
            final_path = self._path(number)
            os.rename(partial, final_path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        deployment.unsaved = False
        for old in numbers[: max(0, len(numbers) + 1 - self._keep)]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        return final_path

    def latest(self) -> tuple[str, Fields] | None:
        """The newest checkpoint and its manifest, or None."""
        numbers = self._numbers()
        if not numbers:
            return None
        path = self._path(numbers[-1])
        return path, read_manifest(path)

    def _numbers(self) -> list[int]:
        if not os.path.isdir(self.directory):
            return []
        matches = (_NAME.match(name) for name in os.listdir(self.directory))
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, number: int) -> str:
        return os.path.join(self.directory, f"checkpoint_{number:08d}")


def read_manifest(path: str) -> Fields:
    """Reads and checks what a checkpoint says of itself."""
    try:
        with open(os.path.join(path, _MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
        if manifest["format"] == _FORMAT:
            return manifest
        problem = f"it has format {manifest['format']}, not {_FORMAT}"
    except (OSError, ValueError, KeyError) as error:
        problem = f"its manifest cannot be read ({error})"
    raise CheckpointError(
        fact=f"{path} is not a checkpoint of parameter servers: {problem}.",
        expected="a folder that ClusterCoordinator.save wrote.",
        hint="use the checkpoint before it.",
    )
