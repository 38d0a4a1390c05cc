"""A custom training loop on tf.distribute: the program before custom_loop.py.

The shape stays: strategy, scope, step function, run, reduce. What goes is what had to be
remembered: the global batch size in the loss, and the tape.
"""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

BATCH_SIZE = 64


def load():
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), np.eye(10, dtype=np.float32)[labels]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def main(epochs=10):
    train, test = load()
    strategy = tf.distribute.MirroredStrategy()
    print(f"Number of devices: {strategy.num_replicas_in_sync}")

    with strategy.scope():
        W = tf.Variable(tf.random.normal((64, 10), seed=0) * 0.01, name="weights")
        b = tf.Variable(tf.zeros(10), name="biases")
        optimizer = tf.keras.optimizers.Adam(1e-2)
        optimizer.build([W, b])

    def train_step(images, labels):
        with tf.GradientTape() as tape:
            per_example = tf.nn.softmax_cross_entropy_with_logits(labels, images @ W + b)
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, [W, b])
        optimizer.apply_gradients(zip(gradients, [W, b]))
        return loss

    @tf.function
    def distributed_train_step(images, labels):
        per_replica_losses = strategy.run(train_step, args=(images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    dataset = tf.data.Dataset.from_tensor_slices(train).shuffle(1500, seed=0).batch(BATCH_SIZE)
    accuracy = 0.0
    for epoch in range(epochs):
        losses = []
        for images, labels in strategy.experimental_distribute_dataset(dataset):
            losses.append(float(distributed_train_step(images, labels)))
        right = np.argmax(test[0] @ W.numpy() + b.numpy(), axis=1) == np.argmax(test[1], axis=1)
        accuracy = right.mean()
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, test accuracy {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
