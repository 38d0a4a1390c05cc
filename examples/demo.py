"""What ``make demo`` runs: a Keras model on every local device, compared with one.

Where there is no accelerator, it makes four virtual devices of the CPU, which shows
that it works, not how fast it is.
"""

import os
import subprocess
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import keras_mirrored
import numpy as np

import mirrored
import mirrored.keras
import mirrored.testing


def has_accelerator() -> bool:
    """Asks JAX in another process: in this one the answer would fix the devices."""
    question = "import jax; print(jax.default_backend())"
    answer = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, check=True
    )
    return answer.stdout.split()[-1] != "cpu"


def main() -> float:
    """Trains on all devices, then on one, and returns the largest difference of a weight."""
    keras.utils.set_random_seed(0)
    trained = keras_mirrored.main()
    strategy = mirrored.keras.strategy_of(trained)
    print(f"The same on one device, {strategy.devices[0]}:")
    keras.utils.set_random_seed(0)
    alone = keras_mirrored.main(strategy=mirrored.OneDeviceStrategy(strategy.devices[0]), verbose=0)
    difference = max(
        float(np.abs(one - other).max())
        for one, other in zip(trained.get_weights(), alone.get_weights())
    )
    print(
        f"{strategy.num_replicas_in_sync} devices and 1 device end with the same weights: "
        f"largest difference {difference:.1e}."
    )
    return difference


if __name__ == "__main__":
    if not has_accelerator():
        mirrored.testing.use_cpu_devices(4)
    main()
