"""An all-reduce between two processes, as a step of MultiWorkerMirroredStrategy does it."""

from __future__ import annotations

from typing import Any

import jax
import measure
import numpy as np
import pair
import problems

import stratagem
from stratagem.collectives import CommunicationImplementation, CommunicationOptions


def main() -> None:
    arguments = measure.options(("how", ["AUTO", "NCCL", "RING"]), ("size", list(problems.SIZES)))
    elements = problems.SIZES[arguments.size] // 4
    with pair.partner() as rank:
        options = CommunicationOptions(implementation=CommunicationImplementation[arguments.how])
        strategy = stratagem.MultiWorkerMirroredStrategy(communication_options=options)
        value = np.full(elements, rank + 1, np.float32)
        given = strategy.experimental_distribute_values_from_function(lambda _: value)
        batch = strategy.run(lambda x: x, args=(given,))

        def add_up(x: Any) -> Any:
            return stratagem.get_replica_context().all_reduce("SUM", x)

        def step(x: Any) -> Any:
            return strategy.run(add_up, args=(x,)).stacked

        measure.loop(step, [batch], arguments.steps, arguments.samples, jax.block_until_ready)
        (total,) = strategy.experimental_local_results(strategy.run(add_up, args=(batch,)))
        measure.say(loss=float(total[0]), about={"jax": jax.__version__})


if __name__ == "__main__":
    main()
