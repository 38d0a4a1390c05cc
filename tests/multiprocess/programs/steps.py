"""Takes steps until somebody fails: argument 1 says how, 2 who, 3 the directory to save in."""

import os
import signal
import sys
import threading
import time

import jax

import mirrored
import mirrored.checkpoint

how, who = sys.argv[1], int(sys.argv[2])
strategy = mirrored.MultiWorkerMirroredStrategy(timeout=2 if how == "set-up" else 8)
with strategy.scope():
    steps = mirrored.Variable(0.0, aggregation="sum", name="steps")
    own = mirrored.Variable(0.0, synchronization="on_read", aggregation="sum", name="own")
checkpoint = mirrored.checkpoint.Checkpoint(sys.argv[3], {"steps": steps, "own": own})


@mirrored.function
def train_step():
    strategy.run(lambda: steps.assign_add(1.0 / strategy.num_replicas_in_sync))
    return steps.value


def fail_in_thread():
    raise KeyError("in a thread")


checkpoint.restore()
while checkpoint.step < 60:
    if checkpoint.step == 20 and jax.process_index() == who:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "preempt":
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "raise":
            raise KeyError("what went wrong")
        if how == "thread":
            threading.Thread(target=fail_in_thread).start()
            time.sleep(60)
        if how == "exit":
            sys.exit(7)
    if checkpoint.step == 20 and how == "alone" and jax.process_index() != who:
        mirrored._workers.connected().timeout = 3
        checkpoint.save()
    elif checkpoint.step == 20 and how == "alone":
        time.sleep(30)
    if how == "preempt" and checkpoint.step == 18 and jax.process_index() == who:
        only = mirrored.checkpoint.Checkpoint(sys.argv[3] + "/only", {"steps": steps})
        only.save(18)
        only.wait()
    train_step().block_until_ready()
    checkpoint.completed()
    if how == "preempt":
        time.sleep(0.02)
if how == "late" and jax.process_index() == who:
    # Too late to stop anybody: the run ends as it would have.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
if how == "preempt":
    assert float(steps) == checkpoint.step == 60
print(f"ended after step {checkpoint.step}, {float(steps):.0f} counted")
