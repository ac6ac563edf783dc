"""Trains a digit classifier on two replicas, and shows that one replica trains alike.

What `make demo` runs. Two virtual CPU devices stand in for two accelerators; on a machine that has
them, leave out `set_virtual_devices`. The last batch of each epoch does not divide by two, and the
batch normalisation sees the whole batch: still both loss curves are the same curve.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import stratagem

stratagem.config.set_virtual_devices(2)  # Before anything else uses JAX.

import keras
import matplotlib
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EPOCHS = 12
BATCH = 64  # rows of all replicas together
WANTED_ACCURACY = 0.97
SEED = 7


class RowsPerSecond(keras.callbacks.Callback):
    """Times whole epochs; the first one does not count, since the step is compiled in it.

    Args:
        rows: rows of one epoch, all replicas together.
    """

    def __init__(self, rows: int):
        super().__init__()
        self._rows = rows
        self._start = 0.0
        self._seconds: list[float] = []

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self._seconds.append(time.perf_counter() - self._start)

    @property
    def result(self) -> float:
        """Median over the epochs after the first."""
        return self._rows / float(np.median(self._seconds[1:]))


def build() -> keras.Model:
    """A small convolutional classifier for images of 8 x 8 pixels."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(synchronized=True, momentum=0.9),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(strategy: stratagem.Strategy, data: tuple[np.ndarray, ...], verbose: int):
    """Trains under a strategy from the same weights and the same order of rows each time.

    Returns:
        The model, the loss of each epoch, and rows per second.
    """
    x, y = data
    keras.utils.set_random_seed(SEED)
    with strategy.scope():
        model = build()
    timer = RowsPerSecond(len(x))
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=verbose, callbacks=[timer])
    return model, np.asarray(history.history["loss"]), timer.result


def draw(one: np.ndarray, two: np.ndarray, path: str) -> None:
    """Draws both loss curves into one picture."""
    epochs = np.arange(1, len(one) + 1)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(epochs, one, linewidth=6, alpha=0.35, label="one replica")
    axes.plot(epochs, two, linewidth=1.5, color="black", label="two replicas")
    axes.set(
        xlabel="epoch",
        ylabel="training loss",
        yscale="log",
        title=f"Digits, largest difference {np.max(np.abs(one - two)):.1e}",
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="digits_loss.png", help="where the picture goes")
    path = parser.parse_args().out

    log = logging.getLogger("stratagem")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8, 1) / 16).astype("float32")
    x, test_x, y, test_y = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)

    strategy = stratagem.MirroredStrategy()
    model, two, speed = train(strategy, (x, y), verbose=1)
    _, accuracy = model.evaluate(test_x, test_y, batch_size=BATCH, verbose=0)
    print(f"test accuracy: {accuracy:.4f} on {len(test_x)} images")
    print(f"{speed:.0f} rows a second on {strategy.num_replicas_in_sync} replicas together")

    print("once more on one replica, to compare ...")
    _, one, _ = train(stratagem.OneDeviceStrategy("/cpu:0"), (x, y), verbose=0)
    draw(one, two, path)
    print(f"largest difference of the two loss curves: {np.max(np.abs(one - two)):.1e}")
    print(f"the picture: {path}")
    if accuracy < WANTED_ACCURACY:
        print(f"Expected an accuracy of at least {WANTED_ACCURACY}. Got {accuracy:.4f}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
