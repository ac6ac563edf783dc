"""What a store asks of row numbers and arrays before it uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server import initial
from stratagem.parameter_server.bags import Bags
from stratagem.parameter_server.block import Block
from stratagem.parameter_server.kernels import DTYPES
from stratagem.parameter_server.plan import Spec


def start(spec: Spec, shards: Sequence[int], said: Any) -> None:
    """Raises ValueError unless this says how some shards of a variable start."""
    if not isinstance(said, dict) or said.get("kind") != "value":
        initial.check(said, spec.dtype)
        return
    arrays = said.get("arrays")
    for index in shards:
        value = arrays.get(index) if isinstance(arrays, dict) else None
        good = (
            isinstance(value, np.ndarray)
            and value.dtype.name == spec.dtype
            and value.shape == spec.shard_shape(index)
        )
        if not good:
            got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else value
            raise ValueError(
                f"variable {spec.name!r}: expected {spec.dtype}{list(spec.shard_shape(index))} as "
                f"the value of shard {index}. Got {got}. Send one for each shard."
            )


def row_numbers(block: Block, rows: np.ndarray) -> None:
    """Raises ValueError unless these are int64 numbers of rows in the block, in any order."""
    if rows.dtype != np.int64 or rows.ndim != 1 or not block.array.ndim:
        raise ValueError(
            f"Expected row numbers int64[n] of a variable that has rows. Got {rows.dtype}"
            f"{list(rows.shape)} for {list(block.array.shape)}. Convert them."
        )
    if len(rows) and not block.start <= rows.min() <= rows.max() < block.stop:
        raise ValueError(
            f"Expected row numbers from {block.start} to {block.stop - 1}. Got {rows.min()} to "
            f"{rows.max()}. Send each to the server that has its row."
        )


def room(spec: Spec, rows: np.ndarray, room: int) -> None:
    """Raises ValueError unless an array of so many rows may be made for these of a variable."""
    most = max(len(rows), spec.rows)
    if not len(rows) <= room <= most:
        raise ValueError(
            f"variable {spec.name!r}: expected an array for {len(rows)} to {most} rows. Got one "
            f"for {room}. Use the client of this version."
        )


def bags(spec: Spec, bags: Bags, rows: int) -> None:
    """Raises ValueError unless these are bags of so many rows of a variable that has sums."""
    if spec.dtype not in DTYPES or spec.dynamic is not None or not spec.shape:
        kind = "a dynamic table" if spec.dynamic is not None else "a variable"
        raise ValueError(
            f"variable {spec.name!r}: expected a table of a preset size with rows of "
            f"{' or '.join(DTYPES)}, to add rows up. Got {kind}, {spec.dtype}{list(spec.shape)}. "
            "Pull and push its rows."
        )
    bags.check(rows)


def sorted_rows(block: Block, rows: np.ndarray) -> None:
    """As `row_numbers`, and sorted, no number twice."""
    if rows.dtype != np.int64 or rows.ndim != 1 or not block.array.ndim:
        row_numbers(block, rows)
    if len(rows) > 1 and not bool((rows[1:] > rows[:-1]).all()):
        raise ValueError(
            f"Expected row numbers that are sorted, none twice. Got {rows[:10]} and so on. Use "
            "np.unique."
        )
    if len(rows) and not block.start <= rows[0] <= rows[-1] < block.stop:
        row_numbers(block, rows)


def row_range(block: Block, start: int, stop: int) -> None:
    """Raises ValueError unless the block has these rows."""
    if not block.start <= start <= stop <= block.stop:
        raise ValueError(
            f"Expected a range of rows from {block.start} to {block.stop}. Got {start} to {stop}. "
            "Send each to the server that has its rows."
        )
    if not block.array.ndim and (start, stop) != (block.start, block.stop):
        raise ValueError(f"Expected the one row of a scalar, 0 to 1. Got {start} to {stop}.")


def local(block: Block, rows: np.ndarray) -> np.ndarray:
    """Numbers in the block, of numbers in the whole variable."""
    return rows - block.start if block.start else rows


def same_kind(uid: int | str, before: np.ndarray, after: np.ndarray) -> None:
    """Raises ValueError for a new value of another shape or dtype than the old one."""
    if before.shape != after.shape or before.dtype != after.dtype:
        raise ValueError(
            f"unit {uid}: expected an update that keeps {before.dtype}{list(before.shape)}. Got "
            f"{after.dtype}{list(after.shape)}. Check the program that was installed."
        )
