"""JAX in two processes that share each gradient, lines after MaxText's manner, checkpoints by orbax; started
by `spawn.py`."""

import os
import queue
import threading
import time

import faults
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

WORLD = int(os.environ["WORLD_SIZE"])


def batches(ahead):
    """Made by a thread, some ahead."""
    number = 0
    while True:
        faults.sample()
        rng = np.random.default_rng(number)
        ahead.put((rng.random((4, 32), dtype="float32"), rng.random((4, 1), dtype="float32")))
        number += 1


@jax.jit
def gradient(weights, inputs, targets):
    def loss(weights):
        hidden = jax.nn.relu(inputs @ weights["in"])
        return jnp.mean((hidden @ weights["out"] - targets) ** 2)

    return jax.value_and_grad(loss)(weights)


def evaluate():
    for _ in range(faults.evaluation_samples(4)):
        faults.evaluated()


def main():
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", WORLD, faults.rank())
    faults.begin()
    rng = np.random.default_rng(1)
    weights = {
        "in": rng.random((32, 64), dtype="float32") / 32,
        "out": rng.random((64, 1), dtype="float32") / 64,
    }
    manager = ocp.CheckpointManager(os.path.abspath("checkpoints"), options=ocp.CheckpointManagerOptions(max_to_keep=2))
    step = manager.latest_step() or 0
    if step:
        weights = manager.restore(step, args=ocp.args.StandardRestore(weights))
    ahead = queue.Queue(maxsize=2)
    threading.Thread(target=batches, args=(ahead,), daemon=True).start()
    while step < faults.STEPS:
        began = time.time()
        inputs, targets = ahead.get()
        faults.forward()
        loss, slope = gradient(weights, inputs, targets)
        shared = multihost_utils.process_allgather(jax.tree.map(np.asarray, slope))
        weights = jax.tree.map(lambda w, s: np.asarray(w - 0.01 * s.mean(axis=0)), weights, shared)
        step += 1
        faults.made(step)
        if faults.rank() == 0:
            print(
                f"completed step: {step}, seconds: {time.time() - began:.3f}, loss: {float(loss):.3f}",
                flush=True,
            )
        if step % faults.SAVE_EVERY == 0:
            if faults.save_is_slow():
                faults.slow_save()
            manager.save(step, args=ocp.args.StandardSave(weights))
            manager.wait_until_finished()
        if step % faults.EVALUATE_EVERY == 0:
            evaluate()
    manager.close()


main()
