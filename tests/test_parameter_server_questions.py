"""Messages of another form are refused as such, and what is refused has changed nothing."""

from __future__ import annotations

import copy

import hypothesis
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import mirrored
from mirrored._parameter_server._engine import ServerSpec
from mirrored._parameter_server._rules import OptaxRule
from mirrored._parameter_server._server import Server
from mirrored._parameter_server._staleness import Staleness
from mirrored._parameter_server._store import Piece

PUSH = {"lease": 0, "closure": 0, "step": 0, "floor": 0, "epoch": 0, "read": [[1, 2]]}
GRADIENTS = {"kind": "gradients", "optimizer": 0, "lists": [[1, 2]], "whole": True}
ROWS = {"kind": "rows", "optimizer": 1, "table": 3}
UPDATES = [GRADIENTS, ROWS, {"kind": "set_rows", "table": 3}, {"kind": "add", "piece": 4}]


def row_numbers():
    return np.array([0, 2])


def good_messages():
    """One of each operation, with all the fields it may have."""
    arrays = [np.ones(5, "f"), row_numbers(), np.ones((2, 3), "f")]
    arrays += [row_numbers(), np.ones((2, 3), "f"), np.ones(1, "f")]
    piece = {"number": 9, "name": "new", "start": 0}
    return [
        ("create", {"epoch": 0, "pieces": [piece]}, [np.ones(2, "f")]),
        ("pull", {"epoch": 0, "lease": 0, "read": [[1, 2], [4]], "after": 0, "closed": []}, []),
        ("push", {**PUSH, "updates": UPDATES, "counts": True, "round": None}, arrays),
        ("rows", {"epoch": 0, "tables": [3], "after": 0}, [row_numbers()]),
        ("join", {"epoch": 0, "leases": [0]}, []),
        ("leave", {"epoch": 0, "lease": 0}, []),
        ("turn", {"epoch": 0, "lease": 0, "read": [[4]], "round": 0}, []),
        ("status", {"epoch": 0}, []),
    ]


def make_server():
    server = Server(ServerSpec(0, 1, Staleness()))
    server.control("optimizer", 0, OptaxRule(optax.sgd(0.5), "dense"))
    server.control("optimizer", 1, OptaxRule(optax.adagrad(0.5), "sparse"))
    pieces = [{"number": n, "name": f"v{n}", "start": 0} for n in (1, 2, 4)]
    values = [np.zeros(2, "f"), np.zeros(3, "f"), np.zeros(1, "f")]
    server.handle("create", {"pieces": pieces}, values)
    table = Piece(3, "table", 0, (5, 3), np.dtype("f"))
    server.control("table", table, lambda start, stop: np.zeros((stop - start, 3), "f"))
    return server


def state(server):
    """All values, and which steps are known to be done."""
    arrays = [server.holdings.store.value(piece.number) for piece in server.holdings.store.pieces()]
    arrays.append(server.holdings.tables[3].values)
    return [array.tolist() for array in arrays], copy.deepcopy(server.applied.as_fields())


@pytest.mark.parametrize("message", good_messages(), ids=lambda message: message[0])
def test_messages_with_all_their_fields_are_understood(message):
    server = make_server()
    before = state(server)
    server.handle(*message)
    assert (state(server) != before) is (message[0] in ("create", "push"))


WRONG = {
    "a field that is unknown": {"surprise": 1},
    "a number that is a bool": {"step": True},
    "a negative step": {"step": -1},
    "a number that no 64 bits hold": {"step": 1 << 63},
    "a float": {"closure": 0.5},
    "a piece that is not there": {"read": [[99]]},
    "a list of nothing": {"read": [[]]},
    "an unknown kind": {"updates": [{"kind": "multiply", "piece": 4}]},
    "an update with a field too many": {"updates": [{"kind": "add", "piece": 4, "by": 2}]},
}


@pytest.mark.parametrize("what", list(WRONG))
def test_fields_of_another_form_are_refused(what):
    server = make_server()
    message = {**PUSH, "updates": [{"kind": "add", "piece": 4}], **WRONG[what]}
    before = state(server)
    with pytest.raises(mirrored.ServerError):
        server.handle("push", message, [np.ones(1, "f")])
    assert state(server) == before


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        ([2, 2], np.ones((2, 3), "f")),
        ([2, 0], np.ones((2, 3), "f")),
        ([0, 5], np.ones((2, 3), "f")),
        ([-1, 0], np.ones((2, 3), "f")),
        ([0, 2], np.ones((2, 3), "d")),
        ([0, 2], np.ones((3, 3), "f")),
        ([0, 2], np.ones(6, "f")),
        ([0.0, 2.0], np.ones((2, 3), "f")),
    ],
)
@pytest.mark.parametrize("kind", ["rows", "set_rows"])
def test_a_message_is_applied_whole_or_not_at_all(kind, rows, values):
    """A row that came twice would lose one of its gradients."""
    server = make_server()
    before = state(server)
    update = ROWS if kind == "rows" else {"kind": "set_rows", "table": 3}
    message = {**PUSH, "updates": [{"kind": "add", "piece": 4}, update]}
    with pytest.raises(mirrored.ServerError):
        server.handle("push", message, [np.ones(1, "f"), np.array(rows), values])
    assert state(server) == before


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 65), 1 << 65) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SMALL = st.lists(st.lists(st.integers(-1, 5), max_size=3), max_size=3)
DTYPES = st.sampled_from(["f4", "f8", "i8", "i4", "?", "c8", ml_dtypes.bfloat16])


@st.composite
def disturbed(draw):
    """A message of which something is another."""
    operation, fields, arrays = copy.deepcopy(draw(st.sampled_from(good_messages())))
    if operation == "push":
        # Of another closure each time, or it would be known to be done.
        fields["closure"] = draw(st.integers(0, 1 << 50))
    target = fields
    if operation == "push" and draw(st.booleans()):
        target = draw(st.sampled_from(fields["updates"]))
    name = draw(st.sampled_from([*target, "other"]))
    action = draw(st.sampled_from(["set", "drop", "array", "arrays", "operation"]))
    if action == "set":
        target[name] = draw(VALUES | SMALL | st.integers(0, 10))
    elif action == "drop":
        target.pop(name, None)
    elif action == "array" and arrays:
        place = draw(st.integers(0, len(arrays) - 1))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        arrays[place] = np.ones(shape, draw(DTYPES))
    elif action == "arrays":
        arrays = draw(st.permutations(arrays))[: draw(st.integers(0, len(arrays)))]
    else:
        operation = draw(st.sampled_from(["push", "pull", "rows", "create", "", "control"]))
    return operation, fields, arrays


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(message=disturbed())
def test_whatever_comes_is_answered_or_refused_and_then_changes_nothing(message):
    server = SERVER
    before = state(server)
    try:
        server.handle(*message)
    except mirrored.MirroredError:
        assert state(server) == before


# One for all: it must live through all of them.
SERVER = make_server()
