"""A dense part in lockstep with a table on servers, and training that is not in lockstep."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import lockstep_and_servers
import numpy as np
import optax
import pytest
from conftest import make_strategy
from lockstep_and_servers import TABLE, batches, squared_error, train
from parameter_servers import cluster

import mirrored


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
        found, table, w, sizes = train(make_strategy(replicas), servers)
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        np.testing.assert_allclose(table.numpy(), expected_table, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(w, expected_w, rtol=1e-5, atol=1e-6)
        # At most 30 different rows a batch.
        assert set(sizes) <= {20, 24, 28, 32}


def test_processes_in_lockstep_share_servers_and_give_what_one_gives(tmp_path):
    """What they write is written once, and nobody reads what was there before."""
    with cluster("threads", workers=1, servers=2) as (servers, _):
        losses, table, expected_w, _ = train(make_strategy(4), servers, table_rule=optax.adam(0.1))
        expected_table = table.numpy()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, lockstep_and_servers.__file__, address, "2"]
    processes = [
        subprocess.Popen(
            [*command, str(number), "2", str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    lines = [line for output in outputs for line in output.splitlines() if "RESULT" in line]
    one, other = (json.loads(line.partition("RESULT")[2]) for line in lines)
    assert one == other
    assert (one["zeros"], one["again"]) == (0.0, True)
    np.testing.assert_allclose(one["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(one["table"], expected_table, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one["w"], expected_w, rtol=1e-5, atol=1e-6)


def test_shared_servers_have_no_workers():
    strategy = make_strategy(2)
    with pytest.raises(mirrored.ArgumentError, match="shared_with and 2 workers"):
        mirrored.ParameterServerStrategy(worker_count=2, shared_with=strategy)
    with pytest.raises(mirrored.ArgumentError, match="shared_with='servers'"):
        mirrored.ParameterServerStrategy(shared_with="servers")
    with mirrored.ParameterServerStrategy({"ps": 2}, shared_with=strategy) as servers:
        assert (servers.worker_count, servers.server_count) == (0, 2)
        with pytest.raises(mirrored.ContextError, match="shared with another strategy"):
            mirrored.ClusterCoordinator(servers).schedule(print)


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
