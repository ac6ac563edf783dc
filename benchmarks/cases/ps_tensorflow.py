"""TensorFlow's ParameterServerStrategy and ClusterCoordinator, with tasks as real processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import measure
import ps_problems
import ps_tasks

os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import tensorflow as tf
import tf_keras


def strategy_on(cluster: dict[str, list[str]]) -> Any:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(len(cluster["ps"]))
    return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)


def add(strategy: Any, coordinator: Any) -> tuple[Any, tuple[Any, ...], Callable[[], float]]:
    """A closure that adds 1 to a variable."""
    with strategy.scope():
        counter = tf.Variable(0.0)

    @tf.function
    def step() -> None:
        counter.assign_add(1.0)

    return step, (), lambda: float(counter.numpy())


def constant(strategy: Any, coordinator: Any) -> tuple[Any, tuple[Any, ...], Callable[[], float]]:
    """A closure that returns a constant."""

    @tf.function
    def step() -> Any:
        return tf.constant(1.0)

    return step, (), lambda: 1.0


def lookup(
    strategy: Any, coordinator: Any, kind: str, unique: bool
) -> tuple[Any, tuple[Any, ...], Callable[[], float]]:
    """A step of SGD on the rows that a batch looks up.

    Args:
        kind: of ids, see `ps_problems.id_batches`.
        unique: looks up each row once and gathers from that, as a user may write it by hand.
    """
    with strategy.scope():
        table = tf.Variable(
            lambda: tf.random.stateless_uniform(
                (ps_problems.ROWS, ps_problems.WIDTH), (1, 2), -0.05, 0.05
            ),
            shape=(ps_problems.ROWS, ps_problems.WIDTH),
            dtype=tf.float32,
            name="table",
        )
        # The newer optimizer of the same name sums the rows of repeated ids first, and is 7 times
        # slower for it; SGD needs no such sums.
        optimizer = tf_keras.optimizers.legacy.SGD(ps_problems.RATE)
    shards = list(table.variables) if hasattr(table, "variables") else [table]

    def dataset() -> Any:
        data = tf.data.Dataset.from_tensor_slices(ps_problems.id_batches(kind))
        return data.shuffle(ps_problems.ID_BATCHES).repeat().prefetch(4)

    def replica_step(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            if unique:
                once, positions = tf.unique(tf.reshape(ids, [-1]))
                rows = tf.gather(tf.nn.embedding_lookup(table, once), positions)
                rows = tf.reshape(rows, [*ids.shape, ps_problems.WIDTH])
            else:
                rows = tf.nn.embedding_lookup(table, ids)
            pooled = tf.reduce_sum(rows, axis=1)
            loss = tf.reduce_mean(tf.square(pooled - 1.0))
        gradients = tape.gradient(loss, shards)
        optimizer.apply_gradients(zip(gradients, shards, strict=True))
        return loss

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(replica_step, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def loss() -> float:
        return float(coordinator.schedule(step, args=(iterator,)).fetch())

    return step, (iterator,), loss


CASES = {
    "add": add,
    "constant": constant,
    "uniform": lambda s, c: lookup(s, c, "uniform", False),
    "zipf": lambda s, c: lookup(s, c, "zipf", False),
    "uniform-unique": lambda s, c: lookup(s, c, "uniform", True),
    "zipf-unique": lambda s, c: lookup(s, c, "zipf", True),
}


def main() -> None:
    arguments = measure.options(
        ("what", list(CASES)), ("ps", list("1234")), ("workers", list("12345678"))
    )
    shape = int(arguments.ps), int(arguments.workers)
    with ps_tasks.running("ps_task_tensorflow.py", *shape) as (cluster, _):
        strategy = strategy_on(cluster)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        step, args, result = CASES[arguments.what](strategy, coordinator)
        measure.closures(
            lambda: coordinator.schedule(step, args=args), coordinator.join,
            arguments.steps, arguments.samples,
        )  # fmt: skip
        measure.say(
            loss=result(), about={"tensorflow": tf.__version__, "tf_keras": tf_keras.__version__}
        )


if __name__ == "__main__":
    main()
