"""Rows 46 to 50 of the reference and what else a custom loop does, on two workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import stratagem

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax.numpy as jnp
import keras
import numpy as np
from jobs import report

from stratagem import data

strategy = stratagem.MultiWorkerMirroredStrategy()
RANK = strategy.cluster_resolver.task_id
LOCAL = strategy.num_replicas_in_sync // 2


def parts(value: Any) -> list[Any]:
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


def reduce_and_gather() -> dict[str, Any]:
    own = np.float32(1 + RANK)
    uneven = strategy.experimental_distribute_values_from_function(
        lambda c: np.float32([1]) if c.replica_id_in_sync_group == 0 else np.float32([11, 11])
    )
    even = strategy.run(lambda: stratagem.get_replica_context().replica_id_in_sync_group + 1)
    return {
        "sum": float(strategy.reduce("SUM", own, None)),
        "mean": float(strategy.reduce("MEAN", own, None)),
        "sum_axis": float(strategy.reduce("SUM", np.float32([own, own]), axis=0)),
        "gather": np.asarray(strategy.gather(uneven, 0)).tolist(),
        "mean_axis": float(strategy.reduce("MEAN", uneven, axis=0)),
        "even_sum": int(strategy.reduce("SUM", even, None)),
        "even_parts": parts(even),
    }


def variables() -> dict[str, Any]:
    with strategy.scope():
        initial = keras.Variable(5.0 + RANK)
        total = keras.Variable(10.0, aggregation="sum")
        on_read = keras.Variable(1.0, aggregation="sum", synchronization="on_read")
        mean = keras.metrics.Mean()

    def step(x: Any) -> Any:
        rid = stratagem.get_replica_context().replica_id_in_sync_group
        total.assign_add(x + jnp.asarray(rid, "float32"))
        on_read.assign_add(jnp.asarray(rid + 1, "float32"))
        mean.update_state(jnp.asarray(rid, "float32"))
        return stratagem.get_replica_context().all_gather(x[None], 0)

    gathered = strategy.run(step, args=(np.float32(RANK),))
    result = {
        "initial": float(initial.numpy()),
        "total": float(total.numpy()),
        "on_read": float(on_read.numpy()),
        "mean": float(mean.result()),
        "gathered": parts(gathered)[0],
    }
    on_read.assign(8.0)
    result["spread"] = parts(on_read)
    return result


def reads(dataset: Any) -> list[Any]:
    return [parts(batch) for batch in dataset]


def datasets() -> dict[str, Any]:
    def stream(batches: list[list[int]]) -> list[np.ndarray]:
        return [np.int32(batch) for batch in batches]

    def own(context: Any) -> Any:
        assert context.num_input_pipelines == 2
        assert context.input_pipeline_id == RANK
        return stream([[0, 1]] if RANK == 0 else [[0], [1, 2], [3]])

    distribute = strategy.experimental_distribute_dataset
    return {
        "even": reads(distribute(data.batches(np.arange(14, dtype="int32"), 8))),
        "uneven": reads(distribute(data.batches(np.arange(9, dtype="int32"), 8))),
        "from_function": reads(strategy.distribute_datasets_from_function(own)),
    }


def custom_loop() -> dict[str, Any]:
    with strategy.scope():
        weights = keras.Variable(np.zeros((3, 1), "float32"))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        optimizer.build([weights])
    x = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)

    @stratagem.function
    def train_step(batch: Any) -> Any:
        def replica_step(inputs: Any) -> Any:
            features, targets = inputs
            with stratagem.GradientTape() as tape:
                losses = jnp.square(features @ weights.value - targets)[:, 0]
                loss = stratagem.nn.compute_average_loss(losses)
            optimizer.apply_gradients([(tape.gradient(loss, [weights])[0], weights)])
            return loss

        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    losses = [
        float(train_step(batch))
        for batch in strategy.experimental_distribute_dataset(data.batches((x, y), 4))
    ]
    return {"losses": losses, "weights": np.asarray(weights.value)[:, 0].tolist()}


report(
    {
        "reduce": reduce_and_gather(),
        "variables": variables(),
        "datasets": datasets(),
        "loop": custom_loop(),
        "devices": list(strategy.extended.worker_devices),
    }
)
