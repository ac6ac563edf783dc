"""`fit` on TensorFlow's MirroredStrategy."""

from __future__ import annotations

import fitting
import measure
import models
import tensor_flow


def main() -> None:
    arguments = measure.options(("keras", ["keras", "tf_keras"]), ("model", ["mlp", "cnn"]))
    keras = tensor_flow.keras(arguments.keras)
    keras.utils.set_random_seed(0)
    with tensor_flow.strategy().scope():
        model = models.classifier(keras, arguments.model)
    loss = fitting.fit(keras, model, arguments.steps, arguments.samples)
    measure.say(loss=loss, about=tensor_flow.versions(keras))


if __name__ == "__main__":
    main()
