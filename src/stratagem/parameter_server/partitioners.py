"""Into how many shards a variable is cut: TensorFlow's three partitioners.

Public as `stratagem.experimental.partitioners`. A partitioner is any callable of a shape and a
dtype that returns a number of parts per axis; only the first may be more than one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stratagem.parameter_server.dtypes import dtype_of


class Partitioner:
    """Base class: `__call__(shape, dtype, axis=0)` returns the number of parts on each axis."""

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable, at most one a row.

    Args:
        num_shards: how many.
    """

    def __init__(self, num_shards: int):
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        return _parts(shape, axis, max(1, min(self._num_shards, _size(shape, axis))))


class MinSizePartitioner(Partitioner):
    """As many shards as can be, none smaller than a size.

    Args:
        min_shard_bytes: the size.
        max_shards: no more than these.
        bytes_per_string: what an element counts where the dtype is a string.

    Raises:
        ValueError: one of them is not positive.
    """

    def __init__(
        self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16
    ):
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        rows = _size(shape, axis)
        total = math.prod(shape) * _item_bytes(dtype, self._bytes_per_string)
        wanted = math.ceil(total / self._min_shard_bytes)
        return _parts(shape, axis, max(1, min(rows, self._max_shards, wanted)))


class MaxSizePartitioner(Partitioner):
    """As few shards as can be, none larger than a size unless `max_shards` forces it.

    Args:
        max_shard_bytes: the size.
        max_shards: no more than these; None: as many as it takes.
        bytes_per_string: what an element counts where the dtype is a string.

    Raises:
        ValueError: one of them is not positive.
    """

    def __init__(
        self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16
    ):
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        # As in TensorFlow, zero shards mean no limit.
        self._max_shards = _positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        rows = _size(shape, axis)
        if not rows:
            return _parts(shape, axis, 0)
        row_bytes = math.prod(shape) // rows * _item_bytes(dtype, self._bytes_per_string)
        rows_in_shard = max(1, self._max_shard_bytes // row_bytes) if row_bytes else rows
        wanted = math.ceil(rows / rows_in_shard)
        return _parts(shape, axis, max(1, min(self._max_shards or wanted, wanted)))


def _positive(name: str, value: Any) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{name}: expected a positive number. Got {value!r}. Use 1 for the smallest there is."
        )
    return value


def _size(shape: Sequence[int], axis: int) -> int:
    if not 0 <= axis < len(shape):
        raise ValueError(
            f"Expected an axis of the shape to cut along. Got axis {axis} of the shape "
            f"{tuple(shape)}. Use axis 0 of a shape with at least one."
        )
    return shape[axis]


def _parts(shape: Sequence[int], axis: int, parts: int) -> list[int]:
    return [parts if i == axis else 1 for i in range(len(shape))]


def _item_bytes(dtype: Any, bytes_per_string: int) -> int:
    if str(getattr(dtype, "name", dtype)) == "string":
        return bytes_per_string
    return dtype_of(dtype).itemsize
