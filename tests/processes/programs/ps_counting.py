"""Training that counts: how often each row was trained on, on the servers and in a metric.

Arguments: a directory, and JSON with `epochs`, `pause` and what the strategy takes; with `leave`,
the code with which it is left in epoch 1 when it is started first, and with 0 at its end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import keras
import numpy as np

import stratagem

ROWS, BATCH = 640, 16
RESULT = "RESULT "


class Counts(keras.layers.Layer):
    """Adds, in training, one to what it has for each row of the batch."""

    def build(self, shape):
        self.hits = self.add_weight(
            shape=(ROWS,), initializer="zeros", trainable=False, name="hits"
        )
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, ids, training=False):
        if training:
            ones = keras.ops.one_hot(keras.ops.cast(ids[:, 0], "int32"), ROWS)
            self.hits.assign_add(keras.ops.sum(ones, axis=0))
            self.seen.assign_add(keras.ops.sum(ones))
        return ids / ROWS


class Rows(keras.metrics.Metric):
    """How many rows it saw."""

    def __init__(self):
        super().__init__(name="rows")
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.sum(keras.ops.ones_like(y_pred)))

    def result(self):
        return self.count.value


class Progress(keras.callbacks.Callback):
    """Says how far it is, and takes its time."""

    def __init__(self, directory: Path, pause: float, leave: int | None):
        super().__init__()
        self.leave = leave
        self.directory, self.pause, self.epoch = directory, pause, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.leave is not None and (self.epoch, batch) == (1, 10):
            sys.exit(self.leave)

    def on_train_batch_end(self, batch, logs=None):
        (self.directory / "progress").write_text(f"{self.epoch} {batch}")
        time.sleep(self.pause)


def main() -> None:
    directory, told = Path(sys.argv[1]), json.loads(sys.argv[2])
    starts = directory / "starts"
    starts.write_text((starts.read_text() if starts.exists() else "") + "x")
    leave = told.get("leave") if starts.read_text() == "x" else None
    strategy = stratagem.ParameterServerStrategy(
        variable_partitioner=stratagem.experimental.partitioners.FixedShardsPartitioner(2),
        **told.get("strategy", {}),
    )
    with strategy.scope():
        keras.utils.set_random_seed(1)
        counts = Counts()
        model = keras.Sequential([keras.Input((1,)), counts, keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse", metrics=[Rows()])
    x = np.arange(ROWS, dtype=np.float32)[:, None]
    history = model.fit(
        x, x, batch_size=BATCH, epochs=told["epochs"], verbose=0,
        callbacks=[Progress(directory, told["pause"], leave)],
    ).history  # fmt: skip
    dispatcher = strategy.coordinator.dispatcher
    print(RESULT + json.dumps({
        "hits": np.asarray(counts.hits.numpy()).tolist(),
        "seen": float(counts.seen.numpy()),
        "iterations": int(model.optimizer.iterations.numpy()),
        "rows": history["rows"],
        "lost": dispatcher.lost_pushes,
        "reruns": dispatcher.counts.reruns,
        "losses": [float(x) for x in history["loss"]],
    }), flush=True)  # fmt: skip

    if "leave" in told:
        sys.exit(0)


if __name__ == "__main__":
    main()
