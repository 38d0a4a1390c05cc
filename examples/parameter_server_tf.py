"""Parameter servers on tf.distribute: the program before parameter_server.py.

It runs in the process of the coordinator; the servers and workers, which TF_CONFIG names, are
processes that must have been started, each with ``tf.distribute.Server(...).join()``.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def load():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def main(epochs=30, steps_per_closure=6):
    (x_train, y_train), (x_test, y_test) = load()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        hidden = tf.Variable(tf.random.normal((64, 128)) * 0.1, name="hidden")
        out = tf.Variable(tf.random.normal((128, 10)) * 0.1, name="out")

    def make_dataset(context):
        data = tf.data.Dataset.from_tensor_slices((x_train, y_train))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.repeat().shuffle(1500).batch(64)

    def train_step(images, labels):
        with tf.GradientTape() as tape:
            logits = tf.nn.relu(images @ hidden) @ out
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, [hidden, out])
        # By hand: the optimizers of Keras 3 do not work on parameter servers there.
        for variable, gradient in zip([hidden, out], gradients):
            variable.assign_sub(0.2 * gradient)
        return loss

    @tf.function
    def closure(iterator):
        loss = 0.0
        for _ in tf.range(steps_per_closure):
            loss = strategy.run(train_step, args=next(iterator))
        return loss

    iterator = iter(
        coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(make_dataset)
        )
    )
    closures = epochs * len(x_train) // 64 // steps_per_closure
    losses = [coordinator.schedule(closure, args=(iterator,)) for _ in range(closures)]
    coordinator.join()
    logits = tf.nn.relu(x_test @ hidden) @ out
    accuracy = float(np.mean(logits.numpy().argmax(axis=1) == y_test))
    print(f"loss {losses[-1].fetch():.4f}, {accuracy:.1%} of the test images are read correctly.")
    return accuracy


if __name__ == "__main__":
    main()
