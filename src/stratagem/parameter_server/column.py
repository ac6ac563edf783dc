"""Rows that grow in number."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

from stratagem.parameter_server.block import Block

_FIRST_BYTES = 1 << 20  # of a new column
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Column:
    """Rows `[n, *shape]` of one dtype, addressed by number.

    One array, in memory whose pages Linux moves instead of copying them when it grows; what no row
    was written to takes no memory. (Chunks that never move take 3 to 5 times as long to look rows
    up in.)
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.row_shape, self.dtype = tuple(shape), dtype
        self.row_bytes = math.prod(self.row_shape) * dtype.itemsize
        self._memory = mmap.mmap(-1, mmap.PAGESIZE, flags=_FLAGS)
        self._room = 0

    @property
    def block(self) -> Block:
        """All the room, to be changed in place; `reserve` raises BufferError while it is kept."""
        memory = np.frombuffer(self._memory, np.uint8)[: self._room * self.row_bytes]
        return Block(memory.view(self.dtype).reshape(self._room, *self.row_shape))

    def reserve(self, size: int) -> None:
        """Makes room for the rows below `size`.

        Raises:
            MemoryError: there is none.
        """
        if size <= self._room:
            return
        room = max(size, self._room + self._room // 2, _FIRST_BYTES // max(1, self.row_bytes))
        nbytes = max(mmap.PAGESIZE, room * self.row_bytes)
        try:
            with contextlib.suppress(SystemError):  # no mremap, as on macOS
                self._memory.resize(nbytes)
            if len(self._memory) < nbytes:
                larger = mmap.mmap(-1, nbytes, flags=_FLAGS)
                larger[: len(self._memory)] = memoryview(self._memory)
                self._memory = larger
        except OSError as e:
            raise MemoryError(
                f"Expected {nbytes:,} bytes for {room:,} rows of a dynamic table. Got {e}. Use "
                "more parameter servers, max_rows or expire_after."
            ) from e
        self._room = room

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The rows of these numbers, `[rows, *shape]`, a copy."""
        return self.block.take(rows)

    def put(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Writes `[rows, *shape]` of the dtype to rows of distinct numbers within the room."""
        self.block.put(rows, values)
