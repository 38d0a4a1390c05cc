"""What is no array among the arguments of run: given as it is, and a part of the program."""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import enum
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: float


class Opaque:
    pass


# Each is made anew, equal to the one before, in every call.
CONSTANTS = {
    "string": lambda: "".join(["mean", "_of"]),
    "bytes": lambda: bytes([1, 2]),
    "flag": lambda: True,
    "member": lambda: Color.RED,
    "frozen": lambda: Frozen(0.5),
    "set": lambda: {1, 2},
    "bytearray": lambda: bytearray(b"ab"),
    "decimal": lambda: decimal.Decimal("1.5"),
    "path": lambda: pathlib.Path("a") / "b",
    "dtype": lambda: np.dtype("f4"),
    "strings": lambda: np.array(["a", "b"]),
    "date": lambda: np.datetime64("2020-01-01"),
    "large": lambda: 2**40,
    "slice of a nest": lambda: {"x": ["s", ("t", None)]},
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", CONSTANTS)
def test_it_is_given_to_all_replicas_and_comes_back_as_it_is(two, name, debug):
    seen = []

    def replica_function(constant, x):
        seen.append(constant)
        return constant, 2 * x

    with two.debug() if debug else contextlib.nullcontext():
        for value in (1.0, 3.0):
            batch = mirrored.PerReplica([value, value + 1])
            constant, doubled = two.run(replica_function, (CONSTANTS[name](), batch))
            np.testing.assert_equal(constant, CONSTANTS[name]())
            assert [float(part) for part in two.local_results(doubled)] == [
                2 * value,
                2 * value + 2,
            ]
    np.testing.assert_equal(seen[-1], CONSTANTS[name]())
    assert len(seen) == (4 if debug else 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a", "b"),
        (True, False),
        (Frozen(0.5), Frozen(0.25)),
        ({1}, {2}),
        (np.array(["a"]), np.array(["b"])),
        (2**40, 2**41),
        (Opaque(), Opaque()),
        ({"x": "a"}, {"x": "b"}),
    ],
)
def test_another_value_is_another_program(two, first, second):
    calls = []

    @mirrored.function
    def step(constant):
        return two.run(lambda constant: calls.append(constant), (constant,))

    for constant in (first, second, first):
        step(constant)
    assert [repr(call) for call in calls] == [repr(first), repr(second)]
    assert step.trace_count == 2


def test_a_number_and_a_flag_that_are_equal_are_told_apart(two):
    kinds = [two.run(lambda x: type(x).__name__, (value,)) for value in ("1", True, 1)]
    assert kinds[:2] == ["str", "bool"]
    assert "Tracer" in kinds[2]


def test_a_set_that_has_changed_is_seen(two):
    words = {"a"}
    step = mirrored.function(lambda words: len(words))
    assert step(words) == 1
    words.add("b")
    assert step(words) == 2


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("keys", [("a", 1), (None, "b")])
def test_keys_without_an_order_are_refused(two, keys, debug):
    nest = dict.fromkeys(keys, 1.0)
    with two.debug() if debug else contextlib.nullcontext():
        for call in (
            lambda: two.run(lambda x: x, ([nest],)),
            lambda: two.run(lambda: nest),
            lambda: two.reduce("mean", {"a": nest}),
            lambda: two.gather(nest, axis=0),
            lambda: two.local_results(nest),
            lambda: mirrored.get_replica_context().all_reduce("sum", nest),
            lambda: mirrored.get_replica_context().all_gather(nest),
        ):
            with pytest.raises(mirrored.ArgumentError, match="which have no order"):
                call()


def test_keys_without_an_order_do_not_pass_the_door_of_a_program():
    nest = {"a": 1.0, 1: 2.0}
    with pytest.raises(mirrored.ArgumentError, match="'a', 1, which have no order"):
        mirrored.function(lambda x: x)(nest)
    with pytest.raises(mirrored.ArgumentError, match="'a', 1, which have no order"):
        mirrored.function(lambda: nest)()


def test_numbers_as_keys_have_an_order(two):
    found = two.run(lambda x: {2: x[1], 1: x[2]}, ({1: jnp.float32(1), 2: jnp.float32(2)},))
    assert {key: float(two.reduce("sum", value)) for key, value in found.items()} == {1: 4, 2: 2}


def test_the_large_seed_is_a_seed(two):
    def draw(seed):
        return jax.random.key_data(jax.random.key(seed))

    assert (
        two.run(draw, (2**40 + 5,)).tolist()
        == jax.random.key_data(jax.random.key(2**40 + 5)).tolist()
    )


def test_what_is_no_array_is_refused_where_arrays_belong(two):
    context = mirrored.get_replica_context()
    variable = mirrored.Variable(1.0)
    for call in (
        lambda: two.reduce("sum", mirrored.PerReplica(["a", "b"])),
        lambda: two.run(lambda x: x, (mirrored.PerReplica([None, None]),)),
        lambda: two.run(lambda x: x, (mirrored.PerReplica([{"a": 1}, {"a": 2}]),)),
        lambda: mirrored.Variable("abc"),
        lambda: mirrored.Variable(None),
        lambda: mirrored.Variable([[1], [1, 2]]),
        lambda: variable.assign(None),
        lambda: variable.assign_add("a"),
        lambda: two.run(lambda: mirrored.get_replica_context().all_reduce("sum", "a")),
        lambda: two.run(lambda: mirrored.get_replica_context().all_gather(["a"])),
    ):
        with pytest.raises(mirrored.ArgumentTypeError, match="hint: "):
            call()
    for call in (
        lambda: mirrored.function(3),
        lambda: two.run(lambda **named: 1, (), {1: 2}),
        lambda: two.reduce("mean", mirrored.PerReplica([[1.0], [3.0]]), axis=True),
        lambda: context.merge_call(lambda strategy, x: x, args=3),
        lambda: two.run(lambda: mirrored.get_replica_context().all_gather(jnp.ones(3), axis=1)),
        lambda: two.run(lambda: mirrored.get_replica_context().all_gather(jnp.ones(3), axis="a")),
        lambda: two.run(lambda x: x, (jax.ShapeDtypeStruct((3,), "float32"),)),
        lambda: two.distribute_values_from_function(3),
        lambda: two.distribute_values_from_function(
            lambda context: [1] * (1 + context.replica_id_in_sync_group)
        ),
        lambda: two.distribute_datasets_from_function([1]),
    ):
        with pytest.raises(mirrored.ArgumentError, match="hint: "):
            call()
    with pytest.raises(mirrored.VariableError, match="the creation of variable"):
        mirrored.Variable(mirrored.PerReplica([1.0, 2.0]))


@pytest.mark.parametrize("axis", [1, -1])
def test_scalars_of_a_nest_are_stacked_whatever_the_axis_of_the_rest(two, axis):
    def gathered(x):
        nest = {"scalar": x.sum(), "matrix": x}
        return mirrored.get_replica_context().all_gather(nest, axis=axis)

    found = two.run(gathered, (mirrored.PerReplica([[[1.0, 2.0]], [[3.0, 4.0]]]),))
    assert found["scalar"].tolist() == [3.0, 7.0]
    assert found["matrix"].tolist() == [[1.0, 2.0, 3.0, 4.0]]
