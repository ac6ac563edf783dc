"""Times `fit`, for every Keras."""

from __future__ import annotations

import time
from typing import Any

import problems


def fit(keras: Any, model: Any, steps: int, samples: int) -> tuple[float, list[float], float]:
    """Trains for `samples` epochs of `steps` steps.

    Returns:
        Seconds of a `fit` on one batch, which traces and compiles; rows per second in each epoch,
        between the epoch's first and last callback; the last loss.
    """
    x, y, _ = problems.images(steps * problems.FIT_BATCH)
    epochs: list[float] = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            epochs.append(time.perf_counter() - self.start)

    batch = problems.FIT_BATCH
    start = time.perf_counter()
    model.fit(x[:batch], y[:batch], batch_size=batch, verbose=0)
    first = time.perf_counter() - start
    # One epoch more than asked for: the first one warms.
    history = model.fit(x, y, batch_size=batch, epochs=samples + 1, verbose=0, callbacks=[Clock()])
    rates = [len(x) / seconds for seconds in epochs[1:]]
    return first, rates, history.history["loss"][-1]
