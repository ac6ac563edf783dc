"""Custom loop on MirroredStrategy: `function` around run and reduce, or the two called plainly."""

from __future__ import annotations

from typing import Any

import jax
import keras
import measure
import models
import problems

import stratagem
from stratagem import config


def main() -> None:
    config.set_virtual_devices(problems.REPLICAS)
    arguments = measure.options(("how", ["function", "plain"]))
    strategy = stratagem.MirroredStrategy()
    with strategy.scope():
        model = models.loop_mlp(keras)
        model.set_weights(problems.loop_weights())
        optimizer = keras.optimizers.SGD(problems.LOOP_RATE)

    def replica_step(x: Any, y: Any) -> Any:
        with stratagem.GradientTape() as tape:
            errors = keras.losses.mean_squared_error(y, model(x, training=True))
            loss = stratagem.nn.compute_average_loss(errors, global_batch_size=problems.LOOP_BATCH)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    with strategy.scope():
        batches = list(strategy.experimental_distribute_dataset(problems.loop_batches()))
        train = stratagem.function(step) if arguments.how == "function" else step
        measure.loop(train, batches, arguments.steps, arguments.samples, jax.block_until_ready)
        loss = float(train(batches[0]))
    measure.say(loss=loss, about={"jax": jax.__version__, "keras": keras.__version__})


if __name__ == "__main__":
    main()
