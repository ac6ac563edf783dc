"""`fit` on MirroredStrategy."""

from __future__ import annotations

import fitting
import jax
import keras
import measure
import models
import problems

import stratagem
from stratagem import config


def main() -> None:
    config.set_virtual_devices(problems.REPLICAS)
    arguments = measure.options(("model", ["mlp", "cnn"]))
    keras.utils.set_random_seed(0)
    with stratagem.MirroredStrategy().scope():
        model = models.classifier(keras, arguments.model)
    loss = fitting.fit(keras, model, arguments.steps, arguments.samples)
    measure.say(loss=loss, about={"jax": jax.__version__, "keras": keras.__version__})


if __name__ == "__main__":
    main()
