"""`fit` on keras.distribution.DataParallel, Keras' own data parallelism on JAX.

Stratagem is not imported. run.py sets the size of XLA's thread pool (NPROC), without which two
devices on two cores stop for good.
"""

from __future__ import annotations

import fitting
import jax
import keras
import measure
import models
import problems


def main() -> None:
    jax.config.update("jax_num_cpu_devices", problems.REPLICAS)
    arguments = measure.options(("model", ["mlp", "cnn"]))
    keras.utils.set_random_seed(0)
    devices = keras.distribution.list_devices()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    model = models.classifier(keras, arguments.model)
    loss = fitting.fit(keras, model, arguments.steps, arguments.samples)
    measure.say(loss=loss, about={"jax": jax.__version__, "keras": keras.__version__})


if __name__ == "__main__":
    main()
