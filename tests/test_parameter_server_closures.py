"""Closures: what is scheduled runs, its errors follow tf.distribute's rules."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import ENGINES, cluster

import mirrored


@pytest.fixture(params=list(ENGINES))
def engine(request):
    return request.param


@pytest.mark.conformance(52)
def test_five_additions_are_five(engine):
    with cluster(engine) as (strategy, coordinator):
        with strategy.scope():
            v = mirrored.Variable(0.0, name="v")

        def closure():
            v.assign_add(1.0)
            return v.read_value()

        values = [coordinator.schedule(closure) for _ in range(5)]
        coordinator.join(60)
        assert float(v) == 5.0
        assert coordinator.done()
        fetched = coordinator.fetch({"a": values[0], "b": 3})
        assert fetched["b"] == 3
        assert 1.0 <= float(fetched["a"]) <= 5.0


@pytest.mark.conformance(53)
def test_an_error_is_raised_once_and_cancels_what_waits(engine):
    with cluster(engine, workers=1) as (_, coordinator):

        def fails():
            raise ZeroDivisionError("on purpose")

        def fine():
            return 1

        failed = coordinator.schedule(fails)
        waiting = []
        # The one that runs when the error comes may be over; what waits behind is cancelled.
        try:
            waiting = [coordinator.schedule(fine) for _ in range(20)]
        except ZeroDivisionError:
            pass
        else:
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                coordinator.join(60)
        with pytest.raises(ZeroDivisionError):
            failed.fetch()
        for value in waiting:
            with pytest.raises(mirrored.CancelledError, match="cancelled"):
                value.fetch(60)
        coordinator.join(60)
        assert coordinator.schedule(fine).fetch(60) == 1


@pytest.mark.conformance(53)
@pytest.mark.parametrize("ask", ["schedule", "done"])
def test_schedule_and_done_raise_stored_errors(engine, ask):
    with cluster(engine, workers=1) as (_, coordinator):

        def fails():
            raise ZeroDivisionError("on purpose")

        with pytest.raises(ZeroDivisionError):
            coordinator.schedule(fails).fetch(60)
        with pytest.raises(ZeroDivisionError):
            if ask == "schedule":
                coordinator.schedule(lambda: 1)
            else:
                coordinator.done()
        assert coordinator.done()
        coordinator.join(60)


def test_join_with_a_timeout_names_the_worker_and_the_closure():
    with cluster(workers=1) as (_, coordinator):
        go = threading.Event()

        def waits():
            go.wait(60)

        coordinator.schedule(waits)
        with pytest.raises(mirrored.WorkerError, match=r"waits\) on worker 0"):
            coordinator.join(0.3)
        go.set()
        coordinator.join(60)


def test_each_worker_has_its_own_iterator(engine):
    with cluster(engine) as (_, coordinator):

        def numbers(context):
            return [context.input_pipeline_id * 100 + n for n in range(50)]

        iterator = iter(coordinator.create_per_worker_dataset(numbers))

        def closure(iterator):
            return next(iterator)

        values = [coordinator.schedule(closure, args=(iterator,)) for _ in range(20)]
        fetched = coordinator.fetch(values)
        for worker in (0, 1):
            own = [value for value in fetched if value // 100 == worker]
            assert own == sorted(own)
            assert own == list(range(worker * 100, worker * 100 + len(own)))
        with pytest.raises(mirrored.ContextError, match="per-worker"):
            next(iterator)


def test_arguments_are_checked():
    with cluster() as (_, coordinator):
        with pytest.raises(mirrored.ArgumentError, match="cannot be called"):
            coordinator.schedule(3)
        with pytest.raises(mirrored.ArgumentError, match="a tuple or a list"):
            coordinator.schedule(lambda x: x, args=3)
        value = coordinator.schedule(lambda: 1)
        with pytest.raises(mirrored.ArgumentError, match="fetch it first"):
            coordinator.schedule(lambda x: x, args=(value,))


def test_one_worker_trains_like_one_device(engine):
    """Asynchronous training with one worker is training: to the last rounding."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(6, 8, 4)).astype("f")
    y = generator.normal(size=(6, 8, 3)).astype("f")

    def train(strategy, schedule):
        with strategy.scope():
            W = mirrored.Variable(np.ones((4, 3), "f"), name="W")
            b = mirrored.Variable(np.zeros(3, "f"), name="b")
            optimizer = mirrored.Optimizer(optax.adam(0.1))

        def step(x, y):
            def loss_fn():
                return jnp.mean((x @ W + b - y) ** 2)

            loss, gradients = mirrored.value_and_grad(loss_fn, [W, b])
            optimizer.apply_gradients(zip(gradients, [W, b]))
            return loss

        def closure(start):
            losses = [strategy.run(step, args=(x[i], y[i])) for i in (start, start + 1)]
            return [float(strategy.reduce("mean", loss)) for loss in losses]

        losses = [loss for start in (0, 2, 4) for loss in schedule(closure, start)]
        return losses, W.numpy(), b.numpy()

    expected = train(
        mirrored.OneDeviceStrategy("cpu:0"),
        lambda closure, start: closure(start),
    )
    with cluster(engine, workers=1, servers=2) as (strategy, coordinator):
        found = train(
            strategy, lambda closure, start: coordinator.schedule(closure, args=(start,)).fetch(60)
        )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-6)
