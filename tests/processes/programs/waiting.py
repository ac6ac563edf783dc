"""`fit` on several workers, one of which does something to the others in the middle of it.

Arguments: what ("cut", "kill", "late", "leave", "raise", "read", "sleep", "stop" or "go"), the
index of the worker that does it, the deadline of a step in seconds (0 for the default), and a
folder for what a test waits for.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import stratagem
from stratagem.collectives import CommunicationOptions

sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
from jobs import report

STEPS, BATCH, AT = 6, 4, 2


def rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="small")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def train(model: keras.Model, *callbacks: keras.callbacks.Callback) -> list[list[float]]:
    x, y = rows()
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=list(callbacks))
    return [np.asarray(w).ravel().tolist() for w in model.get_weights()]


def oversleep() -> None:
    time.sleep(1000)


class Act(keras.callbacks.Callback):
    """Does it before a step."""

    def __init__(self, what: str, folder: Path):
        super().__init__()
        self.left = AT
        self.what = what
        self.folder = folder

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left >= 0 or self.what == "go":
            return
        what, self.what = self.what, "go"
        (self.folder / "acts").touch()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "sleep":
            oversleep()
        elif what == "raise":
            raise ValueError("no such image: cat.png")
        elif what == "leave":
            sys.exit()
        elif what == "cut":
            while not (self.folder / "go-on").exists():
                time.sleep(0.02)


def main(what: str, who: int, seconds: float, folder: Path) -> None:
    options = CommunicationOptions(timeout_seconds=seconds or None)
    strategy = stratagem.MultiWorkerMirroredStrategy(communication_options=options)
    mine = strategy.cluster_resolver.task_id == who
    with strategy.scope():
        model, metric = build(), keras.metrics.Mean(name="only_here")
    weights = train(model, Act(what if mine else "go", folder))
    if what == "read":
        strategy.run(lambda: metric.update_state(1.0))
        if mine:
            metric.result()
        else:
            oversleep()
    if what == "late" and mine:  # after the last step that waits for the others
        time.sleep(2)
    report({"weights": weights})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
