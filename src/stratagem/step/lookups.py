"""What a worker does with pulled rows itself: takes those of a lookup, and adds up gradients."""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import sparse

from stratagem.parameter_server.cut import aligned


def taken(rows: np.ndarray, where: np.ndarray) -> np.ndarray:
    """`rows[where]`, where XLA reads it without a copy.

    Args:
        rows: `[n, *row]`.
        where: places of rows, in bounds, of any shape.
    """
    out = aligned((*where.shape, *rows.shape[1:]), rows.dtype)
    if out.size:
        # "clip" does not clip anything; but "raise" would go through a buffer.
        np.take(rows, where, axis=0, out=out, mode="clip")
    return out


def added(gradients: np.ndarray, where: np.ndarray, count: int, row: tuple[int, ...]) -> np.ndarray:
    """The sum of each row's gradients `[count, *row]`, added in the order in which they come.

    Args:
        gradients: `[..., *row]`; each is of as many places that follow each other as fit.
        where: places of rows, of any shape.
        count: how many rows there are.
        row: shape of one.
    """
    if not gradients.size or not where.size:
        return np.zeros((count, *row), gradients.dtype)
    columns = gradients.reshape(-1, math.prod(row))
    ones, bounds = _ones(where.size, len(columns), columns.dtype.name)
    matrix = sparse.csc_array((ones, where.reshape(-1), bounds), (count, len(columns)))
    return np.asarray(matrix @ columns).reshape(count, *row)


@functools.lru_cache(maxsize=64)
def _ones(places: int, columns: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Values of a sparse matrix with as many ones in each column, and where columns begin."""
    return np.ones(places, dtype), np.arange(0, places + 1, places // columns, dtype=np.int32)
