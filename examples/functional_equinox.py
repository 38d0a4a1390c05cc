"""Trains an Equinox module: gradients reduced and parameters updated inside run."""

import equinox
import jax
import numpy as np
import optax

import mirrored


def main():
    strategy = mirrored.MirroredStrategy()
    model = equinox.nn.MLP(4, 1, 32, 2, key=jax.random.key(0))
    tx = optax.adam(1e-2)
    state = tx.init(equinox.filter(model, equinox.is_array))

    def loss_fn(model, x, y):
        return mirrored.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    def train_step(model, state, batch):
        loss, gradients = equinox.filter_value_and_grad(loss_fn)(model, *batch)
        gradients = mirrored.get_replica_context().all_reduce("mean", gradients)
        updates, state = tx.update(gradients, state)
        model = equinox.apply_updates(model, updates)
        return mirrored.as_mirrored((model, state)), loss

    x = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    y = np.sin(x.sum(-1))
    for epoch in range(5):
        for batch in strategy.distribute_dataset((x, y), batch_size=48):
            (model, state), loss = strategy.run(train_step, args=(model, state, batch))
        print(f"epoch {epoch}: loss {float(strategy.reduce('mean', loss)):.4f}")
    return float(strategy.reduce("mean", loss))


if __name__ == "__main__":
    main()
