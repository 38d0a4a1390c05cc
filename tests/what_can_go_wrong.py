"""Runs docs/what-can-go-wrong.md and writes its messages.

A section of the page is a heading, words, and blocks of code (``py``). The first block of a
section raises; after it stands what was said (``text``). Blocks after that show the cure and
run. ``python tests/what_can_go_wrong.py`` (or ``make errors``) writes the messages anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import pathlib
import re
import socket
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mirrored import _compat

PAGE = pathlib.Path(__file__).parent.parent / "docs/what-can-go-wrong.md"
_SECTION = re.compile(r"^### (.*?)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```(py|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
# Stands on the page for a free port.
_PORT = "29471"
_PRELUDE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Section:
    """One mistake.

    Args:
      title: its heading.
      cause: code that raises.
      written: what the page says was raised; None if nothing stands there yet.
      cures: code that runs after it.
    """

    title: str
    cause: str
    written: str | None
    cures: tuple[str, ...]


def sections() -> list[Section]:
    return [_section(match[1], match[2]) for match in _SECTION.finditer(PAGE.read_text())]


def _section(title: str, body: str) -> Section:
    blocks = [(match[1], match[2]) for match in _BLOCK.finditer(body)]
    codes = [code for kind, code in blocks if kind == "py"]
    messages = [message for kind, message in blocks if kind == "text"]
    assert len(messages) < 2, title
    return Section(title, codes[0], messages[0] if messages else None, tuple(codes[1:]))


def run(section: Section) -> Exception:
    """Runs the section after the page's first lines and returns what its cause raised."""
    namespace: dict[str, Any] = {"__name__": "train"}
    prelude = _PRELUDE.search(PAGE.read_text())
    assert prelude is not None
    _execute(prelude[1], namespace)
    with _CIRCUMSTANCES.get(section.title, contextlib.nullcontext)():
        try:
            _execute(section.cause, namespace)
        except Exception as error:  # noqa: BLE001 - whatever it is, the page says so
            raised = error
        else:
            message = f"nothing is raised under {section.title!r}"
            raise AssertionError(message)
    for cure in section.cures:
        _execute(cure, namespace)
    return raised


def _execute(code: str, namespace: dict[str, Any]) -> None:
    if _PORT in code:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            code = code.replace(_PORT, str(free.getsockname()[1]))
    exec(compile(code, "train.py", "exec"), namespace)


def shown(error: Exception) -> str:
    """The end of the traceback, without what differs from run to run."""
    text = f"mirrored.{type(error).__name__}: {error}\n"
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r"localhost:\d+", f"localhost:{_PORT}", text)
    return re.sub(r"/\S*/tmp\w+", "/checkpoints", text)


# --- what a test cannot have as it is ------------------------------------------------


def _jax_has_not_started() -> contextlib.AbstractContextManager[Any]:
    """The workers meet before JAX starts; here it has long since."""
    return mock.patch.object(_compat, "backend_has_started", return_value=False)


class _NotInstalled(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] == "orbax":
            raise ModuleNotFoundError("No module named 'orbax'", name="orbax")


@contextlib.contextmanager
def _without_orbax() -> Iterator[None]:
    finder = _NotInstalled()
    hidden = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.startswith(("orbax", "mirrored.checkpoint"))
    }
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(hidden)


_CIRCUMSTANCES = {
    "Workers that do not come": _jax_has_not_started,
    "An extra that is not installed": _without_orbax,
}


def rewritten() -> Iterator[str]:
    text = PAGE.read_text()
    position = 0
    for match in _SECTION.finditer(text):
        section = _section(match[1], match[2])
        message = f"```text\n{shown(run(section))}```\n"
        body = re.sub(r"^```text\n.*?^```\n\n?", "", match[2], flags=re.MULTILINE | re.DOTALL)
        first = _BLOCK.search(body)
        assert first is not None
        after = body[first.end() :].lstrip("\n")
        yield text[position : match.start(2)]
        yield body[: first.end()] + "\n" + message + "\n" + after
        position = match.end()
    yield text[position:]


if __name__ == "__main__":
    PAGE.write_text("".join(rewritten()).rstrip("\n") + "\n")
