"""Errors read as a whole: every class is raised, and every message has its three parts."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re

import pytest
import what_can_go_wrong

import mirrored

SOURCE = pathlib.Path(mirrored.__file__).parent
SECTIONS = what_can_go_wrong.sections()
CLASSES = {
    name
    for name, thing in vars(mirrored).items()
    if inspect.isclass(thing) and issubclass(thing, mirrored.MirroredError)
}
# What Python itself asks for in these places; everything else a user may meet is ours.
BUILTIN = {
    "AssertionError",  # a broken promise of this library
    "AttributeError",  # __getattr__
    "ModuleNotFoundError",
    "NotImplementedError",  # abstract
    "StopIteration",
    "SystemExit",
    # Caught inside: the probe of the doctor, damaged checkpoints, workers and messages that
    # are lost on the way. Users see what becomes of them.
    "ArithmeticError",
    "ConnectionResetError",
    "DamagedError",
    "OSError",
    "PermissionError",
    "_WorkerGoneError",
}


@pytest.mark.filterwarnings("ignore:mirrored. the checkpoint")
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_what_can_go_wrong(section):
    """The code of the page raises what the page says, and the cure runs."""
    error = what_can_go_wrong.run(section)
    assert isinstance(error, mirrored.MirroredError)
    for part in (error.fact, error.expected):
        assert part.rstrip().endswith(".")
    assert error.hint.strip()
    assert what_can_go_wrong.shown(error) == section.written, "run `make errors`"


def test_every_class_is_on_the_page():
    page = what_can_go_wrong.PAGE.read_text()
    raised = set(re.findall(r"^mirrored\.(\w+): ", page, re.MULTILINE))
    assert CLASSES - raised == {"MirroredError"}


def literal(node):
    """The text of a message as far as it is written in the source; {} for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal(node.left) + literal(node.right)
    return "{}"


def constructions():
    """Every place in the library that makes an error of ours."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                if name in CLASSES:
                    yield path, node, {word.arg: word.value for word in node.keywords}


FOUND = list(constructions())


def test_the_form_of_every_message_in_the_source():
    """Sentences, with an end; the fact does not shout; the hint says what to do."""
    assert len(FOUND) > 250
    wrong = []
    for path, node, words in FOUND:
        where = f"{path.relative_to(SOURCE)}:{node.lineno}"
        if set(words) != {"fact", "expected", "hint"}:
            wrong.append(f"{where}: {sorted(words, key=str)}")
            continue
        for part, value in words.items():
            text = literal(value)
            if text.startswith("{}") and text.endswith("{}"):
                continue
            if not re.search(r"[.)'\"`}?]$", text):
                wrong.append(f"{where}: {part} does not end: {text!r}")
            if re.search(r"!|[Pp]lease|[Ss]orry|[Ii]nvalid|[Ee]rror:", text):
                wrong.append(f"{where}: {part} is no plain fact: {text!r}")
    assert wrong == []


def test_users_meet_no_bare_builtin():
    """Whatever the library raises on purpose is its own, or what Python asks for."""
    bare = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                name = getattr(node.exc.func, "id", "")
                if name.endswith("Error") and name not in CLASSES | BUILTIN:
                    bare.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {name}")
    assert bare == []
