"""A source as people have it, read one element after another.

Owns iterating over sources of every kind, and taking one up again in the middle.
"""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, final

from mirrored._data_batches import HostBatch
from mirrored._errors import DataError

NOTHING = object()


class Start(NamedTuple):
    """Where to begin: in which epoch, after how many steps, and what the source saved."""

    epoch: int = 0
    batch: int = 0
    saved: Mapping[str, Any] | None = None


@final
class Elements:
    """A source as people have it: what it yields, one element after another."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.one_shot = isinstance(source, Iterator)
        self._used = False

    @contextlib.contextmanager
    def opened(self, start: Start, *, each: int) -> Iterator[Cursor]:
        """Reads from ``start``, whose steps took ``each`` elements."""
        if self.one_shot and self._used:
            raise DataError(
                fact=f"{self.describe('batches')} was iterated a second time, but an iterator "
                "gives its batches once.",
                expected="a source that can be read again, for example a list, a Dataset, or a "
                "function that returns a new generator.",
                hint="pass the generator function instead of the generator it returned; or keep "
                "one iterator with `iterator = iter(dataset)` and use it for all epochs.",
            )
        self._used = True
        _notify(self._source, "on_epoch_begin")
        cursor = Cursor(self._iterator(), self.describe("batches"))
        try:
            cursor.seek(start, each)
            yield cursor
            if cursor.ended:
                _notify(self._source, "on_epoch_end")
        finally:
            if not self.one_shot:
                cursor.close()

    def _iterator(self) -> Iterator[Any]:
        source: Any = self._source
        as_numpy = getattr(source, "as_numpy_iterator", None)
        if callable(as_numpy):
            source = as_numpy()
        elif not is_iterable(source):
            source = source()
            if not is_iterable(source):
                raise DataError(
                    fact=f"the function given as a data set returned {type(source).__name__}.",
                    expected="something to iterate over, for example a generator.",
                    hint="use `yield` in it, or return a list of batches.",
                )
        if getattr(type(source), "__iter__", None) is None:
            # Python's own rule for such objects reads on until an IndexError.
            return (source[index] for index in range(len(source)))
        return iter(source)

    def count(self) -> int | None:
        """The number of elements, or None if unknown or without end."""
        try:
            count = len(self._source)
        except (TypeError, NotImplementedError):
            return None
        # Grain's repeat() has the largest length there is.
        return None if count >= sys.maxsize // 2 else count

    def describe(self, what: str) -> str:
        """Names the type of the source."""
        kind = type(self._source)
        module = kind.__module__.partition(".")[0]
        name = kind.__qualname__ if module == "builtins" else f"{module} {kind.__qualname__}"
        return f"{what} from a {name}"


@final
class Cursor:
    """Walks through a source once and can say where it stands."""

    def __init__(self, iterator: Iterator[Any], name: str) -> None:
        self._iterator: Any = iterator
        self._name = name
        # Grain's iterators know where they are; others are taken up by skipping.
        self._knows_state = callable(getattr(iterator, "get_state", None)) and callable(
            getattr(iterator, "set_state", None)
        )
        self.first: Any = None
        self.ended = False

    def __iter__(self) -> Cursor:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self.ended = True
            raise

    def state(self, last: HostBatch) -> dict[str, Any]:
        """What to save to go on after ``last``."""
        if not self._knows_state:
            return {"fingerprint": last.fingerprint()}
        state = self._iterator.get_state()
        if isinstance(state, bytes):
            return {"iterator": {"base64": base64.b64encode(state).decode()}}
        return {"iterator": {"state": state}}

    def seek(self, start: Start, each: int) -> None:
        """Goes to where ``state`` was taken."""
        saved = start.saved or {}
        iterator = saved.get("iterator")
        if iterator is not None and self._knows_state:
            encoded = iterator.get("base64")
            self._iterator.set_state(
                iterator["state"] if encoded is None else base64.b64decode(encoded)
            )
            return
        element = None
        for skipped in range(start.batch * each):
            element = next(self, NOTHING)
            if element is NOTHING:
                # An incomplete last group of pieces is a step too.
                if skipped > (start.batch - 1) * each:
                    return
                raise DataError(
                    fact=f"the saved position is after {start.batch} batches, but {self._name} "
                    f"ended after {skipped // each}.",
                    expected="the same data as when the position was saved.",
                    hint="resume with the same source, or start a new epoch.",
                )
            if skipped == 0:
                self.first = element
        expected = saved.get("fingerprint")
        if element is None or expected is None:
            return
        found = HostBatch.of(element, "the last skipped batch", may_be_empty=True).fingerprint()
        # One equal part is enough: others may be augmented at random.
        if not any(own == other for own, other in zip(found, expected, strict=False)):
            raise DataError(
                fact=f"{self._name} gave other data than before in batch {start.batch - 1}, after "
                "which the position was saved; a resumed run would repeat some examples and miss "
                "others.",
                expected="the same batches in the same order in every run.",
                hint="give the source's shuffle a fixed seed; or remove state['source'] to go on "
                "all the same.",
            )

    def close(self) -> None:
        """Lets go of the iterator, so that its workers or files are released now."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


def is_iterable(source: Any) -> bool:
    """Says whether ``source`` can be iterated, by either of Python's protocols."""
    if isinstance(source, Iterable):
        return True
    kind = type(source)
    return all(getattr(kind, name, None) is not None for name in ("__getitem__", "__len__"))


def _notify(source: Any, moment: str) -> None:
    # Keras's PyDataset reshuffles here.
    method = getattr(source, moment, None)
    if callable(method):
        method()
