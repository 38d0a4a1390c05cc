"""What training on parameter servers means: shards, placement, staleness, each update once."""

from __future__ import annotations

import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import ENGINES, cluster

import mirrored


@pytest.fixture(params=list(ENGINES))
def engine(request):
    return request.param


PARTITIONERS = [
    mirrored.FixedShardsPartitioner(2),
    mirrored.FixedShardsPartitioner(5),
    mirrored.MinSizePartitioner(4, 2),
    mirrored.MinSizePartitioner(4, 10),
    mirrored.MinSizePartitioner(256 << 10, 8),
    mirrored.MinSizePartitioner(100, 8),
    mirrored.MaxSizePartitioner(4),
    mirrored.MaxSizePartitioner(4, 2),
    mirrored.MaxSizePartitioner(1024),
    mirrored.MaxSizePartitioner(100),
]
# The shards that tf.distribute.experimental.partitioners of 2.21 make of float32 arrays.
SHARDS = {
    (13, 2): [2, 5, 2, 10, 1, 2, 13, 2, 1, 2],
    (6, 1): [2, 5, 2, 6, 1, 1, 6, 2, 1, 1],
    (1, 5): [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    (1000, 64): [2, 5, 2, 10, 1, 8, 1000, 2, 250, 1000],
    (7,): [2, 5, 2, 7, 1, 1, 7, 2, 1, 1],
    (1000000, 64): [2, 5, 2, 10, 8, 8, 1000000, 2, 250000, 1000000],
}


@pytest.mark.conformance(56)
@pytest.mark.parametrize("shape", list(SHARDS))
def test_partitioners_are_those_of_tf_distribute(shape):
    found = [partitioner(shape, np.dtype("f")) for partitioner in PARTITIONERS]
    assert [shards[0] for shards in found] == SHARDS[shape]
    assert all(shards[1:] == [1] * (len(shape) - 1) for shards in found)


@pytest.mark.conformance(56)
@pytest.mark.parametrize(
    ("engine", "count", "sizes"),
    [("threads", 2, [7, 6]), ("threads", 5, [3, 3, 3, 2, 2]), ("ray", 5, [3, 3, 3, 2, 2])],
)
def test_thirteen_rows_in_shards(engine, count, sizes):
    values = np.arange(26, dtype="f").reshape(13, 2)
    partitioner = mirrored.FixedShardsPartitioner(count)
    with cluster(engine, servers=2, variable_partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            v = mirrored.Variable(values, name="v")
        spec = strategy.home.spec_of(v)
        assert [part.piece.shape[0] for part in spec.parts] == sizes
        np.testing.assert_array_equal(v.numpy(), values)

        def closure(delta):
            v.assign_add(delta)

        coordinator.schedule(closure, args=(values,))
        coordinator.join(60)
        np.testing.assert_array_equal(v.numpy(), 2 * values)


@pytest.mark.conformance(56)
def test_looking_rows_up_reads_only_those_rows(engine):
    partitioner = mirrored.FixedShardsPartitioner(2)
    with cluster(engine, servers=2, variable_partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            table = mirrored.EmbeddingTable(13, 3, name="table")

        def step(ids):
            return table.lookup(ids)

        def closure():
            return strategy.run(step, args=(np.array([[0, 4], [4, 0], [0, 12]]),))

        rows = coordinator.schedule(closure).fetch(60)
        read = [server.tables[-1]["rows_read"] for server in coordinator.status().servers]
        assert read == [2, 1]
        np.testing.assert_array_equal(rows, table.numpy()[[[0, 4], [4, 0], [0, 12]]])


@pytest.mark.conformance(57)
def test_variables_go_where_the_fewest_bytes_are():
    with cluster(servers=2) as (strategy, coordinator):
        with strategy.scope():
            # In turn, both large ones would be on server 0.
            kept = [mirrored.Variable(np.zeros(size, "f")) for size in (1000, 1, 1000, 1, 10)]
        assert [server.bytes for server in coordinator.status().servers] == [4004 + 40, 4 + 4000]
        assert len(kept) == 5


# --- one worker, synchronous: what one device gives ---------------------------------------------


def train_embedding(strategy, run, tx, *, rows, steps, dense_update=False):
    """Trains a table and a dense layer; one function for servers and for one device."""
    generator = np.random.default_rng(1)
    start = generator.normal(size=(rows, 4)).astype("f")
    with strategy.scope():
        if dense_update:
            table = mirrored.Variable(start, name="table")
        else:
            table = mirrored.EmbeddingTable(rows, 4, name="table")
            table.assign(start)
        W = mirrored.Variable(np.full((4, 1), 0.5, "f"), name="W")
        optimizer = mirrored.Optimizer(tx)

    def step(ids, y):
        def loss_fn():
            rows = table.value[ids] if dense_update else table.lookup(ids)
            return jnp.mean((rows.sum(1) @ W - y) ** 2)

        loss, gradients = mirrored.value_and_grad(loss_fn, [table, W])
        optimizer.apply_gradients(zip(gradients, [table, W]))
        return loss

    losses = []
    for _ in range(steps):
        ids = generator.integers(0, rows, size=(3, 5))
        y = generator.normal(size=(3, 1)).astype("f")
        losses.append(run(strategy, step, (ids, y)))
    return np.asarray(losses), table.numpy(), W.numpy()


def on_workers(coordinator):
    def run(strategy, step, args):
        def closure(*args):
            return strategy.run(step, args=args)

        return float(coordinator.schedule(closure, args=args).fetch(60))

    return run


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_rows_are_updated_as_a_dense_reference(engine, name, kind):
    """Adam moves a row's state in the steps that use it: here each uses all of 4 rows."""
    rows = {"sgd": 50, "adagrad": 50, "adam": 2}[name]
    tx = {"sgd": optax.sgd(0.1), "adagrad": optax.adagrad(0.1), "adam": optax.adam(0.01)}[name]
    expected = train_embedding(
        mirrored.OneDeviceStrategy("cpu:0"),
        lambda strategy, step, args: float(strategy.reduce("mean", strategy.run(step, args=args))),
        tx,
        rows=rows,
        steps=6,
        dense_update=True,
    )
    with cluster(engine, workers=1, servers=2, staleness=kind) as (strategy, coordinator):
        found = train_embedding(strategy, on_workers(coordinator), tx, rows=rows, steps=6)
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-7)


def test_rows_that_a_step_does_not_use_keep_their_state(engine):
    """Lazy Adam, against the same written with NumPy."""
    with cluster(engine, workers=1, servers=2) as (strategy, coordinator):
        with strategy.scope():
            table = mirrored.EmbeddingTable(6, 2, name="table")
            optimizer = mirrored.Optimizer(optax.adam(0.1))

        def step(ids):
            _, gradient = mirrored.value_and_grad(lambda: jnp.sum(table.lookup(ids) ** 2), table)
            optimizer.apply_gradients([(gradient, table)])

        def closure(ids):
            strategy.run(step, args=(ids,))

        values = table.numpy()
        m, v, counts = np.zeros_like(values), np.zeros_like(values), [0, 0]
        for ids in ([0, 1, 1], [1, 5], [5, 5], [0, 4]):
            coordinator.schedule(closure, args=(np.array(ids),)).fetch(60)
            gradient = np.zeros_like(values)
            np.add.at(gradient, ids, 2 * values[ids])
            for server in (0, 1):
                used = np.array([row for row in sorted(set(ids)) if row // 3 == server], int)
                if not len(used):
                    continue
                counts[server] += 1
                m[used] = 0.9 * m[used] + 0.1 * gradient[used]
                v[used] = 0.999 * v[used] + 0.001 * gradient[used] ** 2
                scale = m[used] / (1 - 0.9 ** counts[server])
                root = np.sqrt(v[used] / (1 - 0.999 ** counts[server]))
                values[used] -= 0.1 * scale / (root + 1e-8)
        np.testing.assert_allclose(table.numpy(), values, rtol=1e-5, atol=1e-6)


TRANSFORMATIONS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.01, 3), weight_decay=0.1),
    "lion": lambda: optax.lion(0.01),
    "lamb": lambda: optax.lamb(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.rmsprop(0.01)),
    "adafactor": lambda: optax.adafactor(0.1),
    "masked": lambda: optax.masked(optax.adam(0.1), [True, False]),
}


@pytest.mark.parametrize("name", list(TRANSFORMATIONS))
def test_any_optax_transformation(engine, name):
    def train(strategy, run):
        with strategy.scope():
            W = mirrored.Variable(np.linspace(-1, 1, 12, dtype="f").reshape(4, 3), name="W")
            b = mirrored.Variable(np.zeros(3, "f"), name="b")
            optimizer = mirrored.Optimizer(TRANSFORMATIONS[name]())

        def step(x):
            _, gradients = mirrored.value_and_grad(lambda: jnp.sum((x @ W + b) ** 2), [W, b])
            optimizer.apply_gradients(zip(gradients, [W, b]))
            return x[0, 0]

        for number in range(4):
            run(strategy, step, (np.full((2, 4), 0.1 * number - 0.2, "f"),))
        return W.numpy(), b.numpy()

    expected = train(
        mirrored.OneDeviceStrategy("cpu:0"),
        lambda strategy, step, args: strategy.run(step, args=args),
    )
    with cluster(engine, workers=1) as (strategy, coordinator):
        found = train(strategy, on_workers(coordinator))
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_transformations_across_elements_need_all_of_them(engine):
    with cluster(engine, workers=1, servers=2) as (strategy, coordinator):
        with strategy.scope():
            W = mirrored.Variable(np.ones((4, 3), "f"), name="W")
            b = mirrored.Variable(np.ones(3, "f"), name="b")
            optimizer = mirrored.Optimizer(optax.lamb(0.1), name="lamb")

        def step():
            _, gradients = mirrored.value_and_grad(lambda: jnp.sum(W * b), [W, b])
            optimizer.apply_gradients(zip(gradients, [W, b]))

        coordinator.schedule(lambda: strategy.run(step))
        with pytest.raises(mirrored.ArgumentError, match="across the elements"):
            coordinator.join(60)


def test_nothing_is_compiled_anew_for_other_ids(engine):
    """Row counts are padded to a few sizes: one program a size, not one a batch."""
    with cluster(engine, workers=1) as (strategy, coordinator):
        with strategy.scope():
            table = mirrored.EmbeddingTable(1000, 2, name="table")
            optimizer = mirrored.Optimizer(optax.adagrad(0.1))

        def step(ids):
            traces.append(ids.shape)
            _, gradient = mirrored.value_and_grad(lambda: jnp.sum(table.lookup(ids)), table)
            optimizer.apply_gradients([(gradient, table)])
            return len(traces)

        traces = []

        def closure(ids):
            return strategy.run(step, args=(ids,))

        generator = np.random.default_rng(0)
        counted = [
            coordinator.schedule(closure, args=(generator.integers(0, high, 64),)).fetch(60)
            for high in [1000] * 10 + [16] * 10 + [20] * 5
        ]
        # Once to find the lookups, then once for each of the sizes 64, 16 and 24.
        assert counted[-1] == max(counted) == 4
        assert len(set(counted[:10])) == 1


# --- each update once ---------------------------------------------------------------------------


@pytest.mark.conformance(54)
@pytest.mark.parametrize("moment", [0, 2, 3, 5, 8, 11])
def test_a_worker_killed_at_any_message_loses_and_doubles_nothing(moment):
    """With step ids: whatever the moment, every addition counts once."""
    sent = []

    def listener(worker, operation):
        if worker == 0:
            sent.append(operation)
            if len(sent) == moment:
                engine.kill_worker(0)

    options = {"listener": listener}
    with cluster(workers=2, servers=2, engine_options=options) as (strategy, coordinator):
        engine = strategy.engine
        with strategy.scope():
            a = mirrored.Variable(0.0, name="a")
            b = mirrored.Variable(np.zeros(3, "f"), name="b")
            W = mirrored.Variable(np.zeros(2, "f"), name="W")
            table = mirrored.EmbeddingTable(4, 1, lambda key, shape, dtype: jnp.zeros(shape))
            optimizer = mirrored.Optimizer(optax.sgd(1.0))

        def step(ids):
            def loss_fn():
                return -jnp.sum(W) - jnp.sum(table.lookup(ids))

            _, gradients = mirrored.value_and_grad(loss_fn, [W, table])
            optimizer.apply_gradients(zip(gradients, [W, table]))
            b.assign_add(jnp.ones(3))

        def closure():
            a.assign_add(1.0)
            for _ in range(2):
                strategy.run(step, args=(np.array([0, 3, 3]),))
            a.assign_add(1.0)

        for _ in range(6):
            coordinator.schedule(closure)
        coordinator.join(60)
        assert float(a) == 12.0
        assert b.numpy().tolist() == [12.0] * 3
        assert W.numpy().tolist() == [12.0] * 2
        assert table.numpy().ravel().tolist() == [12.0, 0.0, 0.0, 24.0]


def test_there_is_one_coordinator_of_a_strategy(engine):
    """Two would give closures the same numbers, and updates would be taken for repeated."""
    with cluster(engine) as (strategy, coordinator):
        assert mirrored.ClusterCoordinator(strategy) is coordinator
        with strategy.scope():
            v = mirrored.Variable(0.0, name="v")
        for each in (coordinator, mirrored.ClusterCoordinator(strategy)):
            each.schedule(lambda: v.assign_add(1.0) and None)
            each.join(60)
        assert float(v) == 2.0


# --- staleness ----------------------------------------------------------------------------------


def uneven(strategy, coordinator, closures, steps=4, pauses=(0.0, 0.004)):
    """Takes steps on two workers of very different speed; returns the sum of all of them."""
    with strategy.scope():
        W = mirrored.Variable(np.zeros(2, "f"), name="W")
        count = mirrored.Variable(0.0, name="count")
        optimizer = mirrored.Optimizer(optax.sgd(1.0))

    def step(amount):
        _, gradient = mirrored.value_and_grad(lambda: -amount * jnp.sum(W), W)
        optimizer.apply_gradients([(gradient, W)])
        count.assign_add(1.0)

    def closure(amount):
        for _ in range(steps):
            time.sleep(pauses[mirrored.current_worker_index() % len(pauses)])
            strategy.run(step, args=(amount,))

    for _ in range(closures):
        coordinator.schedule(closure, args=(np.float32(1.0),))
    coordinator.join(120)
    return W, count


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_bounds_really_hold(engine, bound):
    with cluster(engine, staleness=mirrored.bounded(bound)) as (strategy, coordinator):
        W, count = uneven(strategy, coordinator, closures=12)
        keeper = coordinator.status().servers[0]
        assert keeper.farthest_ahead <= bound
        # Of two processes one may be done before the other has compiled its step.
        assert bound == 0 or engine != "threads" or keeper.farthest_ahead > 0
        assert W.numpy().tolist() == [48.0, 48.0]
        assert float(count) == 48.0


def test_asynchronous_workers_wait_for_nobody(engine):
    with cluster(engine) as (strategy, coordinator):
        W, _ = uneven(strategy, coordinator, closures=20)
        assert W.numpy().tolist() == [80.0, 80.0]
        # A step began from values that other workers' updates had left behind; of two
        # processes one may be done before the other has compiled its step.
        most = coordinator.status().servers[0].staleness_most
        assert most <= 80
        assert engine != "threads" or most > 0


def test_a_synchronous_step_is_the_mean_of_all_workers(engine):
    """24 gradients of 1 in 12 steps of 2 workers; what is counted is counted for each."""
    with cluster(engine, servers=2, staleness="sync") as (strategy, coordinator):
        before = coordinator.status().servers[0].round
        W, count = uneven(strategy, coordinator, closures=6)
        rounds = coordinator.status().servers[0].round - before
        assert W.numpy().tolist() == [float(rounds)] * 2
        assert 12 <= rounds <= 14  # at the end one worker may be alone
        assert float(count) == 24.0


def test_backup_workers_are_not_waited_for(engine):
    with cluster(engine, workers=3, servers=2, staleness="sync", backup_workers=1) as (
        strategy,
        coordinator,
    ):
        W, _ = uneven(strategy, coordinator, closures=9, pauses=(0.0, 0.0, 0.02))
        status = coordinator.status().servers[0]
        # Two gradients make a step; those that came too late were left out, not added.
        assert W.numpy().tolist() == [float(status.round)] * 2
        assert engine != "threads" or status.late > 0
        assert 36 == 9 * 4 >= status.round


@pytest.mark.parametrize("staleness", ["sync", mirrored.bounded(1)])
def test_a_dead_worker_does_not_block_the_rest(engine, staleness):
    with cluster(engine, workers=3, staleness=staleness) as (strategy, coordinator):
        with strategy.scope():
            W = mirrored.Variable(0.0, name="W")
            count = mirrored.Variable(0.0, name="count")
            optimizer = mirrored.Optimizer(optax.sgd(1.0))

        def step():
            _, gradient = mirrored.value_and_grad(lambda: -W.value, W)
            optimizer.apply_gradients([(gradient, W)])
            count.assign_add(1.0)

        def closure():
            for _ in range(3):
                time.sleep(0.002)
                strategy.run(step)

        for number in range(16):
            coordinator.schedule(closure)
            if number in (5, 10):
                strategy.engine.kill_worker(number % 3)
        coordinator.join(60)
        assert float(count) == 48.0
        if staleness != "sync":
            assert float(W) == 48.0


def test_workers_join_and_leave_while_training(engine):
    with cluster(engine, workers=1, staleness=mirrored.bounded(2)) as (strategy, coordinator):
        with strategy.scope():
            v = mirrored.Variable(0.0, name="v")

        def closure():
            time.sleep(0.002)
            v.assign_add(1.0)
            return mirrored.current_worker_index()

        values = [coordinator.schedule(closure) for _ in range(10)]
        new = coordinator.add_worker()
        values += [coordinator.schedule(closure) for _ in range(20)]
        coordinator.join(60)
        assert {0, new} == set(coordinator.fetch(values))
        coordinator.remove_worker(0)
        values = [coordinator.schedule(closure) for _ in range(10)]
        coordinator.join(60)
        assert set(coordinator.fetch(values)) == {new}
        assert float(v) == 40.0


# --- restoring ----------------------------------------------------------------------------------


@pytest.mark.conformance(56)
def test_a_checkpoint_restores_into_other_shards(engine, tmp_path):
    """The next steps are what they would have been, on 1 server in 3 shards instead of 2 in 2."""

    def program(strategy):
        with strategy.scope():
            table = mirrored.EmbeddingTable(13, 2, name="table")
            W = mirrored.Variable(np.full((13, 2), 0.5, "f"), name="W")
            half = mirrored.Variable(np.ones(5, jnp.bfloat16), name="half")
            optimizer = mirrored.Optimizer(optax.adam(0.1))

        def step(ids):
            def loss_fn():
                return jnp.sum((table.lookup(ids) - W.value[ids]) ** 2)

            _, gradients = mirrored.value_and_grad(loss_fn, [table, W])
            optimizer.apply_gradients(zip(gradients, [table, W]))
            half.assign_add(jnp.ones(5, jnp.bfloat16))

        def closure(ids):
            strategy.run(step, args=(ids,))

        return closure, (table, W, half)

    # All rows, so that every shard's count of steps is the same.
    batches = [np.random.default_rng(n).permutation(13) for n in range(4)]
    with cluster(engine, 1, 2, variable_partitioner=mirrored.FixedShardsPartitioner(2)) as (
        strategy,
        coordinator,
    ):
        closure, things = program(strategy)
        for ids in batches[:2]:
            coordinator.schedule(closure, args=(ids,)).fetch(60)
        coordinator.save(tmp_path)
        for ids in batches[2:]:
            coordinator.schedule(closure, args=(ids,)).fetch(60)
        expected = [thing.numpy() for thing in things]
    with cluster(engine, 1, 1, variable_partitioner=mirrored.FixedShardsPartitioner(3)) as (
        strategy,
        coordinator,
    ):
        closure, things = program(strategy)
        assert coordinator.restore(tmp_path)
        for ids in batches[2:]:
            coordinator.schedule(closure, args=(ids,)).fetch(60)
        for thing, theirs in zip(things, expected):
            np.testing.assert_allclose(
                np.asarray(thing.numpy(), "f"), np.asarray(theirs, "f"), rtol=1e-6
            )


# --- what workers have --------------------------------------------------------------------------


def test_per_worker_values_are_made_once_on_each_worker(engine):
    with cluster(engine) as (strategy, coordinator):
        with strategy.scope():
            made = mirrored.Variable(0.0, name="made")

        def make():
            made.assign_add(1.0)
            return {"number": 5}

        value = coordinator.create_per_worker_value(make)

        def closure(value):
            time.sleep(0.002)
            return value["number"] + mirrored.current_worker_index()

        results = coordinator.fetch([coordinator.schedule(closure, args=(value,)) for _ in "x" * 9])
        assert set(results) == {5, 6}
        assert float(made) == 2.0


def test_the_end_of_a_workers_data_reaches_the_program(engine):
    with cluster(engine, workers=1) as (_, coordinator):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: [1, 2]))
        results = [
            coordinator.schedule(lambda batches: next(batches), args=(iterator,)) for _ in "123"
        ]
        with pytest.raises(StopIteration):
            coordinator.join(60)
        assert coordinator.fetch(results[:2]) == [1, 2]


def test_things_made_on_workers_are_refused(engine):
    with cluster(engine, workers=1) as (_, coordinator):

        def closure():
            mirrored.Variable(1.0, name="late")

        coordinator.schedule(closure)
        with pytest.raises(mirrored.ContextError, match="'late' was made on a worker"):
            coordinator.join(60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster": {"worker": 2}}, "numbers of, or lists"),
        ({"cluster": {"worker": 2, "ps": 1}, "worker_count": 2}, "one of the two"),
        ({"worker_count": 0}, "at least one of each"),
        ({"staleness": "sometimes"}, r"bounded\(k\)"),
        ({"backup_workers": 1}, "where steps wait"),
        ({"on_server_failure": "ignore"}, "restore"),
        ({"engine": "fast"}, "'threads', 'ray'"),
        ({"engine": "threads", "address": "auto"}, "with Ray only"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(mirrored.ArgumentError, match=message):
        mirrored.ParameterServerStrategy(**arguments)


def test_ids_out_of_range_are_refused_before_anything_is_sent(engine):
    with cluster(engine, workers=1) as (strategy, coordinator):
        with strategy.scope():
            table = mirrored.EmbeddingTable(10, 2, name="items")
        with pytest.raises(mirrored.ArgumentError, match="id 10 was looked up in table 'items'"):
            table.lookup([3, 10])
        with pytest.raises(mirrored.ArgumentError, match="id -1"):
            table.lookup([-1])
        with pytest.raises(mirrored.ArgumentError, match="integers"):
            table.lookup([0.5])
        assert coordinator.status().servers[0].tables[-1]["rows_read"] == 0
