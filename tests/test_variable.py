"""Conformance 25 to 36: variables in every context."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_strategy

import mirrored
from mirrored import PerReplica

RAISES = "raises"

# synchronization, aggregation -> what assign, assign_add, assign_sub of rid + 1,
# assign_add(1.0), cross-replica assign(4) and assign_add(4) leave of v = 10; a
# list is one component a replica.
TABLE = {
    ("on_write", "none"): (RAISES, RAISES, RAISES, 11, 4, 14),
    ("on_write", "sum"): (3, 13, 7, 12, 4, 14),
    ("on_write", "mean"): (1.5, 11.5, 8.5, 11, 4, 14),
    ("on_write", "only_first_replica"): (1, 11, 9, 11, 4, 14),
    ("on_read", "none"): ([1, 2], [11, 12], [9, 8], [11, 11], RAISES, RAISES),
    ("on_read", "sum"): ([1, 2], [11, 12], [9, 8], [11, 11], [2, 2], RAISES),
    ("on_read", "mean"): ([1, 2], [11, 12], [9, 8], [11, 11], [4, 4], [14, 14]),
    ("on_read", "only_first_replica"): ([1, 2], [11, 12], [9, 8], [11, 11], [4, 4], [14, 14]),
}
CASES = {key: 25 + index for index, key in enumerate(TABLE)}
ACTIONS = ("assign", "assign_add", "assign_sub", "add_one", "cross_assign", "cross_add")
AGGREGATED = {
    "sum": sum,
    "mean": lambda parts: sum(parts) / 2,
    "only_first_replica": lambda p: p[0],
}


def table_rows():
    for (synchronization, aggregation), row in TABLE.items():
        for action, expected in zip(ACTIONS, row):
            case = CASES[synchronization, aggregation]
            yield pytest.param(
                synchronization, aggregation, action, expected, marks=pytest.mark.conformance(case)
            )


def act(strategy, v, action):
    def in_replica(change):
        def replica_function():
            rank = mirrored.get_replica_context().replica_id_in_sync_group
            change(rank + 1.0)

        strategy.run(replica_function)

    if action == "add_one":
        in_replica(lambda _: v.assign_add(1.0))
    elif action == "cross_assign":
        v.assign(4.0)
    elif action == "cross_add":
        v.assign_add(4.0)
    else:
        in_replica(getattr(v, action))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    ("synchronization", "aggregation", "action", "expected"), list(table_rows())
)
def test_the_table(two, synchronization, aggregation, action, expected, compiled):
    with two.scope():
        # ON_READ components start at 10 each, whatever the aggregation.
        start = 20.0 if (synchronization, aggregation) == ("on_read", "sum") else 10.0
        v = mirrored.Variable(
            start, name="v", synchronization=synchronization, aggregation=aggregation
        )
    call = (
        mirrored.function(lambda: act(two, v, action)) if compiled else lambda: act(two, v, action)
    )
    if expected == RAISES:
        with pytest.raises(mirrored.VariableError, match=r"(?s)'v'.*hint:"):
            call()
        assert [float(c) for c in np.atleast_1d(np.asarray(v.storage))] == [10.0] * v.storage.size
        return
    call()
    if isinstance(expected, list):
        own = two.run(lambda: v.value)
        assert [float(part) for part in two.local_results(own)] == expected
        if aggregation == "none":
            with pytest.raises(mirrored.VariableError, match="cross-replica"):
                _ = v.value
        else:
            assert float(v) == AGGREGATED[aggregation](expected)
    else:
        assert float(v) == expected
        shards = [float(shard.data) for shard in v.storage.addressable_shards]
        assert shards == [expected] * 2


@pytest.mark.conformance(33)
def test_total_is_kept_when_the_number_of_replicas_changes():
    for replicas, start, parts in ((2, 4.0, [2.0, 2.0]), (4, 4.0, [1.0] * 4)):
        strategy = make_strategy(replicas)
        with strategy.scope():
            v = mirrored.Variable(0.0, synchronization="on_read", aggregation="sum")
            counts = mirrored.Variable(0, synchronization="on_read", aggregation="sum")
        v.assign(start)
        counts.assign(5)
        own = strategy.run(lambda v=v: v.value)
        assert [float(part) for part in strategy.local_results(own)] == parts
        assert int(counts) == 5


@pytest.mark.conformance(34)
def test_assigning_a_per_replica_value_from_outside_raises(two):
    with two.scope():
        v = mirrored.Variable(1.0, name="v")
    with pytest.raises(mirrored.VariableError, match="PerReplica"):
        v.assign(PerReplica([1.0, 2.0]))


@pytest.mark.conformance(35)
def test_variable_of_another_strategy(two):
    other = make_strategy(4)
    with two.scope():
        v = mirrored.Variable(1.0, name="mine")
    outside = mirrored.Variable(1.0, name="outside")
    with pytest.raises(mirrored.OwnershipError, match=r"'mine'.*2 devices.*4 devices"):
        other.run(lambda: v.assign_add(1.0))
    with pytest.raises(mirrored.OwnershipError, match=r"(?s)'outside'.*test_variable\.py:\d+"):
        two.run(lambda: outside.value + 1)


@pytest.mark.conformance(36)
def test_creation(strategy):
    with strategy.scope():
        v = mirrored.Variable(jax.random.normal(jax.random.key(0), (3,)))
        callable_value = mirrored.Variable(lambda: jnp.ones(2), dtype=jnp.bfloat16)
        with pytest.raises(mirrored.VariableError, match="MEAN"):
            mirrored.Variable(1, aggregation="mean")
    shards = {tuple(np.asarray(shard.data).tolist()) for shard in v.storage.addressable_shards}
    assert len(shards) == 1
    assert len(v.storage.sharding.device_set) == strategy.num_replicas_in_sync
    assert callable_value.dtype == jnp.bfloat16
    with pytest.raises(RuntimeError, match="created inside a replica function"):
        strategy.run(lambda: mirrored.Variable(1.0))
    with pytest.raises(RuntimeError, match="traces"):
        jax.jit(lambda: mirrored.Variable(1.0))()


def test_arithmetic_and_conversion(two):
    with two.scope():
        v = mirrored.Variable([1.0, 2.0], name="v")
        w = mirrored.Variable([3.0, 4.0])
    assert (v + w).tolist() == [4.0, 6.0]
    assert (1 - v).tolist() == [0.0, -1.0]
    assert (np.array([1.0, 1.0], "f") @ v).item() == 3.0
    assert (v @ w).item() == 11.0
    assert (-v).tolist() == [-1.0, -2.0]
    assert (v == w).tolist() == [False, False]
    assert (2**v).tolist() == [2.0, 4.0]
    assert jnp.sum(v).item() == 3.0
    assert np.asarray(v).tolist() == [1.0, 2.0]
    assert v[0].item() == 1.0
    assert len({v: 1, w: 2}) == 2
    assert "v" in repr(v)


def test_numpys_functions_take_it_for_an_array(two):
    with two.scope():
        v = mirrored.Variable([1.0, 2.0], name="v")
    assert np.sum(v) == 3.0
    assert np.mean(v) == 1.5
    assert np.maximum(np.array([5.0, 0.0]), v).tolist() == [5.0, 2.0]
    # Operators stay the variable's own, so that they work while a program is traced.
    assert isinstance(np.ones(2, "f") + v, jax.Array)
    assert isinstance(np.float32(2) * v, jax.Array)
    result = two.run(lambda x: np.float32(2) * v + np.ones(2, "f") * v + x, (1.0,))
    assert [part.tolist() for part in two.local_results(result)] == [[4.0, 7.0]] * 2


@pytest.mark.parametrize(
    "change",
    ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"],
)
def test_in_place_operators_are_refused(two, change):
    with two.scope():
        v = mirrored.Variable([1.0, 2.0], name="v")
    with pytest.raises(TypeError, match=r"'v'.*(?s:.)*hint: write variable\.assign"):
        getattr(operator, change)(v, 2.0)
    assert v.numpy().tolist() == [1.0, 2.0]


@pytest.mark.conformance(37)
def test_a_key_in_a_variable_differs_per_replica(two):
    with two.scope():
        key = mirrored.Variable(jax.random.key(3), name="key")

    def draw():
        number = jax.random.uniform(key.value)
        context = mirrored.get_replica_context()
        context.merge_call(lambda _: key.assign(jax.random.split(key.value)[0]))
        return number

    step = mirrored.function(lambda: two.run(draw))
    numbers = [[float(part) for part in two.local_results(step())] for _ in range(2)]
    assert len({*numbers[0], *numbers[1]}) == 4
    key.assign(jax.random.key(3))
    again = [[float(part) for part in two.local_results(step())] for _ in range(2)]
    assert again == numbers
    # It is the same as handing the key in.
    handed = two.run(jax.random.uniform, (jax.random.key(3),))
    assert [float(part) for part in two.local_results(handed)] == numbers[0]
    with pytest.raises(mirrored.VariableError, match="differ between replicas"):
        two.run(lambda: key.assign(jax.random.split(key.value)[0]))
    with pytest.raises(mirrored.VariableError, match="'key'"):
        key.assign(np.ones(2, "uint32")[0])
    for refused in ({"synchronization": "on_read"}, {"aggregation": "sum"}):
        with two.scope(), pytest.raises(mirrored.VariableError, match=r"'k'.*random key"):
            mirrored.Variable(jax.random.key(3), name="k", **refused)


def test_shapes_and_dtypes_are_checked(two):
    with two.scope():
        v = mirrored.Variable([1.0, 2.0], name="v")
        n = mirrored.Variable(3, name="n")
    with pytest.raises(mirrored.VariableError, match=r"\(2,\).*\(3,\)"):
        v.assign([1.0, 2.0, 3.0])
    with pytest.raises(mirrored.VariableError, match="shape"):
        v.assign(1.0)
    with pytest.raises(mirrored.VariableError, match="int32"):
        n.assign(1.5)
    v.assign_add(1.0)
    assert v.numpy().tolist() == [2.0, 3.0]
    v.assign(np.array([1.0, 2.0], "float64"))
    assert v.dtype == v.storage.dtype == jnp.float32


def test_a_value_read_before_a_step_stays_readable(two):
    with two.scope():
        v = mirrored.Variable(np.ones(4, "f"))
    before, alias = v.value, jnp.asarray(v)

    @mirrored.function
    def step():
        two.run(lambda: v.assign_add(1.0))

    step()
    step()
    assert before.tolist() == alias.tolist() == [1.0] * 4
    assert v.numpy().tolist() == [3.0] * 4


def test_writes_inside_control_flow(two):
    with two.scope():
        total = mirrored.Variable(0.0, aggregation="sum")
        parts = mirrored.Variable(0.0, synchronization="on_read", aggregation="sum")
        steps = mirrored.Variable(0)

    def replica_function(x):
        def body(carry, row):
            total.assign_add(row)
            parts.assign_add(row)
            steps.assign_add(1)
            return carry, None

        jax.lax.scan(body, 0, x)
        jax.lax.cond(steps.value.max() > -1, lambda: None, lambda: None)
        jax.lax.fori_loop(0, 3, lambda i, c: [steps.assign_add(1), c][1], 0)

    @mirrored.function
    def step(x):
        def outer(carry, _):
            two.run(replica_function, (x,))
            steps.assign_add(10)
            return carry, None

        jax.lax.scan(outer, 0, None, length=2)

    step(PerReplica([[1.0, 2.0], [3.0, 4.0]]))
    assert float(total) == 20.0
    assert float(parts) == 20.0
    assert int(steps) == 2 * (2 + 3 + 10)


def test_merge_call_reads_the_stored_value(two):
    with two.scope():
        w = mirrored.Variable(2.0, name="w")
        ema = mirrored.Variable(0.0, name="ema")

    def straight():
        ema.assign(0.5 * ema + 0.5 * w)

    with pytest.raises(mirrored.VariableError, match="merge_call"):
        two.run(straight)

    def merged():
        context = mirrored.get_replica_context()
        context.merge_call(lambda strategy: ema.assign(0.5 * ema + 0.5 * w))

    two.run(merged)
    assert float(ema) == 1.0
    with two.debug():
        two.run(merged)
    assert float(ema) == 1.5


def test_a_variable_shares_no_memory_with_the_array_it_was_made_from(two):
    size = 1024
    raw = np.zeros(size * 4 + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    array = raw[offset : offset + size * 4].view("f")
    with two.scope():
        made = mirrored.Variable(array)
        assigned = mirrored.Variable(np.zeros(size, "f"))
    assigned.assign(array)
    mirror = two.placement.mirror(array)
    array[:] = 7.0
    assert float(made.value.max()) == float(assigned.value.max()) == float(mirror.max()) == 0.0
