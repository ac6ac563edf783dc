"""Rows 19 to 23, 39 to 41, 43 and 45: run, merge_call, contexts, values and losses."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

import stratagem
from conformance.table import REAL, SEVERAL, Each, Row, context, each, parts, replica_id
from stratagem.errors import ReplicaBranchError

ONE_TRACE = (
    "the step is traced once for all replicas, so Python cannot branch on the replica id: the "
    "error (a RuntimeError) comes at the branch, before merge_call"
)


def merged(strategy: Any) -> Any:
    seen = []

    def merge(merging: Any, x: Any) -> Any:
        seen.append((merging is strategy, stratagem.in_cross_replica_context()))
        return merging.reduce(stratagem.ReduceOp.SUM, x, axis=None)

    result = strategy.run(
        lambda x: context().merge_call(merge, (x,)) * 10, (parts(strategy, [1, 2, 3]),)
    )
    return [result, seen]


def merge_on_the_first_alone(strategy: Any) -> Any:
    def step() -> Any:
        if replica_id() == 0:
            return context().merge_call(lambda s: 1)
        return 0

    return strategy.run(step)


def enter(outer: Any, inner: Any) -> Any:
    with outer.scope(), inner.scope():
        return stratagem.get_strategy() is inner


def scope_in_replica(strategy: Any) -> Any:
    def step() -> None:
        with strategy.scope():
            pass

    return strategy.run(step)


def product(strategy: Any) -> Any:
    ops = stratagem.ReductionToOneDevice(accumulation_fn=math.prod)
    own = stratagem.MirroredStrategy(strategy.worker_devices, cross_device_ops=ops)
    return own.run(lambda x: context().all_reduce("SUM", x), (parts(own, [2, 3, 4]),))


def tape_of_a_product(strategy: Any) -> Any:
    with strategy.scope():
        v = keras.Variable(3.0)

    def step(x: Any) -> Any:
        with stratagem.GradientTape() as tape:
            y = v * v * x
        return tape.gradient(y, v)

    return strategy.run(step, (parts(strategy, [1, 2, 3]),))


def average_loss(**kwargs: Any) -> Any:
    losses = np.array([1, 3], np.float32)
    return lambda s: s.run(lambda: stratagem.nn.compute_average_loss(losses, **kwargs))


def regularization(strategy: Any) -> Any:
    losses = np.array([4, 2], np.float32)
    return strategy.run(lambda: stratagem.nn.scale_regularization_loss(losses))


def is_identity(strategy: Any) -> Any:
    dataset, value = [1, 2], object()
    return [
        strategy.experimental_distribute_dataset(dataset) is dataset,
        strategy.reduce("SUM", value, axis=None) is value,
        strategy.gather(value, axis=0) is value,
        strategy.experimental_local_results(value) == (value,),
    ]


def other() -> Any:
    return stratagem.OneDeviceStrategy("CPU:0")


ROWS = [
    Row(19, "a Python number", lambda s: s.run(lambda: 5), lambda n: 5, 5),
    Row(
        19,
        "a tensor",
        lambda s: s.run(lambda: keras.ops.convert_to_tensor(5)),
        lambda n: each(n, lambda _: 5),
        Each([5, 5]),
    ),
    Row(19, "nothing", lambda s: s.run(lambda: None), lambda n: None, None),
    Row(
        20,
        "a tensor goes to all replicas",
        lambda s: s.run(lambda x: x + replica_id(), args=(np.float32(1),)),
        lambda n: each(n, lambda r: 1.0 + r),
        Each([1.0, 2.0]),
    ),
    Row(
        21,
        "merge_call",
        merged,
        lambda n: [each(n, lambda _: 5.0 * n * (n + 1)), [[True, True]]],
        [Each([30.0, 30.0]), [[True, True]]],
    ),
    Row(
        22,
        "merge_call on replica 0 alone",
        merge_on_the_first_alone,
        ReplicaBranchError,
        "RuntimeError",
        differs=ONE_TRACE,
        on=REAL,
        match=r"needs the value of a tensor at .*rows_run.py:\d+ in step.*jax.lax.cond",
    ),
    Row(
        23,
        "another strategy's scope",
        lambda s: enter(s, other()),
        RuntimeError,
        "RuntimeError",
        on=REAL,
        match="Expected no other strategy to be current(.|\n)*made at .*rows_run.py",
    ),
    Row(23, "the same scope", lambda s: enter(s, s), lambda n: True, True),
    Row(
        23,
        "a scope in a replica function",
        scope_in_replica,
        RuntimeError,
        "RuntimeError",
        on=REAL,
        match="Expected scope of .* in cross-replica context.*merge_call",
    ),
    Row(
        23,
        "run in a replica function",
        lambda s: s.run(lambda: s.run(lambda: 1)),
        RuntimeError,
        "RuntimeError",
        on=REAL,
        match="Expected run of .* in cross-replica context.*merge_call",
    ),
    Row(
        39,
        "values from a function",
        lambda s: s.experimental_distribute_values_from_function(
            lambda ctx: ctx.replica_id_in_sync_group * 10 + ctx.num_replicas_in_sync
        ),
        lambda n: each(n, lambda r: 10 * r + n),
        Each([2, 12]),
    ),
    Row(
        39,
        "one value from a function",
        lambda s: s.experimental_distribute_values_from_function(lambda ctx: 5),
        lambda n: each(n, lambda _: 5),
        Each([5, 5]),
    ),
    Row(
        40,
        "average loss",
        average_loss(),
        lambda n: each(n, lambda _: 4.0 / (2 * n)),
        Each([1.0, 1.0]),
    ),
    Row(
        40,
        "average loss of a global batch of 8",
        average_loss(global_batch_size=8),
        lambda n: each(n, lambda _: 0.5),
        Each([0.5, 0.5]),
    ),
    Row(
        40,
        "regularisation counts once",
        regularization,
        lambda n: each(n, lambda _: 6.0 / n),
        Each([3.0, 3.0]),
    ),
    Row(
        41,
        "the default strategy changes nothing",
        is_identity,
        lambda n: [True] * 4,
        [True] * 4,
        on=("default",),
    ),
    Row(
        43,
        "a product as all_reduce",
        product,
        lambda n: each(n, lambda _: float(math.prod(range(2, n + 2)))),
        Each([6.0, 6.0]),
        on=SEVERAL,
    ),
    Row(
        45,
        "a tape on each replica",
        tape_of_a_product,
        lambda n: each(n, lambda r: 6.0 * (r + 1)),
        Each([6.0, 12.0]),
    ),
]
