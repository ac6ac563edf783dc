"""`fit` on MirroredStrategy without backups, or with one every ten steps."""

from __future__ import annotations

import tempfile

import fitting
import jax
import keras
import measure
import models
import problems

import stratagem
from stratagem import config

EVERY = 10


def main() -> None:
    config.set_virtual_devices(problems.REPLICAS)
    arguments = measure.options(("backups", ["none", "every-10"]))
    keras.utils.set_random_seed(0)
    with stratagem.MirroredStrategy().scope():
        model = models.classifier(keras, "mlp")
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [stratagem.callbacks.BackupAndRestore(folder, save_freq=EVERY)]
        loss = fitting.fit(
            keras, model, arguments.steps, arguments.samples,
            callbacks if arguments.backups == "every-10" else [],
        )  # fmt: skip
    measure.say(loss=loss, about={"jax": jax.__version__, "keras": keras.__version__})


if __name__ == "__main__":
    main()
