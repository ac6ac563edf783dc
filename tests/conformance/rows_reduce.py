"""Rows 1 to 18: reduce and gather across replicas, all_reduce and all_gather within."""

from __future__ import annotations

from typing import Any

import numpy as np

import stratagem
from conformance.table import SEVERAL, Each, Row, context, each, parts, rank
from stratagem import ReduceOp
from stratagem.errors import UnevenShapesError

UNEVEN = ([1, 2], [3], [4, 5])
EMPTY = ([1, 2], [], [])
COUNTS = ([1, 2], [4], [4, 5])
PAIRS = ([0, 1], [4, 5], [7, 9])
SQUARES = ([[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]])
COLUMNS = ([[1], [2]], [[3]], [[4], [5]])
EVEN_COLUMNS = ([[1], [2]], [[3], [4]], [[5], [6]])

FLOAT32 = "the mean of integers is float32: JAX without x64 has no float64"


def reduce(op: Any, values: Any, axis: Any, dtype: Any = np.float32) -> Any:
    return lambda s: s.reduce(op, parts(s, values, dtype), axis)


def joined(values: Any, n: int, axis: int = 0) -> np.ndarray:
    return np.concatenate([np.asarray(v, np.float64) for v in values[:n]], axis)


def gradient(of: Any) -> Any:
    """The gradient of `of(x)` with respect to x, on each replica."""

    def step(x: Any) -> Any:
        with stratagem.GradientTape() as tape:
            y = of(x)
        return tape.gradient(y, x)

    return step


def summed_squares(x: Any) -> Any:
    return context().all_reduce(ReduceOp.SUM, x * x)


def mean_of_squares(x: Any) -> Any:
    return context().all_reduce("mean", x * x)


def gathered_squares(x: Any) -> Any:
    return context().all_gather(x * x, axis=0)


def reduce_a_list(x: Any) -> Any:
    return context().all_reduce("SUM", [x, 2 * x])


def sum_of_slices() -> Any:
    values = rank() * np.ones((1, 1), np.float32)
    slices = stratagem.IndexedSlices(values, np.array([1]), dense_shape=(3, 1))
    total = context().all_reduce("SUM", slices)
    return {"slices": total, "dense": total.to_dense()}


def slices_of(n: int) -> Any:
    """What row 18 gives as `[indices, values]` and dense, once the replicas are separated."""
    slices = [[1] * n, [[r + 1.0] for r in range(n)]]
    dense = [[0.0], [n * (n + 1) / 2], [0.0]]
    return {"slices": each(n, lambda _: slices), "dense": each(n, lambda _: dense)}


ROWS = [
    Row(1, "sum", reduce(ReduceOp.SUM, [1, 2, 3], None), lambda n: n * (n + 1) / 2, 3.0),
    Row(2, "mean", reduce("mean", [1, 2, 3], None), lambda n: (n + 1) / 2, 1.5),
    Row(
        3,
        "mean of uneven parts",
        reduce(ReduceOp.MEAN, UNEVEN, 0),
        lambda n: float(joined(UNEVEN, n).mean()),
        2.0,
    ),
    Row(
        4,
        "mean of integers over an axis",
        reduce(ReduceOp.MEAN, COUNTS, 0, np.int32),
        lambda n: float(joined(COUNTS, n).mean()),
        2.3333333333333335,
        differs=FLOAT32,
        dtype="float32",
    ),
    Row(
        5,
        "sum of uneven parts",
        reduce("SUM", UNEVEN, 0),
        lambda n: float(joined(UNEVEN, n).sum()),
        6.0,
    ),
    Row(
        6,
        "sum of vectors",
        reduce("SUM", PAIRS, None),
        lambda n: np.sum(PAIRS[:n], 0, dtype=float).tolist(),
        [4.0, 6.0],
    ),
    Row(
        7,
        "uneven parts need an axis",
        reduce("SUM", UNEVEN, None),
        UnevenShapesError,
        "InvalidArgumentError",
        on=SEVERAL,
        match=r"replica 0: \(2,\) float32, replica 1: \(1,\) float32.*axis=0 for rows",
    ),
    Row(8, "empty parts weigh nothing", reduce("MEAN", EMPTY, 0), lambda n: 1.5, 1.5),
    Row(
        9,
        "two axes",
        reduce("MEAN", SQUARES, (0, 1)),
        lambda n: float(np.mean(SQUARES[:n])),
        4.5,
    ),
    Row(
        9,
        "last axis",
        reduce("MEAN", SQUARES, -1),
        lambda n: np.mean(SQUARES[:n], (0, 2)).tolist(),
        [3.5, 5.5],
    ),
    Row(
        10,
        "mean of integers",
        reduce("MEAN", [1, 2, 3], None, np.int32),
        lambda n: (n + 1) / 2,
        1.5,
        differs=FLOAT32,
        on=SEVERAL,
        dtype="float32",
    ),
    Row(
        11,
        "sum of one tensor",
        lambda s: s.reduce("SUM", np.float32(3), None),
        ValueError,
        "ValueError",
        on=SEVERAL,
        match="Expected a PerReplica value to sum over . replicas",
    ),
    Row(
        11,
        "mean of one tensor",
        lambda s: s.reduce("MEAN", np.float32(3), None),
        lambda n: 3.0,
        3.0,
    ),
    Row(
        12,
        "one tensor over an axis",
        lambda s: s.reduce("SUM", np.array([1, 2], np.float32), axis=0),
        lambda n: 3.0 * n,
        6.0,
    ),
    Row(
        13,
        "gather rows",
        lambda s: s.gather(parts(s, COLUMNS), 0),
        lambda n: joined(COLUMNS, n).tolist(),
        [[1.0], [2.0], [3.0]],
    ),
    Row(
        14,
        "gather columns",
        lambda s: s.gather(parts(s, EVEN_COLUMNS), 1),
        lambda n: joined(EVEN_COLUMNS, n, 1).tolist(),
        [[1.0, 3.0], [2.0, 4.0]],
    ),
    Row(
        15,
        "all_reduce",
        lambda s: s.run(lambda x: context().all_reduce(ReduceOp.SUM, x), (parts(s, [1, 2, 3]),)),
        lambda n: each(n, lambda _: n * (n + 1) / 2),
        Each([3.0, 3.0]),
    ),
    Row(
        15,
        "all_reduce of a list",
        lambda s: s.run(reduce_a_list, (parts(s, [1, 2, 3]),)),
        lambda n: [each(n, lambda _: n * (n + 1) / 2), each(n, lambda _: n * (n + 1.0))],
        [Each([3.0, 3.0]), Each([6.0, 6.0])],
    ),
    Row(
        16,
        "gradient of a sum",
        lambda s: s.run(gradient(summed_squares), (parts(s, [1, 2, 3]),)),
        lambda n: each(n, lambda r: 2.0 * n * (r + 1)),
        Each([4.0, 8.0]),
    ),
    Row(
        16,
        "gradient of a mean",
        lambda s: s.run(gradient(mean_of_squares), (parts(s, [1, 2, 3]),)),
        lambda n: each(n, lambda r: 2.0 * (r + 1)),
        Each([2.0, 4.0]),
    ),
    Row(
        17,
        "all_gather",
        lambda s: s.run(lambda x: context().all_gather(x, axis=0), (parts(s, UNEVEN),)),
        lambda n: each(n, lambda _: joined(UNEVEN, n).tolist()),
        Each([[1.0, 2.0, 3.0]] * 2),
    ),
    Row(
        17,
        "gradient of all_gather",
        lambda s: s.run(gradient(gathered_squares), (parts(s, ([1], [2, 3], [4])),)),
        lambda n: each(n, lambda r: [2.0 * n * x for x in ([1], [2, 3], [4])[r]]),
        Each([[4.0], [8.0, 12.0]]),
    ),
    Row(
        18,
        "all_reduce of IndexedSlices",
        lambda s: s.run(sum_of_slices),
        lambda n: slices_of(n),
        {
            "slices": Each([[[1, 1], [[1.0], [2.0]]]] * 2),
            "dense": Each([[[0.0], [3.0], [0.0]]] * 2),
        },
    ),
]
