"""Checkpoint: when to save, who writes, and how a run resumes or is preempted.

Owns the agreement between workers; what is saved is in ``_tree``, how in ``_storage``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, final

import jax
import numpy as np

from mirrored import _preemption, _workers
from mirrored._cluster import PROCESS_ID
from mirrored._errors import ArgumentError, CheckpointError
from mirrored._report import RUN_DIRECTORY, write_preempted
from mirrored.checkpoint._storage import Storage
from mirrored.checkpoint._tree import Snapshot, State

# How long another worker waits for worker 0 to begin writing before it writes itself.
_TAKE_OVER_SECONDS = 10.0
_POLL_SECONDS = 0.02


@final
class Checkpoint:
    """Saves the state of a run and resumes from it.

    All workers make it with the same arguments and call it in the same way. Worker 0
    writes, in the background; if it does not (because only another worker calls
    ``save``), that one does. The directory must be one that all workers see, or at
    least worker 0 always.

    A checkpoint that was not finished, or whose files have changed since, is never
    loaded: the one before it is, with a warning that names the damaged one.

    Args:
      directory: where the checkpoints are; a path, or an address such as gs://...
      state: what to save, by name: Variables, Optimizers, distributed datasets (their
        position), arrays, random keys, ``numpy.random.Generator``s, numbers, and
        dictionaries, lists and other pytrees of them. Variables, optimizers, datasets
        and generators are restored in place; arrays and numbers are replaced in
        ``checkpoint.state``, and are to be put there before they are saved.
      every: after how many steps ``completed`` saves; 0 for never.
      keep: how many checkpoints to keep.
      preemption_code: the exit code of a run that was preempted and has saved.

    >>> import tempfile
    >>> import mirrored
    >>> import mirrored.checkpoint
    >>> directory = tempfile.mkdtemp()
    >>> weights = mirrored.Variable([1.0, 2.0], name="weights")
    >>> checkpoint = mirrored.checkpoint.Checkpoint(directory, {"weights": weights})
    >>> checkpoint.save()
    >>> _ = weights.assign([0.0, 0.0])
    >>> checkpoint.restore()
    0
    >>> weights.numpy().tolist()
    [1.0, 2.0]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        every: int = 0,
        keep: int = 3,
        preemption_code: int = 0,
    ) -> None:
        if not isinstance(state, dict):
            raise ArgumentError(
                fact=f"Checkpoint was given {state!r} ({type(state).__name__}) as its state.",
                expected="a dictionary from names to what is saved.",
                hint='write for example {"weights": [W, b], "optimizer": optimizer}.',
            )
        for name, value, least in (("every", every, 0), ("keep", keep, 1)):
            if not isinstance(value, int) or value < least:
                raise ArgumentError(
                    fact=f"Checkpoint was given {name}={value!r}.",
                    expected=f"an integer from {least}.",
                    hint="every=100 saves after each 100th step; keep=3 keeps the newest three.",
                )
        self.state = state
        self.step = 0
        self._state = State(state)
        self._storage = Storage(directory)
        self._key = f"checkpoint/{zlib.crc32(str(self._storage.directory).encode()):08x}"
        self.every = every
        self._keep = keep
        self._preemption_code = preemption_code
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._saved_step: int | None = None
        self._restored = False
        _preemption.current().listen()

    @property
    def _workers(self) -> _workers.Workers | None:
        # Asked each time: the strategy may be made after the checkpoint.
        return _workers.connected()

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._storage.directory)

    # --- saving ------------------------------------------------------------------

    def save(self, step: int | None = None) -> None:
        """Saves the state as it is now; returns before it is written.

        Args:
          step: the number of completed steps; ``self.step`` if left out.

        Raises:
          WorkerError: if the state holds ON_READ variables, whose value takes all
            workers, and some did not call it; the error names them.
        """
        if step is not None:
            self.step = step
        if self._workers is not None and self._state.needs_all_workers():
            self._workers.barrier(f"save of step {self.step}", min(60.0, self._workers.timeout))
        snapshot = self._state.take()
        self.wait()
        if self._saved_step is None and not self._restored:
            self._warn_of_later_checkpoints()
        self._saved_step = self.step
        turn = "" if self._workers is None else self._workers.turn(f"{self._key}/{self.step}")
        self._writing = threading.Thread(
            target=self._write,
            args=(self.step, turn, snapshot),
            name="mirrored-checkpoint",
        )
        self._writing.start()

    def wait(self) -> None:
        """Waits until the last save is written; raises what went wrong with it."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(
                fact=f"saving step {self._saved_step} in {self.directory} failed: {failure!r}.",
                expected="a directory that worker 0 can write to.",
                hint="see that it exists, is writable and has room.",
            ) from failure

    def _warn_of_later_checkpoints(self) -> None:
        later = [step for step in self._storage.steps() if step > self.step]
        if later:
            warnings.warn(
                f"mirrored: {self.directory} holds checkpoints of later steps ({later}) than the "
                f"step {self.step} saved now, and nothing was restored: whoever resumes goes on "
                "from those. Call restore() first, or save in another directory.",
                stacklevel=3,
            )

    def _write(self, step: int, turn: str, snapshot: Snapshot) -> None:
        try:
            if self._workers is None:
                self._write_files(step, snapshot)
            else:
                self._write_or_wait(self._workers, turn, step, snapshot)
        except Exception as failure:  # noqa: BLE001 (told to the training thread, whatever it is)
            self._failure = failure

    def _write_or_wait(
        self, workers: _workers.Workers, key: str, step: int, snapshot: Snapshot
    ) -> None:
        """Writes, or waits until the worker whose turn it is has written."""
        if not self._takes_turn(workers, key):
            said = workers.heard(f"{key}/written")
            while said is None:
                # Should the writer die, this program ends too: no need for a limit.
                time.sleep(_POLL_SECONDS)
                said = workers.heard(f"{key}/written")
            if said != "yes":
                raise OSError(said)
            return
        try:
            self._write_files(step, snapshot)
        except Exception as failure:
            workers.tell(f"{key}/written", f"worker {workers.process_id}: {failure!r}")
            raise
        workers.tell(f"{key}/written", "yes")

    def _takes_turn(self, workers: _workers.Workers, key: str) -> bool:
        """Says whether this worker writes: worker 0, unless it does not come."""
        if workers.process_id == 0:
            taken = workers.claim(key)
        else:
            began = time.monotonic()
            patience = min(_TAKE_OVER_SECONDS, workers.timeout / 2)
            while time.monotonic() - began < patience:
                if workers.heard(f"{key}/taken") is not None:
                    return False
                time.sleep(_POLL_SECONDS)
            taken = workers.claim(key)
        if taken:
            workers.tell(f"{key}/taken", str(workers.process_id))
        return taken

    def _write_files(self, step: int, snapshot: Snapshot) -> None:
        self._storage.write(step, snapshot.to_host(), snapshot.content())
        self._storage.delete_old(self._keep, step, later_too=self._restored)

    # --- restoring ---------------------------------------------------------------

    def restore(self, step: int | None = None) -> int:
        """Restores the newest whole checkpoint, on all workers.

        Worker 0 reads it and sends it to the others, so that all have the same.

        Args:
          step: which step to restore; the newest if left out.

        Returns:
          The number of completed steps; 0 if there is no checkpoint yet.

        Raises:
          CheckpointError: if the checkpoint does not fit the state, or there is none of
            ``step``.
        """
        self.wait()
        self._restored = True
        if self._workers is not None:
            self._workers.barrier("restore of a checkpoint")
        read = None
        if self._workers is None or self._workers.process_id == 0:
            read = self._storage.read_newest(step)
        manifest, arrays = self._shared(read)
        if manifest is None:
            if step is not None:
                raise CheckpointError(
                    fact=f"there is no whole checkpoint of step {step} in {self.directory}.",
                    expected=f"one of the steps {self._storage.steps()}.",
                    hint="leave the step out to restore the newest.",
                )
            return self.step
        self.step = self._saved_step = manifest["step"]
        self._state.put(arrays, manifest["content"], f"the checkpoint of step {self.step}")
        # The position is where the next loop over the data starts.
        _workers.completed(self.step)
        return self.step

    def _shared(self, read: Any) -> tuple[dict[str, Any] | None, dict[str, np.ndarray]]:
        """Gives every worker what worker 0 has read."""
        workers = self._workers
        if workers is None:
            return (None, {}) if read is None else read
        key = f"{workers.turn(f'{self._key}/restore')}/manifest"
        if workers.process_id == 0:
            workers.tell(key, json.dumps(None if read is None else read[0]))
        manifest = json.loads(workers.hear(key, 0))
        if manifest is None:
            return None, {}
        arrays = {}
        for name, described in manifest["arrays"].items():
            if read is not None:
                own = read[1][name]
            else:
                own = np.zeros(described["shape"], jax.numpy.dtype(described["dtype"]))
            arrays[name] = workers.broadcast(own, f"the saved {name!r}")
        return manifest, arrays

    # --- training ----------------------------------------------------------------

    def completed(self, step: int | None = None, *, save: bool = False) -> None:
        """Notes a completed step: saves when it is due, and when the run is preempted.

        Call it on all workers after each step. After SIGTERM on any worker all of them
        save at one common step and end the program with ``preemption_code``.

        Args:
          step: the number of completed steps; one more than before if left out.
          save: whether to save in any case.
        """
        before = self.step
        self.step = self.step + 1 if step is None else step
        _workers.completed(self.step)
        if save or (self.every and self.step // self.every > before // self.every):
            self.save()
        if _preemption.current().reached():
            self._leave()

    def batches(self, dataset: Any, epochs: int = 1) -> Iterator[Any]:
        """Yields the batches of a distributed dataset that are still to be trained on.

        Restores the newest checkpoint first, if that was not done, and goes on within
        the epoch where it was saved. Each time the loop comes back for the next batch, the
        step before counts as completed.

        >>> import tempfile
        >>> import numpy as np
        >>> import mirrored
        >>> import mirrored.checkpoint
        >>> strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> total = mirrored.Variable(0)
        >>> checkpoint = mirrored.checkpoint.Checkpoint(tempfile.mkdtemp(), {"total": total})
        >>> dataset = strategy.distribute_dataset(np.arange(8), batch_size=4)
        >>> for batch in checkpoint.batches(dataset, epochs=2):
        ...     _ = total.assign_add(1)
        >>> checkpoint.step, int(total)
        (4, 4)
        """
        known = self.state.setdefault("data", dataset)
        if known is not dataset:
            raise ArgumentError(
                fact=f'batches was given {dataset!r}, and state["data"] is {known!r}.',
                expected="one dataset whose position is saved.",
                hint='leave "data" out of the state: batches adds it.',
            )
        if not self._restored:
            self.restore()
        while dataset.get_state()["epoch"] < epochs:
            for batch in dataset:
                yield batch
                self.completed()

    # --- preemption --------------------------------------------------------------

    def _leave(self) -> None:
        if self._saved_step != self.step:
            self.save()
        self.wait()
        sys.stderr.write(f"mirrored: preempted; saved after step {self.step}.\n")
        directory = os.environ.get(RUN_DIRECTORY)
        if directory:
            write_preempted(directory, int(os.environ.get(PROCESS_ID, "0")), self.step)
        # Not by sys.exit, with which a worker says that it has failed (see _failure).
        raise SystemExit(self._preemption_code)
