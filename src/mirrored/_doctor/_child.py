"""Runs the probe in a child process, and ends it at its deadline.

Owns the child: it and all it started are gone when ``ask`` returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, final

_KEPT_LINES = 3


@final
@dataclasses.dataclass(frozen=True)
class Answer:
    """How far the probe came and what it found.

    Args:
      facts: of each stage that ended.
      stuck_in: the stage during which time ran out; None if it did not.
      failed_in: the stage during which the child ended early; None if it did not.
      last_words: what the child wrote last, if it failed.
      seconds: how long it took.
    """

    facts: Mapping[str, Mapping[str, Any]]
    stuck_in: str | None
    failed_in: str | None
    last_words: str
    seconds: float


def ask(environment: Mapping[str, str], seconds: float, *, devices_only: bool = False) -> Answer:
    """Runs the probe with these environment variables for so long at most."""
    program = f"from mirrored._doctor import _probe; _probe.main(devices_only={devices_only})"
    started = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        is_late = False
        try:
            written, _ = child.communicate(timeout=max(0.1, seconds))
        except subprocess.TimeoutExpired:
            is_late = True
            _end(child)
            written, _ = child.communicate()
        except BaseException:
            _end(child)
            raise
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    facts: dict[str, Any] = {}
    begun = None
    for line in written.decode(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # cut off in the middle
            message = json.loads(line)
            begun = message.get("begun")
            if begun is None:
                facts[message["done"]] = message["facts"]
    failed = not is_late and child.returncode != 0
    return Answer(
        facts=facts,
        stuck_in=(begun or "") if is_late else None,
        failed_in=(begun or "") if failed else None,
        last_words=_last_words(said, child.returncode) if failed else "",
        seconds=time.monotonic() - started,
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_words(said: str, code: int) -> str:
    """The end of the traceback, or of what a dying backend wrote."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # Frames of native code, and JAX's remark on the frames it left out, say nothing to users.
    telling = [
        line
        for line in lines
        if not line.startswith(("@", "***", "-----", "For simplicity", "File ", "^"))
    ]
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return " | ".join([*telling[-_KEPT_LINES:], ended])
