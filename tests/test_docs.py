"""Every Python block of the documentation runs, and so do the docstrings' examples."""

from __future__ import annotations

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import mirrored

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(mirrored.__path__, "mirrored.")
    if name != "mirrored.__main__"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, capsys):
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "page"}
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        padded = "\n" * line + match[1]
        exec(compile(padded, str(page), "exec"), namespace)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failures == 0


def test_every_public_callable_has_an_example():
    without = []
    for name in mirrored.__all__:
        thing = getattr(mirrored, name)
        is_error = isinstance(thing, type) and issubclass(thing, Exception)
        if not callable(thing) or is_error:
            continue
        assert thing.__doc__, name
        if ">>>" not in thing.__doc__:
            without.append(name)
    # These are not made by users, or their meaning is in the class beside them.
    assert set(without) <= {
        "DistributedDataset",
        "Function",
        "InputContext",
        "MultiWorkerMirroredStrategy",
        "Strategy",
        "ValueContext",
        "VariableAggregation",
        "VariableSynchronization",
    }
