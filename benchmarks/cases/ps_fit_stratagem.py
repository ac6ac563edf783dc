"""`fit` of the wide-and-deep model of flights on ParameterServerStrategy."""

from __future__ import annotations

import flights
import jax
import keras
import measure
import ps_problems
import ps_stratagem
import ps_tasks
import wide_and_deep

HOW = {
    "asynchronous": {},
    "bounded": {"max_staleness": 4},
    "hybrid": {"consistency": "hybrid"},
    "synchronous": {"consistency": "synchronous"},
}


def main() -> None:
    arguments = measure.options(
        ("ps", list("1234")), ("workers", list("12345678")), ("how", list(HOW))
    )
    data = flights.load()
    size = ps_problems.WIDE_BATCH
    rows = arguments.steps * size
    shape = int(arguments.ps), int(arguments.workers)
    with ps_tasks.running("ps_task_stratagem.py", *shape) as (cluster, _):
        strategy = ps_stratagem.strategy_on(cluster, **HOW[arguments.how])
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = wide_and_deep.build(keras, data.vocabulary)
        train = data.train.first(rows)
        clock = ps_problems.clock(keras, measure, rows)
        history = model.fit(
            [train.ids, train.numbers], train.late, batch_size=size,
            epochs=arguments.samples + 1, verbose=0, callbacks=[clock],
        )  # fmt: skip
        test = data.test
        logits = model.predict([test.ids, test.numbers], batch_size=8192, verbose=0)
        measure.say(
            loss=history.history["loss"][-1],
            about={"jax": jax.__version__, "keras": keras.__version__},
            **wide_and_deep.quality(logits, test.late),
        )
        strategy.close()


if __name__ == "__main__":
    main()
