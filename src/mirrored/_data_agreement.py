"""Whether all workers read the same batches, as they must where each keeps its own rows.

Owns comparing a sample of the first batch of each reading. Different batches (files that
differ, a shuffle with a seed of its own on each worker) would be trained on without a
word: some examples twice, others never.
"""

from __future__ import annotations

import json
import zlib
from typing import final

from mirrored import _workers
from mirrored._data_batches import HostBatch
from mirrored._errors import DataError

# Nobody waits for the comparison: it is made when one of these batches is read.
_LATER_BATCHES = 8


@final
class Agreement:
    """Compares what the workers read from one data set.

    Args:
      workers: those who read it.
      description: the source, for messages; another one on another worker is not compared.
    """

    def __init__(self, workers: _workers.Workers, description: str) -> None:
        self._workers = workers
        self._description = description
        key = zlib.crc32(description.encode())
        self._key = workers.turn(f"data/{key:08x}")
        self._own = ""

    def look(self, epoch: int, first: int, number: int, batch: HostBatch) -> None:
        """Looks at batch ``number`` of a reading that began with batch ``first``.

        Raises:
          DataError: if worker 0 began with another batch.
        """
        if number > first + _LATER_BATCHES:
            return
        workers = self._workers
        key = f"{self._key}/{epoch}/{first}"
        if number == first:
            self._own = json.dumps([batch.row_count, *batch.fingerprint()])
            if workers.process_id == 0:
                workers.tell(key, self._own)
        elif workers.process_id != 0:
            theirs = workers.heard(key)
            if theirs is not None and theirs != self._own:
                raise DataError(
                    fact=f"batch {first} of epoch {epoch} of {self._description} is another one on "
                    f"worker {workers.process_id} than on worker 0 (rows and checksums "
                    f"{self._own} and {theirs}).",
                    expected="the same batches in the same order on every worker, which keeps its "
                    "own rows of each.",
                    hint="read the same data and shuffle with the same seed everywhere; where each "
                    "worker is to read its own, use strategy.distribute_datasets_from_function.",
                )
