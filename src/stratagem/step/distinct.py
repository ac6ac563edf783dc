"""The distinct ones of some row numbers, and where each number is among them."""

from __future__ import annotations

import numpy as np

from stratagem.parameter_server.kernels import rank

# Up to so many rows for each number a bit is kept for each row; beyond, numbers are sorted. (Of
# 1,000,000 rows 26,624 numbers take 0.06 ms, of 100,000,000 rows 0.8 ms; sorted they take 2 to 3.)
_DENSE = 4096


class Distinct:
    """Of the row numbers of one table. Use it in one thread at a time.

    Args:
        rows: of the table.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._words = self._before = np.zeros(0, np.uint64)

    def of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Distinct numbers, int64, sorted, and where each of the given ones is there, int32.

        Args:
            numbers: integers `[n]`, from 0 to below the table's rows.
        """
        if not numbers.size:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        if self._rows > _DENSE * numbers.size:
            found, where = np.unique(numbers, return_inverse=True)
            return found.astype(np.int64), where.astype(np.int32)
        if not self._words.size:
            self._words = np.zeros(-(-self._rows // 64), np.uint64)
            self._before = np.empty(self._words.size, np.int32)
        found, where = np.empty(numbers.size, np.int64), np.empty(numbers.size, np.int32)
        return found[: rank(numbers, self._words, self._before, found, where)], where
