"""A call like the latest one runs its program again; every other one is looked up anew."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored
from mirrored import _program_cache


@pytest.fixture
def scaled(two):
    """A function over a variable, called often enough to be remembered."""
    with two.scope():
        scale = mirrored.Variable(2.0)

    @mirrored.function
    def multiply(x):
        return scale * x

    for _ in range(3):
        assert float(multiply(jnp.float32(3))) == 6.0
    return multiply, scale


def test_it_becomes_part_of_an_outer_program(scaled):
    multiply, scale = scaled

    @mirrored.function
    def outer(x):
        return multiply(x) + multiply(jnp.float32(1))

    assert float(outer(jnp.float32(3))) == 8.0
    scale.assign(10.0)
    assert float(outer(jnp.float32(3))) == 40.0
    assert multiply.trace_count == 1


def test_its_argument_can_be_differentiated(two):
    square = mirrored.function(lambda x: x * x)
    assert float(square(jnp.float32(3))) == float(square(jnp.float32(3))) == 9.0
    assert float(jax.grad(lambda x: square(x) + square(jnp.float32(3)))(3.0)) == 6.0


def test_a_scope_entered_for_each_call_traces_once(two):
    double = mirrored.function(lambda x: 2 * x)
    for _ in range(3):
        with two.scope():
            assert float(double(jnp.float32(3))) == 6.0
    assert double.trace_count == 1


def test_another_strategy_is_another_program(two):
    @mirrored.function
    def count():
        return mirrored.get_strategy().num_replicas_in_sync

    found = []
    for strategy in (two, two, mirrored.MirroredStrategy(), two):
        with strategy.scope():
            found.append(int(count()))
    assert found == [2, 2, 8, 2]


def test_weak_types_are_told_apart(two):
    half = jnp.ones((), jnp.bfloat16)
    multiply = mirrored.function(lambda x: x * half)
    strong = jnp.float32(3)
    weak = jnp.asarray(3.0)
    assert [multiply(x).dtype for x in (strong, strong, weak, strong)] == [
        np.float32,
        np.float32,
        jnp.bfloat16,
        np.float32,
    ]


def test_batches_of_other_sizes_and_padded_ones_in_turn(two):
    batches = list(two.distribute_dataset(np.arange(14.0, dtype="f"), batch_size=4))
    total = mirrored.function(lambda batch: two.reduce("sum", batch, axis=0))
    for _ in range(2):
        assert [float(total(batch)) for batch in batches] == [6.0, 22.0, 38.0, 25.0]
    uneven = list(two.distribute_dataset(np.arange(7.0, dtype="f"), batch_size=4))
    assert [float(total(batch)) for batch in uneven] == [6.0, 15.0]
    # A batch with padded rows has the same shapes as a whole one.
    assert total.trace_count == 3


def test_nests_of_arguments(two):
    """Same types, another nest: what is remembered must not take one for the other."""

    @mirrored.function
    def weighed(nest):
        if isinstance(nest, dict):
            return nest["a"] + 10 * nest["b"]
        first, *rest = nest
        return first + 10 * (weighed(rest[0]) if isinstance(rest[0], (list, dict)) else rest[0])

    one, two_, three = (jnp.float32(number) for number in (1, 2, 3))
    calls = [
        ({"a": one, "b": two_}, 21.0),
        ({"b": one, "a": two_}, 12.0),
        ({"a": three, "b": three}, 33.0),
        ([one, two_], 21.0),
        ((one, two_), 21.0),
        ((one, [two_, three]), 321.0),
        ((three, [two_, one]), 123.0),
        ((three, {"a": one, "b": two_}), 213.0),
    ]
    for _ in range(2):
        for nest, wanted in calls:
            assert [float(weighed(nest)) for _ in range(2)] == [wanted, wanted]
    assert weighed.trace_count == 5
    with pytest.raises(KeyError):
        weighed({"a": one, "c": two_})


def test_a_batch_in_a_nest_is_found_again_without_a_search(two, monkeypatch):
    batches = list(two.distribute_dataset((np.arange(8.0, dtype="f"),) * 2, batch_size=4))
    total = mirrored.function(lambda batch: two.reduce("sum", batch[0], axis=0))
    assert float(total(batches[0])) == 6.0

    def search(*_):
        raise AssertionError

    monkeypatch.setattr(_program_cache.Programs, "call", search)
    assert float(total(batches[1])) == 22.0


def test_results_of_every_form(two):
    variable = mirrored.Variable(1.0)

    @mirrored.function
    def results(x):
        return {"array": variable * x, "constant": "word", "nested": [None, (x,)]}

    for _ in range(2):
        found = results(jnp.float32(3))
        assert found == {"array": 3.0, "constant": "word", "nested": [None, (3.0,)]}

    one_in_a_list = mirrored.function(lambda x: [x])
    assert [one_in_a_list(jnp.float32(3)) for _ in range(2)] == [[3.0], [3.0]]


def test_a_captured_value_rebound_between_like_calls(two):
    factor, rate = 2, jnp.float32(1)

    @mirrored.function
    def scaled(x):
        return factor * rate * x

    found = [float(scaled(jnp.float32(3))) for _ in range(2)]
    factor = 5
    found.append(float(scaled(jnp.float32(3))))
    rate = jnp.float32(10)
    found.append(float(scaled(jnp.float32(3))))
    assert found == [6.0, 6.0, 15.0, 150.0]
    assert scaled.retrace_reasons[1:] == (
        "captured 'factor' was rebound",
        "captured 'rate' was rebound",
    )


def test_eager_runs_repeat_too(two):
    traced = []

    def double(x):
        traced.append(x)
        return 2 * x

    for value in ([1.0, 3.0], [5.0, 7.0]):
        batch = mirrored.PerReplica(value)
        assert [float(x) for x in two.local_results(two.run(double, (batch,)))] == [
            2 * x for x in value
        ]
    assert len(traced) == 1
