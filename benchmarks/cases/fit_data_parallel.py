"""`fit` on keras.distribution.DataParallel, Keras' own data parallelism on JAX."""

from __future__ import annotations

import fitting
import jax
import keras
import measure
import models
import problems

from stratagem import config


def main() -> None:
    # XLA's own choice of thread pool stops for good with two devices on two cores; this one
    # makes it larger.
    config.set_virtual_devices(problems.REPLICAS)
    arguments = measure.options(("model", ["mlp", "cnn"]))
    keras.utils.set_random_seed(0)
    devices = keras.distribution.list_devices()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    model = models.classifier(keras, arguments.model)
    found = fitting.fit(keras, model, arguments.steps, arguments.samples)
    measure.report(*found, jax=jax.__version__, keras=keras.__version__)


if __name__ == "__main__":
    main()
