"""Trains a classifier with backups; a worker may be killed, or told to end, at a step.

Arguments: folder of the backups, what happens (nothing, kill, kill-saving or terminate), to which
worker, at which step. Each worker names a folder of its own: only the chief's is used.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import stratagem
from stratagem import cluster_resolver

sys.path.insert(0, str(Path(__file__).parents[1]))

FOLDER, EVENT, WHO, WHEN = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
RANK = cluster_resolver.TFConfigClusterResolver().task_id or 0

strategy = stratagem.MultiWorkerMirroredStrategy()

import keras
import numpy as np
from jobs import report

from stratagem.recovery.storage import Storage

X = np.random.default_rng(0).uniform(size=(192, 64)).astype("float32")
Y = X[:, :10].argmax(1)


class Event(keras.callbacks.Callback):
    """What happens to a worker."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if (RANK, self.steps) != (WHO, WHEN):
            return
        if EVENT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if EVENT == "kill-saving":
            write = Storage._write
            # The thread of the save before this step's is done; of the next one, it is half way.
            Storage._write = lambda *a: (write_half(write, *a),)  # type: ignore[method-assign]
        if EVENT == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)


def write_half(write, *arguments):
    import threading

    threading.Thread(target=write, args=arguments).start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if any("orbax-checkpoint-tmp" in name for name in os.listdir(FOLDER + f"/{RANK}")):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(16, "relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    backup = stratagem.callbacks.BackupAndRestore(
        f"{FOLDER}/{RANK}", save_freq=2, save_before_preemption=True
    )
    history = model.fit(X, Y, batch_size=32, epochs=3, verbose=0, callbacks=[backup, Event()])
    digest = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    report({"digest": digest.hexdigest(), "logs": history.history, "epochs": history.epoch})


main()
