"""Trains an embedding model on parameter servers: threads, Ray on this machine, or a Ray cluster.

python examples/parameter_servers.py             # threads of this process
python examples/parameter_servers.py ray         # processes on this machine
python examples/parameter_servers.py auto        # the Ray cluster this machine belongs to
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax

import mirrored

USERS, ITEMS, FEATURES = 2000, 500, 8


def ratings(context):
    """Yields a worker's batches, for ever: users, items, and whether they like them."""
    generator = np.random.default_rng(context.input_pipeline_id)
    while True:
        users = generator.integers(0, USERS, 256)
        items = generator.integers(0, ITEMS, 256)
        yield users, items, ((users % 2) == (items % 2)).astype("float32")


def main():
    where = sys.argv[1] if len(sys.argv) > 1 else "threads"
    place = {"engine": where} if where in ("threads", "ray") else {"address": where}
    with mirrored.ParameterServerStrategy(cluster={"worker": 2, "ps": 2}, **place) as strategy:
        coordinator = mirrored.ClusterCoordinator(strategy)
        with strategy.scope():
            users = mirrored.EmbeddingTable(USERS, FEATURES, name="users")
            items = mirrored.EmbeddingTable(ITEMS, FEATURES, seed=1, name="items")
            optimizer = mirrored.Optimizer(optax.adagrad(0.3, initial_accumulator_value=1e-6))

        def step(user, item, likes):
            def loss_fn():
                scores = jnp.sum(users.lookup(user) * items.lookup(item), axis=1)
                return optax.sigmoid_binary_cross_entropy(scores, likes).mean()

            loss, gradients = mirrored.value_and_grad(loss_fn, [users, items])
            optimizer.apply_gradients(zip(gradients, [users, items]))
            return loss

        def closure(batches):
            for _ in range(20):
                loss = strategy.run(step, args=next(batches))
            return loss

        batches = iter(coordinator.create_per_worker_dataset(ratings))
        for epoch in range(3):
            losses = [coordinator.schedule(closure, args=(batches,)) for _ in range(5)]
            coordinator.join(timeout=600)
            print(f"epoch {epoch + 1}: loss {float(losses[-1].fetch()):.4f}")


if __name__ == "__main__":
    main()
