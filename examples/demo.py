"""What ``make demo`` runs: the custom loop on every local device.

Where there is no accelerator, it makes four virtual devices of the CPU, which shows
that it works, not how fast it is.
"""

import subprocess
import sys

import custom_loop

import mirrored.testing


def has_accelerator() -> bool:
    """Asks JAX in another process: in this one the answer would fix the devices."""
    question = "import jax; print(jax.default_backend())"
    answer = subprocess.run(
        [sys.executable, "-c", question], capture_output=True, text=True, check=True
    )
    return answer.stdout.split()[-1] != "cpu"


if __name__ == "__main__":
    if not has_accelerator():
        mirrored.testing.use_cpu_devices(4)
    custom_loop.main()
