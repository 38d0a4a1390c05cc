"""A program on parameter servers is saved whole, and goes on with another number of servers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import make_strategy

import mirrored
import mirrored.checkpoint


def program(strategy):
    with strategy.scope():
        table = mirrored.EmbeddingTable(6, 2, name="table")
        W = mirrored.Variable(np.full((6, 2), 0.5, "f"), name="W")
        optimizer = mirrored.Optimizer(optax.adam(0.1))

    def step(ids):
        def loss_fn():
            return jnp.sum((table.lookup(ids) - W.value[ids]) ** 2)

        _, gradients = mirrored.value_and_grad(loss_fn, [table, W])
        optimizer.apply_gradients(zip(gradients, [table, W]))

    def closure(ids):
        strategy.run(step, args=(ids,))

    return closure, table, W, optimizer


def run(coordinator, closure, start, stop):
    for number in range(start, stop):
        ids = np.random.default_rng(number).permutation(6)
        coordinator.schedule(closure, args=(ids,)).fetch(60)


@pytest.mark.parametrize("engine", ["threads", "ray"])
def test_a_program_goes_on_where_it_was_saved(engine, tmp_path):
    arguments = {"checkpoint_directory": str(tmp_path / "servers")}
    with make_strategy(engine, 1, 2, **arguments) as strategy:
        coordinator = mirrored.ClusterCoordinator(strategy)
        closure, table, W, _ = program(strategy)
        state = {"servers": coordinator, "epoch": 0}
        checkpoint = mirrored.checkpoint.Checkpoint(tmp_path / "program", state)
        run(coordinator, closure, 0, 2)
        state["epoch"] = 7
        checkpoint.save(2)
        run(coordinator, closure, 2, 4)
        expected = table.numpy(), W.numpy()
        checkpoint.wait()
    with make_strategy(engine, 1, 1, **arguments) as strategy:
        coordinator = mirrored.ClusterCoordinator(strategy)
        closure, table, W, _ = program(strategy)
        state = {"servers": coordinator, "epoch": 0}
        checkpoint = mirrored.checkpoint.Checkpoint(tmp_path / "program", state)
        assert checkpoint.restore() == 2
        assert state["epoch"] == 7
        run(coordinator, closure, 2, 4)
        np.testing.assert_allclose(table.numpy(), expected[0], rtol=1e-6)
        np.testing.assert_allclose(W.numpy(), expected[1], rtol=1e-6)


def test_variables_alone_and_what_cannot_be_saved_alone(tmp_path):
    with make_strategy(workers=1) as strategy:
        coordinator = mirrored.ClusterCoordinator(strategy)
        _, _, W, optimizer = program(strategy)
        checkpoint = mirrored.checkpoint.Checkpoint(tmp_path, {"W": W})
        checkpoint.save(1)
        W.assign(np.zeros((6, 2), "f"))
        checkpoint.restore()
        assert W.numpy().tolist() == [[0.5, 0.5]] * 6
        for thing, message in ((optimizer, "on parameter servers"), (coordinator, "no checkpoint")):
            other = mirrored.checkpoint.Checkpoint(tmp_path / "other", {"thing": thing})
            with pytest.raises(mirrored.CheckpointError, match=message):
                other.save(1)
