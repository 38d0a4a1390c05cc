"""Trains on 1, 2 and 4 devices to the same bits, and with optimizer state in shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored


def train(device_count, shard_state=False):
    strategy = mirrored.MirroredStrategy(jax.devices()[:device_count])
    random = np.random.default_rng(0)
    with strategy.scope():
        weights = mirrored.Variable(random.normal(size=(8, 1)).astype(np.float32))
        bias = mirrored.Variable(jnp.zeros(1))
        optimizer = mirrored.Optimizer(optax.adam(1e-2), shard_state=shard_state)

    def loss_fn(x, y):
        return mirrored.mean((jnp.tanh(x @ weights + bias)[:, 0] - y) ** 2)

    value_and_grad = mirrored.reproducible_value_and_grad(loss_fn, [weights, bias], micro_shards=8)

    def train_step(batch):
        loss, gradients = value_and_grad(*batch)
        optimizer.apply_gradients(zip(gradients, [weights, bias]))
        return loss

    @mirrored.function
    def step(batch):
        return strategy.run(train_step, args=(batch,))

    x = random.normal(size=(512, 8)).astype(np.float32)
    for batch in strategy.distribute_dataset((x, x[:, 0]), batch_size=64):
        loss = step(batch)
    return np.asarray(loss).tobytes().hex(), float(loss)


def main():
    counts = [count for count in (1, 2, 4, 8) if count <= len(jax.devices())]
    results = {count: train(count) for count in counts}
    for count, (bits, loss) in results.items():
        print(f"{count} device(s): loss {loss:.9f}, bits {bits}")
    _, loss = train(counts[-1], shard_state=True)
    print(f"state in {counts[-1]} shard(s): loss {loss:.9f}")
    return results


if __name__ == "__main__":
    main()
