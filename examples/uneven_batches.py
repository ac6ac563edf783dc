"""Seven rows on two and three replicas give what one device gives, to rounding.

Batches of four on seven rows: a full batch, then one of three rows. Three replicas get 2, 2 and 0
rows of the full one. Each replica runs the step on exactly its rows; nothing is padded where user
code can see it, and no replica counts more than its rows.
"""

from __future__ import annotations

import stratagem

stratagem.config.set_virtual_devices(3)

import keras
import numpy as np
from keras import layers

ROWS, BATCH = 7, 4
rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 5)).astype("float32")
y = rng.normal(size=(ROWS, 1)).astype("float32")


def build() -> keras.Model:
    """A model with what masks of padded rows would get wrong."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="tanh", activity_regularizer="l2"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model


def train(strategy: stratagem.Strategy) -> dict[str, np.ndarray]:
    """Everything that training shows: logs, weights, evaluation and predictions."""
    with strategy.scope():
        model = build()
    history = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0).history
    return {
        "loss": np.asarray(history["loss"]),
        "mae": np.asarray(history["mae"]),
        "weights": np.concatenate([np.ravel(w) for w in model.get_weights()]),
        "evaluate": np.asarray(model.evaluate(x, y, batch_size=BATCH, verbose=0)),
        "predict": model.predict(x, batch_size=BATCH, verbose=0),
    }


wanted = train(stratagem.OneDeviceStrategy("/cpu:0"))
for replicas in (2, 3):
    strategy = stratagem.MirroredStrategy([f"/cpu:{i}" for i in range(replicas)])
    data = strategy.experimental_distribute_dataset(stratagem.data.batches(np.arange(ROWS), BATCH))
    parts = [[part.tolist() for part in batch.values] for batch in data]
    print(f"{replicas} replicas get", "; then ".join(" | ".join(map(str, p)) for p in parts))
    got = train(strategy)
    for what, value in wanted.items():
        print(f"  {what:10}largest difference {np.max(np.abs(got[what] - value)):.1e}")
        np.testing.assert_allclose(got[what], value, rtol=1e-4, atol=1e-5)
