"""Custom loop, or `fit`, on MultiWorkerMirroredStrategy: two processes with a device each."""

from __future__ import annotations

import time
from typing import Any

import jax
import keras
import measure
import models
import pair
import problems

import stratagem


def main() -> None:
    arguments = measure.options(("how", ["function", "fit"]))
    with pair.partner():
        strategy = stratagem.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = models.wide_mlp(keras)
            model.set_weights(problems.wide_weights())
            optimizer = keras.optimizers.SGD(problems.LOOP_RATE)
            run = loop if arguments.how == "function" else fit
            loss = run(strategy, model, optimizer, arguments)
        measure.say(loss=loss, about={"jax": jax.__version__, "keras": keras.__version__})


def loop(strategy: Any, model: Any, optimizer: Any, arguments: Any) -> float:
    def replica_step(x: Any, y: Any) -> Any:
        with stratagem.GradientTape() as tape:
            errors = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = stratagem.nn.compute_average_loss(errors, global_batch_size=problems.WIDE_BATCH)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    @stratagem.function
    def step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    batches = list(strategy.experimental_distribute_dataset(problems.wide_batches()))
    measure.loop(step, batches, arguments.steps, arguments.samples, jax.block_until_ready)
    return float(step(batches[0]))


def fit(strategy: Any, model: Any, optimizer: Any, arguments: Any) -> float:
    """Seconds of one step of `fit`, its callbacks and its input included."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    batches = problems.wide_batches()

    def sample(steps: int) -> Any:
        data = (batches[i % len(batches)] for i in range(steps))
        start = time.perf_counter()
        logs = model.fit(data, verbose=0)
        return (time.perf_counter() - start) / steps, logs.history["loss"][-1]

    first, _ = sample(1)
    sample(arguments.steps)  # warm
    measure.say(first=first)
    for _ in range(arguments.samples):
        measure.wait_for_turn()
        seconds, loss = sample(arguments.steps)
        measure.say(sample=seconds)
    return loss


if __name__ == "__main__":
    main()
