"""`fit` of the wide-and-deep model of flights on TensorFlow's ParameterServerStrategy."""

from __future__ import annotations

import os
from typing import Any

import flights
import measure
import numpy as np
import ps_problems
import ps_tasks
import ps_tensorflow
import wide_and_deep

os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import tensorflow as tf
import tf_keras


def main() -> None:
    arguments = measure.options(("ps", list("1234")), ("workers", list("12345678")))
    data = flights.load()

    def dataset(context: Any = None) -> Any:
        """Ready-made batches in random order, again and again: TF counts steps, not rows."""
        batches = data.train.batches(ps_problems.WIDE_BATCH, seed=0)[:-1]
        parts = ("ids", "numbers", "late")
        ids, numbers, late = (np.stack([getattr(b, part) for b in batches]) for part in parts)
        every = tf.data.Dataset.from_tensor_slices(((ids, numbers), late))
        return every.shuffle(len(batches)).repeat().prefetch(4)

    shape = int(arguments.ps), int(arguments.workers)
    with ps_tasks.running("ps_task_tensorflow.py", *shape) as (cluster, _):
        strategy = ps_tensorflow.strategy_on(cluster)
        with strategy.scope():
            model = wide_and_deep.build(tf_keras, data.vocabulary)
        creator = tf_keras.utils.experimental.DatasetCreator(dataset)
        clock = ps_problems.clock(tf_keras, measure, arguments.steps * ps_problems.WIDE_BATCH)
        history = model.fit(
            creator, steps_per_epoch=arguments.steps, epochs=arguments.samples + 1, verbose=0,
            callbacks=[clock],
        )  # fmt: skip
        measure.say(
            loss=history.history["loss"][-1],
            about={"tensorflow": tf.__version__, "tf_keras": tf_keras.__version__},
            **wide_and_deep.quality(predict(model, data), data.test.late),
        )


def predict(model: Any, data: flights.Flights) -> np.ndarray:
    """Of the test rows, by a copy of the model on this process."""
    alone = wide_and_deep.build(tf_keras, data.vocabulary)
    for own, served in zip(alone.layers, model.layers, strict=True):
        parts, whole = served.get_weights(), []
        for weight in own.get_weights():
            shards = [parts.pop(0)]
            while sum(len(shard) for shard in shards) < len(weight):
                shards.append(parts.pop(0))
            whole.append(np.concatenate(shards))
        own.set_weights(whole)
    return alone.predict([data.test.ids, data.test.numbers], batch_size=8192, verbose=0)


if __name__ == "__main__":
    main()
