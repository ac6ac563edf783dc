"""How a variable starts, as plain data that a parameter server carries out by itself.

Rows are drawn in blocks of a fixed number of them, each from a generator of its own:
Philox (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011) with the key
(seed, block). So the values do not depend on how the variable is cut, and a table of any size
needs no memory but its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stratagem.parameter_server.dtypes import dtype_of

# Elements drawn at once: 256 KB of float32 stay in the L2 cache.
_BLOCK = 1 << 16
_FIELDS = {
    "constant": {"value"},
    "uniform": {"low", "high", "seed"},
    "normal": {"mean", "stddev", "seed"},
    "truncated_normal": {"mean", "stddev", "seed"},
}


def constant(value: float) -> dict[str, Any]:
    """The same value everywhere."""
    return {"kind": "constant", "value": value}


def uniform(low: float, high: float, seed: int) -> dict[str, Any]:
    """Uniform in [low, high)."""
    return {"kind": "uniform", "low": low, "high": high, "seed": seed}


def normal(mean: float, stddev: float, seed: int) -> dict[str, Any]:
    """Normal."""
    return {"kind": "normal", "mean": mean, "stddev": stddev, "seed": seed}


def truncated_normal(mean: float, stddev: float, seed: int) -> dict[str, Any]:
    """Normal, drawn again where it is more than two standard deviations from the mean."""
    return {"kind": "truncated_normal", "mean": mean, "stddev": stddev, "seed": seed}


def check(start: Any, dtype: str) -> None:
    """Raises ValueError for what is no description of a start, or none for the dtype."""
    kind = start.get("kind") if isinstance(start, Mapping) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    good = fields is not None and set(start) == fields | {"kind"}
    if good:
        seed = start.get("seed", 0)
        good = all(_is_number(start[name]) for name in fields or () if name != "seed")
        good = good and isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 1 << 64
    if not good:
        raise ValueError(
            f"Expected a start of the kinds {', '.join(_FIELDS)} with finite numbers. Got "
            f"{start!r:.200}. Use the functions of initial.py."
        )
    if kind != "constant" and "float" not in dtype_of(dtype).name:
        raise ValueError(
            f"Expected a floating-point dtype for random values. Got {dtype} with {kind}. Start "
            "it with a constant or a value."
        )


def fill(
    start: Mapping[str, Any], out: np.ndarray, row_shape: tuple[int, ...], first: int, total: int
) -> Iterator[None]:
    """Writes the first values of some rows, a block at each step.

    Args:
        start: what `check` accepts.
        out: the rows, C-contiguous.
        row_shape: of one.
        first: the number of the first of them in the whole variable.
        total: how many rows the whole variable has.
    """
    if not out.size:
        return
    rows = out.reshape(-1, math.prod(row_shape))
    size = max(1, _BLOCK // max(1, rows.shape[1]))  # rows in a block
    at, last = first, first + len(rows)
    while at < last:
        block = at // size
        stop = min(last, (block + 1) * size)
        here = rows[at - first : stop - first]
        if start["kind"] == "constant":
            here[...] = start["value"]
        else:
            _draw(start, block, at - block * size, here, min(size, total - block * size))
        yield
        at = stop


def _draw(start: Mapping[str, Any], block: int, skip: int, out: np.ndarray, size: int) -> None:
    """Some rows of a block of `size`, of which `skip` come before them."""
    key = np.array([start["seed"], block], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    wide = np.float64 if out.dtype == np.float64 else np.float32
    direct = len(out) == size and out.dtype == wide
    drawn = out if direct else np.empty((size, out.shape[1]), wide)
    if start["kind"] == "uniform":
        generator.random(dtype=wide, out=drawn)
        drawn *= wide(start["high"] - start["low"])
        drawn += wide(start["low"])
    else:
        generator.standard_normal(dtype=wide, out=drawn)
        if start["kind"] == "truncated_normal":
            _truncate(generator, drawn, wide)
        drawn *= wide(start["stddev"])
        drawn += wide(start["mean"])
    if not direct:
        out[...] = drawn[skip : skip + len(out)]


def _truncate(generator: np.random.Generator, drawn: np.ndarray, wide: Any) -> None:
    flat = drawn.reshape(-1)
    again = np.flatnonzero(np.abs(flat) > 2)
    while again.size:
        flat[again] = generator.standard_normal(again.size, dtype=wide)
        again = again[np.abs(flat[again]) > 2]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)
