"""A loop of one's own that loses a worker, gets it back, and counts every row.

Arguments: folder for results, rank that dies, step at which it does, step at which the others wait
for the replacement (-1: never).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rejoin import SECONDS, digest

import stratagem
from stratagem.train import Backup

EPOCHS, ROWS, BATCH = 3, 44, 8


def build(strategy: Any) -> tuple[Any, ...]:
    """Model, optimizer, a total over the replicas, the data, and the step of a replica."""
    rows = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    batches = [(x, x.sum(axis=1, keepdims=True)) for x in np.split(rows, range(BATCH, ROWS, BATCH))]
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        model.optimizer = optimizer
        total = keras.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)
    dataset = strategy.experimental_distribute_dataset(batches)

    def step(x: Any, y: Any) -> tuple[Any, Any]:
        with stratagem.GradientTape() as tape:
            loss = keras.ops.sum((model(x) - y) ** 2) / BATCH
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        count = keras.ops.cast(keras.ops.shape(x)[0], "float32")
        total.assign_add(count)
        return loss, count

    return model, optimizer, total, dataset, step


def undisturbed() -> tuple[list[float], np.ndarray]:
    """Losses of all steps and the kernel, of one process that nothing happens to."""
    keras.utils.set_random_seed(100)
    strategy = stratagem.OneDeviceStrategy("CPU:0")
    model, _, _, dataset, step = build(strategy)
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, args=batch)[0], axis=None))
        for _ in range(EPOCHS)
        for batch in dataset
    ]
    return losses, np.asarray(model.get_weights()[0])


def main(folder: Path, rank: int, dies: int, waits: int) -> None:
    joins = bool(os.environ.get("STRATAGEM_JOIN"))
    strategy = stratagem.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    dies, waits = (-1, -1) if joins else (dies, waits)
    keras.utils.set_random_seed(100 + joins)
    model, optimizer, total, dataset, replica_step = build(strategy)
    seen, counted, losses, shares = 0.0, [], [], []
    with Backup(folder / "backup", model=model, total=total) as backup:
        start = backup.restore()
        step = start.step
        seen = start.state.get("seen", 0.0)
        for epoch in range(start.epoch, EPOCHS):
            for x, y in backup.batches(dataset):
                if index == rank and step == dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                deadline = time.monotonic() + SECONDS
                while step == waits and not strategy.job.member.others_wait:
                    assert time.monotonic() < deadline, "no replacement"
                    time.sleep(0.005)
                loss, count = strategy.run(replica_step, args=(x, y))
                losses.append(float(strategy.reduce("SUM", loss, axis=None)))
                seen += float(strategy.reduce("SUM", count, axis=None))
                step += 1
                shares.append(strategy.num_replicas_in_sync)
                if step % 3 == 0:
                    backup.save(step, epoch, {"seen": seen})
            counted.append(seen)
            seen = 0.0
    result = {
        "joined": joins,
        "history": {"rows": counted, "loss": losses},
        "shares": shares,
        "digest": digest(model),
        "iterations": int(optimizer.iterations.numpy()),
        "total": float(np.asarray(total.value)),
        "weights": [np.asarray(w).tolist() for w in model.get_weights()],
    }
    (folder / f"{index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
