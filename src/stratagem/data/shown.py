"""What identifies the rows that a worker was given."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

_SHOWN_ROWS = 5


def first_rows(leaf: Any) -> tuple[Any, ...]:
    """The first rows of an array: the values, or a CRC-32 of each row."""
    if not leaf.shape:
        return (np.asarray(leaf).item(),)
    rows = np.asarray(leaf[:_SHOWN_ROWS])
    if rows.ndim == 1:
        return tuple(rows.tolist())
    return tuple(zlib.crc32(row.tobytes()) for row in rows)
