"""`fit` and a custom loop on several workers; the argument says which worker dies at which step.

Arguments: rank and step (of all training steps) at which it kills itself; -1 for none.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import stratagem

sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
from jobs import report

EPOCHS = 2


class Die(keras.callbacks.Callback):
    """Ends the process at a step, as a power cut does."""

    def __init__(self, step: int):
        super().__init__()
        self.left = step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def main(rank: int, step: int) -> None:
    strategy = stratagem.MultiWorkerMirroredStrategy()
    rows = np.random.default_rng(0).normal(size=(44, 3)).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    mine = strategy.cluster_resolver.task_id == rank
    history = model.fit(
        rows,
        rows.sum(axis=1, keepdims=True),
        batch_size=8,
        epochs=EPOCHS,
        callbacks=[Die(step if mine else -1)],
        verbose=2,
    )
    report(
        {
            "history": history.history,
            "weights": [np.asarray(w).tolist() for w in model.get_weights()],
            "iterations": int(model.optimizer.iterations.numpy()),
            "workers": [name for name, _ in strategy.job.tasks],
            "evaluate": model.evaluate(rows, rows.sum(axis=1, keepdims=True), verbose=0),
        }
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
