"""The same closures and lookups on Stratagem's ParameterServerStrategy and ClusterCoordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras
import measure
import ps_problems
import ps_tasks

import stratagem


def strategy_on(cluster: dict[str, list[str]], **how: Any) -> Any:
    """A strategy with tables divided over all ps.

    Args:
        how: its other arguments, such as `consistency`.
    """
    resolver = stratagem.cluster_resolver.SimpleClusterResolver(
        stratagem.cluster_resolver.ClusterSpec(cluster)
    )
    partitioner = stratagem.experimental.partitioners.FixedShardsPartitioner(len(cluster["ps"]))
    return stratagem.ParameterServerStrategy(resolver, partitioner, **how)


def add(strategy: Any, coordinator: Any) -> tuple[Any, tuple[Any, ...], Callable[[], float]]:
    """A closure that adds 1 to a variable."""
    with strategy.scope():
        counter = keras.Variable(0.0)

    def step() -> None:
        counter.assign_add(1.0)

    return step, (), lambda: float(counter.numpy())


def constant(strategy: Any, coordinator: Any) -> tuple[Any, tuple[Any, ...], Callable[[], float]]:
    """A closure that returns a constant."""

    def step() -> Any:
        return keras.ops.ones(())

    return step, (), lambda: 1.0


def lookup(
    strategy: Any, coordinator: Any, kind: str
) -> tuple[Any, tuple[Any, ...], Callable[[], float]]:
    """A step of SGD on the rows that a batch looks up."""
    with strategy.scope():
        table = keras.Variable(
            keras.initializers.RandomUniform(-0.05, 0.05, seed=1),
            shape=(ps_problems.ROWS, ps_problems.WIDTH),
            name="table",
        )
        optimizer = keras.optimizers.SGD(ps_problems.RATE)
        optimizer.build([table])

    def dataset() -> Any:
        index = stratagem.coordinator.experimental_get_current_worker_index()
        return ps_problems.endless(kind, index)

    def replica_step(ids: Any) -> Any:
        with stratagem.GradientTape() as tape:
            rows = stratagem.nn.embedding_lookup(table, ids)
            pooled = keras.ops.sum(rows, axis=1)
            loss = keras.ops.mean(keras.ops.square(pooled - 1.0))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return loss

    def step(iterator: Any) -> Any:
        return strategy.run(replica_step, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def loss() -> float:
        return float(coordinator.schedule(step, args=(iterator,)).fetch())

    return step, (iterator,), loss


CASES = {
    "add": add,
    "constant": constant,
    "uniform": lambda s, c: lookup(s, c, "uniform"),
    "zipf": lambda s, c: lookup(s, c, "zipf"),
}


def main() -> None:
    arguments = measure.options(
        ("what", list(CASES)), ("ps", list("1234")), ("workers", list("12345678"))
    )
    shape = int(arguments.ps), int(arguments.workers)
    with ps_tasks.running("ps_task_stratagem.py", *shape) as (cluster, _):
        strategy = strategy_on(cluster)
        coordinator = stratagem.coordinator.ClusterCoordinator(strategy)
        step, args, result = CASES[arguments.what](strategy, coordinator)
        measure.closures(
            lambda: coordinator.schedule(step, args=args), coordinator.join,
            arguments.steps, arguments.samples,
        )  # fmt: skip
        measure.say(loss=result(), about={"jax": jax.__version__, "keras": keras.__version__})
        strategy.close()


if __name__ == "__main__":
    main()
