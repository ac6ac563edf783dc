"""Times `fit`, for every Keras."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import measure
import problems


def fit(keras: Any, model: Any, steps: int, samples: int, callbacks: Sequence[Any] = ()) -> float:
    """Trains for `samples` epochs of `steps` steps, and one before to warm up.

    A sample is an epoch's rows per second, between its first and last callback; the first step is
    a `fit` on one batch, which traces and compiles.

    Returns:
        The last loss.
    """
    x, y, _ = problems.images(steps * problems.FIT_BATCH)

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch:
                measure.wait_for_turn()
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch:
                measure.say(sample=len(x) / (time.perf_counter() - self.start))
            else:
                measure.say(first=first)

    batch = problems.FIT_BATCH
    start = time.perf_counter()
    model.fit(x[:batch], y[:batch], batch_size=batch, verbose=0)
    first = time.perf_counter() - start
    history = model.fit(x, y, batch_size=batch, epochs=samples + 1, verbose=0,
                        callbacks=[*callbacks, Clock()])  # fmt: skip
    return history.history["loss"][-1]
