"""Embedding tables on parameter servers, everything else in lockstep: exact in every step.

python examples/embeddings_lockstep.py                                     # this process's devices
mirrored launch -n 2 --cpu-devices 2 examples/embeddings_lockstep.py ray   # two processes
mirrored launch -n 2 examples/embeddings_lockstep.py ADDRESS               # on a Ray cluster
"""

import sys

import jax
import numpy as np
import optax

import mirrored

USERS, ITEMS, FEATURES = 2000, 500, 8


def ratings(count):
    """Batches of all processes: users, items, and whether they like them."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        users = generator.integers(0, USERS, 256)
        items = generator.integers(0, ITEMS, 256)
        yield users, items, ((users % 2) == (items % 2)).astype("float32")


def main(where="threads", batches=200):
    # Before anything else uses JAX: it meets the other processes, if there are any.
    strategy = mirrored.MultiWorkerMirroredStrategy()
    place = {"engine": where} if where in ("threads", "ray") else {"address": where}
    with mirrored.ParameterServerStrategy(server_count=2, shared_with=strategy, **place) as servers:
        with servers.scope():
            users = mirrored.EmbeddingTable(USERS, FEATURES, name="users")
            items = mirrored.EmbeddingTable(ITEMS, FEATURES, seed=1, name="items")
            table_optimizer = mirrored.Optimizer(optax.adagrad(0.3, 1e-6))
        with strategy.scope():
            top = mirrored.Variable(np.eye(FEATURES, dtype="float32"), name="top")
            optimizer = mirrored.Optimizer(optax.adam(1e-2))

        def step(of_users, of_items, likes):
            def loss_fn():
                scores = (of_users.lookup() @ top * of_items.lookup()).sum(axis=1)
                return mirrored.mean(optax.sigmoid_binary_cross_entropy(scores, likes))

            loss, gradients = mirrored.value_and_grad(loss_fn, [of_users, of_items, top])
            optimizer.apply_gradients([(gradients[2], top)])
            return loss, gradients[:2]

        @mirrored.function
        def train_step(of_users, of_items, likes):
            return strategy.run(step, args=(of_users, of_items, likes))

        losses = []
        for user, item, likes in strategy.distribute_dataset(list(ratings(batches))):
            rows = [users.pull(user), items.pull(item)]
            loss, gradients = train_step(*rows, likes)
            table_optimizer.apply_gradients(
                [
                    (pulled.gradient(gradient), table)
                    for pulled, gradient, table in zip(rows, gradients, [users, items])
                ]
            )
            losses.append(float(loss))
        if jax.process_index() == 0:
            print(f"loss {losses[0]:.3f} at first, {np.mean(losses[-20:]):.3f} in the end")
        return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
