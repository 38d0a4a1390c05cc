"""Doing the next items of an iterator ahead of time, in a thread.

Owns the thread: its queues, how errors cross it, and that it ends when nobody waits
any more. Knows nothing of batches.
"""

from __future__ import annotations

import abc
import atexit
import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any, final

from mirrored._errors import DataError

# How long the interpreter waits for the threads at its exit. A thread that is inside a
# blocking source cannot be interrupted; it is a daemon and does not keep the process.
_EXIT_SECONDS = 1.0


class Items(abc.ABC):
    """An iterator that can be closed, and that says so if it is used after a failure."""

    @abc.abstractmethod
    def __next__(self) -> Any:
        """Returns the next item."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stops, and waits until the source is no longer in use."""


@final
class Turns:
    """Keeps two threads from reading one source, where the first has been left behind.

    After ``break`` a thread may still be inside the source while the next loop begins.
    Two iterators that are both in use do read side by side: they were asked to.
    """

    def __init__(self) -> None:
        self._newest: tuple[threading.Thread, _Channel] | None = None

    def take(self, thread: threading.Thread, channel: _Channel) -> threading.Thread | None:
        """Notes the newest thread; returns the one it has to wait for."""
        before, self._newest = self._newest, (thread, channel)
        return before[0] if before is not None and before[1].stopped else None


def ahead(items: Generator[Any, None, None], depth: int, turns: Turns) -> Items:
    """Returns the items of a generator, up to ``depth`` of them done ahead of time."""
    return _Prefetched(items, depth, turns) if depth else _Direct(items)


@final
class _Direct(Items):
    """One item after another, when asked."""

    def __init__(self, items: Generator[Any, None, None]) -> None:
        self._items = items
        self._failure: BaseException | None = None

    def __next__(self) -> Any:
        if self._failure is not None:
            raise _failed_before(self._failure)
        try:
            return next(self._items)
        except StopIteration:
            raise
        except BaseException as error:
            # Also Ctrl-C: the generator has ended with it, and the data has not.
            self._failure = error
            raise

    def close(self) -> None:
        self._items.close()


_NO_MORE = object()


@final
class _Channel:
    """What the two threads share; holds neither of them."""

    def __init__(self, depth: int) -> None:
        self.ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A token for each item that may be ahead; both queues are C, under a microsecond.
        self.free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stopped = False
        self.predecessor: threading.Thread | None = None
        for _ in range(depth):
            self.free.put(None)

    def stop(self) -> None:
        self.stopped = True
        self.free.put(None)


class _End:
    """The last thing on a queue: the end, or what went wrong."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
        self.told = False


@final
class _Prefetched(Items):
    """Items made by a thread of their own."""

    def __init__(self, items: Generator[Any, None, None], depth: int, turns: Turns) -> None:
        channel = self._channel = _Channel(depth)
        self._ready, self._free = channel.ready, channel.free
        # The source sees the context variables (the strategy, say) of its consumer.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(_produce, items, channel), name="mirrored-data", daemon=True
        )
        channel.predecessor = turns.take(self._thread, channel)
        _RUNNING[self._thread] = channel
        self._thread.start()
        # The thread does not know this object: when the last reference to it goes, as
        # after `break`, the thread ends.
        weakref.finalize(self, channel.stop).atexit = False

    def __next__(self) -> Any:
        item = self._ready.get()
        if type(item) is _End:
            self._ready.put(item)
            _tell(item)
        self._free.put(None)
        return item

    def close(self) -> None:
        self._channel.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _produce(items: Generator[Any, None, None], channel: _Channel) -> None:
    ready, free = channel.ready, channel.free
    error: BaseException | None = None
    try:
        if channel.predecessor is not None:
            channel.predecessor.join()
            channel.predecessor = None
        free.get()
        while not channel.stopped:
            item = next(items, _NO_MORE)
            if item is _NO_MORE:
                break
            ready.put(item)
            # Otherwise this frame would keep a batch alive while it waits.
            del item
            free.get()
    except BaseException as caught:  # noqa: BLE001 (the consumer raises it)
        error = caught
    # Nobody may be left to hear an error of the source's own clean-up: it is not caught,
    # so that Python prints it.
    try:
        items.close()
    finally:
        ready.put(_End(error))


def _tell(end: _End) -> None:
    if end.error is None:
        raise StopIteration
    if end.told:
        raise _failed_before(end.error)
    end.told = True
    raise end.error


def _failed_before(error: BaseException) -> DataError:
    failure = DataError(
        fact=f"the source of this iterator has failed before, with {type(error).__name__}: {error}",
        expected="a new iterator after a failure, since nobody knows what the source would skip.",
        hint="call iter(dataset) again; dataset.get_state() and set_state() take it to the batch "
        "where it was.",
    )
    failure.__cause__ = error
    return failure


_RUNNING: weakref.WeakKeyDictionary[threading.Thread, _Channel] = weakref.WeakKeyDictionary()


def _stop_all() -> None:
    """Ends all threads before JAX shuts its backends down under them."""
    running = [(thread, channel) for thread, channel in _RUNNING.items() if thread.is_alive()]
    for _, channel in running:
        channel.stop()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))


# JAX registered its own at its import, and these run in reverse order.
atexit.register(_stop_all)
