"""A dense part in lockstep with a table on servers, and training that is not in lockstep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make_strategy
from parameter_servers import cluster

import mirrored

TABLE = np.random.default_rng(3).normal(size=(30, 4)).astype("f")


def batches():
    generator = np.random.default_rng(4)
    for _ in range(3):
        yield generator.integers(0, 30, (13, 3)), generator.normal(size=13).astype("f")


def squared_error(rows, w, y):
    return mirrored.mean((rows.sum(axis=1) @ w.value - y) ** 2)


def on_one_device():
    strategy = mirrored.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        table = mirrored.Variable(TABLE, name="table")
        w = mirrored.Variable(np.ones(4, "f"), name="w")
        optimizer = mirrored.Optimizer(optax.adam(0.1))
        table_optimizer = mirrored.Optimizer(optax.adagrad(0.1))

    def step(ids, y):
        def loss_fn():
            return squared_error(table.value[ids], w, y)

        loss, (of_table, of_w) = mirrored.value_and_grad(loss_fn, [table, w])
        table_optimizer.apply_gradients([(of_table, table)])
        optimizer.apply_gradients([(of_w, w)])
        return loss

    losses = [float(strategy.run(step, args=batch)) for batch in batches()]
    return losses, table.numpy(), w.numpy()


@pytest.mark.parametrize(("engine", "replicas"), [("threads", 1), ("threads", 8), ("ray", 3)])
def test_a_dense_part_in_lockstep_with_a_table_on_servers(engine, replicas):
    """Exact, on any number of replicas; 13 rows divide by none of them."""
    losses, expected_table, expected_w = on_one_device()
    with cluster(engine, workers=1, servers=2) as (servers, _):
        with servers.scope():
            table = mirrored.EmbeddingTable(30, 4, name="table")
            table.assign(TABLE)
            table_optimizer = mirrored.Optimizer(optax.adagrad(0.1))
        strategy = make_strategy(replicas)
        with strategy.scope():
            w = mirrored.Variable(np.ones(4, "f"), name="w")
            optimizer = mirrored.Optimizer(optax.adam(0.1))

        @mirrored.function
        def train_step(rows, y):
            def step(rows, y):
                traces.append(rows.values.shape)

                def loss_fn():
                    return squared_error(rows.lookup(), w, y)

                loss, (of_rows, of_w) = mirrored.value_and_grad(loss_fn, [rows, w])
                optimizer.apply_gradients([(of_w, w)])
                return loss, of_rows

            return strategy.run(step, args=(rows, y))

        traces, found = [], []
        for ids, y in strategy.distribute_dataset(list(batches())):
            rows = table.pull(ids)
            loss, of_rows = train_step(rows, y)
            table_optimizer.apply_gradients([(rows.gradient(of_rows), table)])
            found.append(float(loss))
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        np.testing.assert_allclose(table.numpy(), expected_table, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(w.numpy(), expected_w, rtol=1e-5, atol=1e-6)
        # At most 30 different rows a batch: sizes 24 and 32.
        assert {shape[0] for shape in traces} <= {24, 32}


def test_pull_checks_what_it_is_given():
    with cluster(workers=1) as (servers, _):
        with servers.scope():
            table = mirrored.EmbeddingTable(30, 4, name="table")
        with pytest.raises(mirrored.ArgumentError, match="integers"):
            table.pull(np.zeros(3, "f"))
        with pytest.raises(mirrored.ArgumentError, match="id 30"):
            table.pull([1, 30])
        with pytest.raises(mirrored.ArgumentError, match="not placed"):
            table.pull(mirrored.PerReplica([[1], [2]]))
        rows = table.pull([3, 3, 9])
        assert rows.values.shape == (16, 4)
        assert rows.places.tolist() == [0, 0, 1]
        with pytest.raises(mirrored.ArgumentError, match="returned for them"):
            rows.gradient(np.zeros((2, 4)))
        gradient = rows.gradient(jnp.ones((16, 4)))
        assert gradient.indices.tolist() == [3, 9]


def test_tables_are_set_and_read_by_rows():
    with cluster(workers=1, servers=2) as (servers, _):
        with servers.scope():
            table = mirrored.EmbeddingTable(9000, 2, jax.nn.initializers.zeros, name="table")
        table.assign([[1.0, 2.0], [3.0, 4.0]], ids=[8999, 0])
        assert table.numpy()[[0, 1, 8999]].tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
        table.assign(np.ones((9000, 2)))
        assert table.numpy().sum() == 18000
        with pytest.raises(mirrored.ArgumentError, match="different ids"):
            table.assign([[1.0, 2.0]] * 2, ids=[5, 5])
        with pytest.raises(mirrored.ArgumentError, match="values of shape"):
            table.assign([[1.0]], ids=[5])
