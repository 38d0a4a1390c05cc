"""Sixty-four devices: the same traces, one collective, the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, re
import mirrored, mirrored.testing
mirrored.testing.use_cpu_devices(64)
import jax, numpy as np, optax

found = {}
for replicas in (1, 64):
    strategy = mirrored.MirroredStrategy(jax.devices()[:replicas])
    with strategy.scope():
        w = mirrored.Variable(np.linspace(-1, 1, 6, dtype="f").reshape(3, 2))
        b = mirrored.Variable(np.zeros(2, "f"))
        optimizer = mirrored.Optimizer(optax.adam(0.1))
    traces = []

    def train_step(x):
        traces.append(1)
        loss, gradients = mirrored.value_and_grad(
            lambda: mirrored.mean(((x @ w + b) ** 2).sum(axis=1)), [w, b]
        )
        optimizer.apply_gradients(zip(gradients, [w, b]))
        return loss

    step = mirrored.function(lambda x: strategy.run(train_step, (x,)))
    data = np.random.default_rng(0).normal(size=(128 + 70, 3)).astype("f")
    full, rest = strategy.distribute_dataset(data, batch_size=128)
    losses = [float(step(full)), float(step(full))]
    count = len(traces)
    stored = w.storage
    text = step.lower(full).compile().as_text()
    collectives = re.findall(r" (all-[a-z]+|reduce-scatter|collective-[a-z]+)(?:-start)?\\(", text)
    losses.append(float(step(rest)))
    found[replicas] = {
        "traces": count,
        "collectives": collectives,
        "donated": stored.is_deleted(),
        "losses": losses,
        "weights": w.numpy().tolist(),
        "rows": [len(part) for part in strategy.local_results(rest)],
    }
print(json.dumps(found))
"""


def test_sixty_four_devices_do_what_one_does():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, timeout=300, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(ended.stdout)
    alone = found["1"]
    for replicas, case in found.items():
        assert case["traces"] == alone["traces"]
        assert case["collectives"] == ["all-reduce"]
        assert case["donated"]
        for name in ("losses", "weights"):
            differences = [
                abs(a - b) for a, b in zip(flat(case[name]), flat(alone[name]), strict=True)
            ]
            assert max(differences) < 2e-5, (replicas, name)
    # 70 rows in pieces of two: the last 29 replicas get none.
    assert found["64"]["rows"] == [2] * 35 + [0] * 29


def flat(nest):
    return [number for row in nest for number in (row if isinstance(row, list) else [row])]
