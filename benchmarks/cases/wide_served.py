"""The wide-and-deep model of flights on 2 ps and 2 workers: as `wide_single.py` on one device.

    python benchmarks/cases/wide_served.py hybrid --epochs 2 --seed 0

Prints a line of JSON after each epoch as there, and at the end the staleness that was measured.
"""

from __future__ import annotations

import argparse

import flights
import keras
import measure
import ps_fit_stratagem
import ps_stratagem
import ps_tasks
import wide_and_deep
import wide_single

import stratagem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("how", choices=ps_fit_stratagem.HOW)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    data = flights.load()
    with ps_tasks.running("ps_task_stratagem.py", 2, 2) as (cluster, _):
        strategy = ps_stratagem.strategy_on(cluster, **ps_fit_stratagem.HOW[arguments.how])
        keras.utils.set_random_seed(arguments.seed)
        with strategy.scope():
            model = wide_and_deep.build(keras, data.vocabulary)
        wide_single.train(model, data, arguments.epochs)
        staleness = stratagem.coordinator.ClusterCoordinator(strategy).staleness
        measure.say(staleness=staleness.mean, most=staleness.max)
        strategy.close()


if __name__ == "__main__":
    main()
