"""Parameter servers without tf.distribute: handwritten digits, trained asynchronously.

Run it with ``python examples/parameter_server.py``; everything is in this process, on threads.
With ``--engine ray`` workers and servers are processes, with ``--address auto`` processes of the
Ray cluster this machine belongs to. parameter_server_tf.py is the same program on tf.distribute.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mirrored


def load():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def main(staleness="async", workers=2, engine=None, address=None, epochs=30, steps_per_closure=6):
    (x_train, y_train), (x_test, y_test) = load()
    strategy = mirrored.ParameterServerStrategy(
        {"worker": workers, "ps": 1}, staleness=staleness, engine=engine, address=address
    )
    coordinator = mirrored.ClusterCoordinator(strategy)
    keys = jax.random.split(jax.random.key(0))
    with strategy.scope():
        hidden = mirrored.Variable(jax.random.normal(keys[0], (64, 128)) * 0.1, name="hidden")
        out = mirrored.Variable(jax.random.normal(keys[1], (128, 10)) * 0.1, name="out")
        optimizer = mirrored.Optimizer(optax.sgd(0.2))

    def make_dataset(context):
        """Each worker's own rows, in an order of its own, again and again."""
        generator = np.random.default_rng(context.input_pipeline_id)
        own = np.arange(context.input_pipeline_id, len(x_train), context.num_input_pipelines)
        while True:
            rows = generator.choice(own, 64, replace=False)
            yield x_train[rows], y_train[rows]

    def train_step(images, labels):
        def loss_fn():
            logits = jax.nn.relu(images @ hidden) @ out
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = mirrored.value_and_grad(loss_fn, [hidden, out])
        optimizer.apply_gradients(zip(gradients, [hidden, out]))
        return loss

    def closure(iterator):
        for _ in range(steps_per_closure):
            loss = strategy.run(train_step, args=next(iterator))
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
    closures = epochs * len(x_train) // 64 // steps_per_closure
    losses = [coordinator.schedule(closure, args=(iterator,)) for _ in range(closures)]
    coordinator.join()
    print(coordinator.status())
    logits = jax.nn.relu(x_test @ jnp.asarray(hidden.numpy())) @ out.numpy()
    accuracy = float((logits.argmax(axis=1) == y_test).mean())
    loss = coordinator.fetch(losses[-1])
    strategy.close()
    print(f"{staleness}: loss {loss:.4f}, {accuracy:.1%} of the test images are read correctly.")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("threads", "ray"))
    parser.add_argument("--address", help="of a Ray cluster")
    main(**vars(parser.parse_args()))
