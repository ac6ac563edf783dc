"""How a row of a dynamic table starts: drawn from its id, so that nothing else changes it.

Each id has a generator of its own, SplitMix64 (Steele, Lea and Flood, Fast Splittable
Pseudorandom Number Generators, OOPSLA 2014) with a state mixed from the id and the seed. Blocks
of rows as in `initial.py` would draw a whole block for each id, since hashed ids have no
neighbours. So a dynamic table does not start like a table of a preset size with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server import initial
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.index import mix

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ELEMENTS = 1 << 15  # drawn at once: the few temporaries stay in the L2 cache


def first_rows(
    start: Mapping[str, Any], shape: Sequence[int], dtype: Any
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from ids `[n]` (int64) to the initial values of their rows, `[n, *shape]`.

    Args:
        start: made with the functions of `initial.py`.
        shape: of one row.
        dtype: of the values.

    Raises:
        ValueError: that is no start, or none for the dtype.
    """
    dtype, shape = dtype_of(dtype), tuple(shape)
    initial.check(start, dtype.name)
    start, size = dict(start), math.prod(shape)
    if start["kind"] == "constant":
        return lambda ids: np.full((len(ids), *shape), start["value"], dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    seed = mix(np.array([start["seed"]], np.uint64))

    def draw(ids: np.ndarray) -> np.ndarray:
        rows = np.empty((len(ids), size), dtype)
        states = mix(mix(ids) + seed)
        step = max(1, _ELEMENTS // max(1, size))
        for at in range(0, len(ids), step):
            rows[at : at + step] = _draw(start, states[at : at + step], size, wide)
        return rows.reshape(-1, *shape)

    return draw


def _draw(start: Mapping[str, Any], states: np.ndarray, size: int, wide: Any) -> np.ndarray:
    """`[states, size]` elements; the n-th of a row comes from the n-th word of its generator."""
    numbers = np.arange(1, size + 1, dtype=np.uint64)
    words = _words(states[:, None], numbers)
    if start["kind"] == "uniform":
        unit = (words >> np.uint64(40)).astype(wide) * wide(2.0**-24)
        return unit * wide(start["high"] - start["low"]) + wide(start["low"])
    values = _normal(words, wide)
    if start["kind"] == "truncated_normal":
        row, column = np.nonzero(np.abs(values) > 2)
        number = numbers[column]
        while len(row):
            number = number + np.uint64(size)
            again = _normal(_words(states[row], number), wide)
            values[row, column] = again
            out = np.abs(again) > 2
            row, column, number = row[out], column[out], number[out]
    return values * wide(start["stddev"]) + wide(start["mean"])


def _words(states: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return mix(states + numbers * _GAMMA)


def _normal(words: np.ndarray, wide: Any) -> np.ndarray:
    """One normal number from each word: half of it is the radius, half the angle (Box, Muller)."""
    radius = ((words >> np.uint64(32)).astype(wide) + wide(0.5)) * wide(2.0**-32)
    angle = words.astype(np.uint32).astype(wide) * wide(2 * math.pi * 2.0**-32)
    return np.sqrt(wide(-2) * np.log(radius)) * np.cos(angle)
