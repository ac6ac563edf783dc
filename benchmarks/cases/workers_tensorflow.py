"""The same custom loop on TensorFlow's MultiWorkerMirroredStrategy with RING, in a tf.function."""

from __future__ import annotations

from typing import Any

import measure
import models
import pair
import problems
import tensor_flow
import tensorflow as tf


def main() -> None:
    arguments = measure.options(("keras", ["keras", "tf_keras"]))
    keras = tensor_flow.keras(arguments.keras)
    with pair.partner():
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        with strategy.scope():
            model = models.wide_mlp(keras)
            model.set_weights(problems.wide_weights())
            optimizer = keras.optimizers.SGD(problems.LOOP_RATE)
            optimizer.build(model.trainable_variables)

        def replica_step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                errors = keras.losses.sparse_categorical_crossentropy(
                    y, model(x, training=True), from_logits=True
                )
                loss = tf.nn.compute_average_loss(errors, global_batch_size=problems.WIDE_BATCH)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        @tf.function
        def step(x: Any, y: Any) -> Any:
            losses = strategy.run(replica_step, args=(x, y))
            return strategy.reduce("SUM", losses, axis=None)

        data = tf.data.Dataset.from_generator(
            lambda: iter(problems.wide_batches()),
            output_signature=(
                tf.TensorSpec((problems.WIDE_BATCH, 784)),
                tf.TensorSpec((problems.WIDE_BATCH,), tf.int32),
            ),
        )
        batches = list(strategy.experimental_distribute_dataset(data))
        measure.loop(
            lambda batch: step(*batch),
            batches,
            arguments.steps,
            arguments.samples,
            lambda loss: loss.numpy(),
        )
        measure.say(loss=float(step(*batches[0])), about=tensor_flow.versions(keras))


if __name__ == "__main__":
    main()
