"""Models that `fit` trains, for comparing one device with a job of several processes.

As a program it trains them under MultiWorkerMirroredStrategy and saves one; its argument is the
folder to save to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import stratagem

sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
from jobs import report

KINDS = ("batch_norm", "lstm")
ROWS = 23


def data(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, *((2, 3) if kind == "lstm" else (3,)))).astype("float32")
    y = rng.integers(0, 2, (ROWS, 1)).astype("int32")
    return x, y, rng.uniform(0.5, 1.5, ROWS).astype("float32")


def build(kind: str, *, synchronized: bool) -> keras.Model:
    layers = keras.layers
    keras.utils.set_random_seed(3)
    own = {
        "batch_norm": lambda: [
            layers.Dense(4, activation="tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(**({"synchronized": True} if synchronized else {})),
        ],
        "lstm": lambda: [layers.LSTM(3)],
    }[kind]()
    model = keras.Sequential([*own, layers.Dense(1, activation="sigmoid")])
    model.compile(
        keras.optimizers.Adam(0.05, epsilon=0.1, clipnorm=1.0),
        "binary_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["mae"],
        steps_per_execution=2 if kind == "lstm" else 1,
    )
    return model


def train(kind: str, *, synchronized: bool) -> tuple[keras.Model, dict[str, Any]]:
    """In the current scope; logs, predictions and weights as lists."""
    x, y, weights = data(kind)
    model = build(kind, synchronized=synchronized)
    keras.utils.set_random_seed(4)  # of the shuffle
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        sample_weight=weights if kind == "batch_norm" else None,
        class_weight={0: 1.0, 1: 2.0} if kind == "lstm" else None,
        validation_data=(x[:5], y[:5]),
        verbose=2,
    )
    return model, {
        "history": history.history,
        "evaluate": model.evaluate(x, y, batch_size=5, return_dict=True, verbose=2),
        "predict": model.predict(x, batch_size=9, verbose=0).tolist(),
        "weights": [np.asarray(w).tolist() for w in model.get_weights()],
        "optimizer": [np.asarray(v.numpy()).tolist() for v in model.optimizer.variables],
    }


def main(folder: Path) -> None:
    strategy = stratagem.MultiWorkerMirroredStrategy()
    chief = strategy.cluster_resolver.task_id == 0
    results = {}
    for kind in KINDS:
        with strategy.scope():
            model, results[kind] = train(kind, synchronized=True)
    path = folder / "model.keras"
    # Not the same folder, as on machines without a shared disk.
    model.save(path if chief else folder / "not-there" / "model.keras")
    weights = path.with_suffix(".weights.h5")
    model.save_weights(weights)
    results["saved"] = path.exists() and weights.exists()
    with strategy.scope():
        loaded = keras.saving.load_model(path)
    x, y, _ = data("lstm")
    results["loaded"] = loaded.evaluate(x, y, batch_size=5, return_dict=True, verbose=0)
    loaded.fit(x, y, batch_size=8, verbose=0)
    results["retrained"] = [np.asarray(w).tolist() for w in loaded.get_weights()]
    report(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
