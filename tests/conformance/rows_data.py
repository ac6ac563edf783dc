"""Rows 32 to 38: which replica sees which rows, and the ends of datasets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from conformance.table import REAL, Each, Row, each, plain
from stratagem.data import AutoShardPolicy, InputContext, batches, with_options
from stratagem.errors import OutOfRangeError


def numbers(rows: int, size: int, **kwargs: Any) -> Any:
    return batches(np.arange(rows, dtype=np.int32), size, **kwargs)


def steps(rows: int, size: int, policy: AutoShardPolicy | None = None) -> Any:
    def call(strategy: Any) -> Any:
        dataset = numbers(rows, size)
        if policy is not None:
            dataset = with_options(dataset, auto_shard_policy=policy)
        return [plain(batch) for batch in strategy.experimental_distribute_dataset(dataset)]

    return call


def dealt(rows: int, size: int, replicas: int, *, even: bool = False) -> list[Any]:
    """Steps of `range(rows).batch(size)`: parts of ceil(size / replicas) rows, or even ones."""
    result = []
    for start in range(0, rows, size):
        batch = list(range(start, min(rows, start + size)))
        if even:
            lengths = [len(part) for part in np.array_split(np.arange(len(batch)), replicas)]
        else:
            lengths = [math.ceil(len(batch) / replicas)] * replicas
        ends = np.cumsum([0, *lengths])
        cut = [batch[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        result.append(each(replicas, cut.__getitem__))
    return result


def from_function(**kwargs: Any) -> Any:
    def call(strategy: Any) -> Any:
        made = strategy.distribute_datasets_from_function(lambda ctx: numbers(6, 2, **kwargs))
        return [plain(batch) for batch in made]

    return call


def whole(replicas: int, *, static: bool = False) -> list[Any]:
    """Elements [0, 1], [2, 3], [4, 5] dealt in turn; the last step is left out if static."""
    elements: list[list[int]] = [[0, 1], [2, 3], [4, 5]]
    if static:
        elements = elements[: len(elements) // replicas * replicas]
    elements += [[]] * (-len(elements) % replicas)
    return [
        each(replicas, elements[i : i + replicas].__getitem__)
        for i in range(0, len(elements), replicas)
    ]


def means(strategy: Any) -> Any:
    dataset = strategy.experimental_distribute_dataset(batches(np.arange(5, dtype=np.float32), 4))
    return [strategy.reduce("MEAN", batch, axis=0) for batch in dataset]


def ended(strategy: Any) -> Any:
    iterator = iter(strategy.experimental_distribute_dataset(numbers(2, 2)))
    next(iterator)
    return iterator


def raises_stop(strategy: Any) -> bool:
    return next(ended(strategy), "stopped") == "stopped"


ROWS = [
    Row(
        32,
        "7 rows in batches of 4",
        steps(7, 4),
        lambda n: dealt(7, 4, n),
        [Each([[0, 1], [2, 3]]), Each([[4, 5], [6]])],
    ),
    Row(
        33,
        "5 rows in batches of 4",
        steps(5, 4),
        lambda n: dealt(5, 4, n),
        [Each([[0, 1], [2, 3]]), Each([[4], []])],
    ),
    Row(
        34,
        "policy AUTO",
        lambda s: steps(8, 4)(s)[0],
        lambda n: dealt(8, 4, n)[0],
        Each([[0, 1], [2, 3]]),
    ),
    Row(
        34,
        "policy OFF",
        lambda s: steps(8, 4, AutoShardPolicy.OFF)(s)[0],
        lambda n: dealt(8, 4, n, even=True)[0],
        Each([[0, 1], [2, 3]]),
    ),
    Row(35, "mean of each step", means, lambda n: [1.5, 4.0], [1.5, 4.0]),
    Row(
        36,
        "batches from a function",
        from_function(),
        whole,
        [Each([[0, 1], [2, 3]]), Each([[4, 5], []])],
    ),
    Row(
        36,
        "batches of static shape from a function",
        from_function(drop_remainder=True),
        lambda n: whole(n, static=True),
        [Each([[0, 1], [2, 3]])],
    ),
    Row(
        37,
        "per-replica batch size",
        lambda s: InputContext(1, 0, s.num_replicas_in_sync).get_per_replica_batch_size(12),
        lambda n: 12 // n,
        6,
    ),
    Row(
        37,
        "a batch size that does not divide",
        lambda s: InputContext(1, 0, s.num_replicas_in_sync).get_per_replica_batch_size(5),
        ValueError,
        "ValueError",
        on=("two", "three"),
        match="5",
    ),
    Row(
        38,
        "get_next past the end",
        lambda s: ended(s).get_next(),
        OutOfRangeError,
        "OutOfRangeError",
        on=REAL,
        match="Got the end of the dataset after 1 steps",
    ),
    Row(38, "next past the end", raises_stop, lambda n: True, True),
    Row(
        38,
        "an optional past the end",
        lambda s: ended(s).get_next_as_optional().has_value(),
        lambda n: False,
        False,
        on=REAL,
    ),
]
