"""The wide-and-deep model of flights on one device, with plain Keras: what others are held against.

    python benchmarks/cases/wide_single.py keras --epochs 2       Keras 3, backend by KERAS_BACKEND
    python benchmarks/cases/wide_single.py tf_keras --epochs 2    in the peer environment

Prints a line of JSON after each epoch: samples per second, and quality on the test days.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any

import flights
import measure
import ps_problems
import wide_and_deep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("keras", choices=["keras", "tf_keras"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    keras = importlib.import_module(arguments.keras)
    data = flights.load()
    keras.utils.set_random_seed(arguments.seed)
    train(wide_and_deep.build(keras, data.vocabulary), data, arguments.epochs)


def train(model: Any, data: flights.Flights, epochs: int) -> None:
    """Trains, and says after each epoch how good the model is."""
    x, y = [data.train.ids, data.train.numbers], data.train.late
    batch = ps_problems.WIDE_BATCH
    model.evaluate([part[:batch] for part in x], y[:batch], verbose=0)  # builds and compiles
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        history = model.fit(x, y, batch_size=batch, verbose=0)
        seconds = time.perf_counter() - start
        test = data.test
        logits = model.predict([test.ids, test.numbers], batch_size=8192, verbose=0)
        measure.say(
            epoch=epoch, rows_per_second=len(y) / seconds, loss=history.history["loss"][-1],
            **wide_and_deep.quality(logits, test.late),
        )  # fmt: skip


if __name__ == "__main__":
    main()
