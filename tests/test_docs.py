"""Every Python block of the documentation runs, and so do the docstrings' examples."""

from __future__ import annotations

import doctest
import importlib
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import public_api
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
        "Explanation",
        "Function",
        "InputContext",
        "MultiWorkerMirroredStrategy",
        "Partitioner",
        "PerWorkerDataset",
        "PerWorkerValues",
        "ServerStatus",
        "Staleness",
        "Strategy",
        "TableRows",
        "ValueContext",
        "VariableAggregation",
        "VariableSynchronization",
        "WorkerStatus",
    }


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    assert sorted(shown) == sorted(public_api.public_names())


def test_every_name_of_tf_distribute_is_on_its_page():
    page = (ROOT / "docs/coming-from-tf-distribute.md").read_text()
    firsts = " ".join(re.findall(r"^\|([^|]*`[^|]*)\|", page, re.MULTILINE))
    there = {
        part
        for span in re.findall(r"`([^`]*)`", firsts)
        for part in re.split(r"\W+", span.partition("(")[0])
    }
    names = (ROOT / "tests/tf_distribute_names.txt").read_text().splitlines()[1:]
    assert len(names) > 100
    assert [name for name in names if name.rpartition(".")[2] not in there] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    named = re.findall(
        r"\b(?:examples|tests|benchmarks|scripts|docs)/[\w./-]*\w",
        re.sub(r"\w+://\S*", "", page.read_text()),
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_links_of_the_readme_lead_somewhere():
    """The site's own links are checked by building it; the README is no part of it."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_site_builds_and_fetches_nothing(tmp_path):
    """Strict: a dead link, a page without a place, a name that is gone are errors."""
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
        timeout=120,
    )
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\" >]*)", text)
        fetched += re.findall(r"<link[^>]* href=\"?(https?:[^\" >]*)", text)
        assert fetched == [], page
        # An example is code, not a quotation.
        assert "<blockquote>" not in text, page
