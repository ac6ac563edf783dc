"""Trains a model whose optimizer slots do not fit its devices: variables live on the host.

Three virtual CPU devices stand in for a host, CPU:0, and two accelerators, CPU:1 and CPU:2, of
which each shall have BUDGET bytes. Under MirroredStrategy each accelerator holds the weights and
Adam's two slots a weight, always; under CentralStorageStrategy it holds the weights, for a step.
The curves are the same. The price is a copy of the weights and of the gradients in each step.
"""

from __future__ import annotations

import time

import stratagem

stratagem.config.set_virtual_devices(3)  # Before anything else uses JAX.

import jax
import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

MIB = 2**20
BUDGET = 64 * MIB  # of each accelerator
WIDTH = 2048
BATCH = 256  # rows of both replicas together
EPOCHS = 3
COMPUTING = ["CPU:1", "CPU:2"]
STRATEGIES = {
    "Mirrored": lambda: stratagem.MirroredStrategy(COMPUTING),
    "CentralStorage": lambda: stratagem.experimental.CentralStorageStrategy(COMPUTING, "CPU:0"),
}


def build() -> keras.Model:
    """A wide classifier for images of 8 x 8 pixels: 17 MiB of weights, 34 MiB of slots."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(WIDTH, activation="relu"),
            layers.Dense(WIDTH, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    return model


def held(model: keras.Model, device: jax.Device) -> int:
    """Bytes of a model and its optimizer that a device holds."""
    values = [v.value for v in [*model.variables, *model.optimizer.variables]]
    shards = (shard for value in values for shard in value.addressable_shards)
    return sum(s.data.nbytes for s in shards if s.device == device)


def needed(strategy: stratagem.Strategy, model: keras.Model, batch: tuple) -> int:
    """Bytes that the compiled step needs on each accelerator, by XLA's own account."""
    memory = strategy.lower(model.train_step, (batch,)).compile().memory_analysis()
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return sizes + memory.temp_size_in_bytes - memory.alias_size_in_bytes


class Watch(keras.callbacks.Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])  # the step is over
        self.seconds.append(time.perf_counter() - self._start)


def main() -> None:
    """Trains under both strategies in turn, and prints what each costs."""
    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16.0).astype("float32")[: 6 * BATCH], labels[: 6 * BATCH]
    strategies = {name: make() for name, make in STRATEGIES.items()}
    models, curves, watches = {}, {}, {}
    for name, strategy in strategies.items():
        with strategy.scope():
            models[name] = build()
        curves[name] = [models[name].train_on_batch(x[:BATCH], y[:BATCH])]  # compiles
        watches[name] = Watch()
    for _ in range(EPOCHS):
        for name, model in models.items():  # in turn, so that both see the same machine
            options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
            curves[name] += model.fit(x, y, callbacks=[watches[name]], **options).history["loss"]
    for name, model in models.items():
        peak = needed(strategies[name], model, (x[:BATCH], y[:BATCH]))
        verdict = "fits" if peak <= BUDGET else "does not fit"
        print(
            f"{name}: an accelerator holds {held(model, jax.devices()[1]) / MIB:.1f} MiB between "
            f"steps and needs {peak / MIB:.1f} MiB in one, which {verdict} {BUDGET // MIB} MiB; "
            f"{1e3 * np.median(watches[name].seconds):.0f} ms a step"
        )
    difference = np.max(np.abs(np.subtract(*curves.values())))
    print(f"largest difference of the two loss curves: {difference:.1e}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
