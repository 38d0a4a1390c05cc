"""``mirrored.profile``: a trace of what host and devices did, for Perfetto and XProf.

Owns where the trace is written and that it is. The recording is JAX's profiler's; the
names of the steps' parts stand where these parts are traced.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

import jax

from mirrored._errors import ContextError


@contextlib.contextmanager
def profile(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Records what host and devices do inside the block, and writes it as a trace.

    Open ``perfetto_trace.json.gz`` in https://ui.perfetto.dev, or the directory with XProf
    (``xprof DIRECTORY``, or TensorBoard with its plugin). Operations carry the names of the
    part of the step they come from: ``mirrored.forward`` and, as ``transpose(...)`` of it,
    the backward pass, ``mirrored.gradients_mean`` for the all-reduce, ``mirrored.update``;
    programs have the names of their functions. Let the block hold a few steps, and one
    before it, so that compiling is not in it.

    Args:
      directory: where traces go; each of several processes writes into a directory of its
        own in there.

    Yields:
      The directory of this process.

    >>> import tempfile
    >>> import mirrored
    >>> with mirrored.profile(tempfile.mkdtemp()) as directory:
    ...     _ = jax.numpy.ones(3) + 1
    >>> [path.name for path in directory.rglob("perfetto_trace.json.gz")]
    ['perfetto_trace.json.gz']
    """
    path = pathlib.Path(directory)
    if jax.process_count() > 1:
        path = path / f"process_{jax.process_index()}"
    try:
        jax.profiler.start_trace(path, create_perfetto_trace=True)
    except RuntimeError as error:
        raise ContextError(
            fact=f"the profiler could not be started: {error}",
            expected="one trace at a time.",
            hint="take one `with mirrored.profile(...)` out of the other.",
        ) from error
    try:
        yield path
    finally:
        # What was started inside belongs into the trace.
        jax.effects_barrier()
        jax.profiler.stop_trace()
