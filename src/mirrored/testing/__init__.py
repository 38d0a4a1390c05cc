"""Helps to test programs that use several devices or processes, on one machine."""

from mirrored.testing._devices import use_cpu_devices
from mirrored.testing._processes import Fault, FinishedRun, Run, random_faults, run_with_faults

__all__ = ["Fault", "FinishedRun", "Run", "random_faults", "run_with_faults", "use_cpu_devices"]
