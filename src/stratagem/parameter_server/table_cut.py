"""A dynamic table as it is at one moment, copied later, while the table goes on changing.

What its rows hold is put aside before it changes, as `snapshot.py` does with rows of blocks; ids
and times, a few bytes a row, are copied at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from stratagem.parameter_server.dynamic import DynamicTable, Piece


class TableCut:
    """See the module. A table has one at a time.

    Args:
        table: the table; until `close` it tells this what changes.
        piece_bytes: of rows that are copied at a time.
    """

    def __init__(self, table: DynamicTable, piece_bytes: int):
        self._table = table
        self._rows = table.numbers()
        self._ids, self._touched = table.ids(self._rows), table.touched(self._rows)
        self._seen = table.seen()
        self._vids = list(table.columns)
        row_bytes = sum(column.row_bytes for column in table.columns.values())
        self._step = max(1, piece_bytes // max(1, row_bytes))
        # Whether a row is as it was and still to be copied, by number; those beyond are new.
        self._left = np.zeros(self._rows[-1] + 1 if len(self._rows) else 0, bool)
        self._left[self._rows] = True
        # By piece: places in it, and what they held, by variable.
        self._aside: dict[int, list[tuple[np.ndarray, dict[Hashable, np.ndarray]]]] = {}
        table.before_write = self._before_write

    def pieces(self) -> Iterator[Piece]:
        """All that the table held, a piece at a time; it may change in between."""
        ids, times, touched = self._seen
        for start in range(0, max(len(self._rows), len(ids)), self._step):
            part = slice(start, start + self._step)
            rows = self._rows[part]
            columns = {vid: self._table.columns[vid].take(rows) for vid in self._vids}
            self._left[rows] = False
            for places, held in self._aside.pop(start // self._step, ()):
                for vid, values in held.items():
                    columns[vid][places] = values
            yield Piece(
                self._ids[part], self._touched[part], columns, ids[part], times[part], touched[part]
            )

    def close(self) -> None:
        """The table need not tell any more what changes."""
        self._table.before_write = None

    def _before_write(self, rows: np.ndarray) -> None:
        rows = rows[rows < len(self._left)]
        rows = rows[self._left[rows]]
        if not len(rows):
            return
        self._left[rows] = False
        held = {vid: self._table.columns[vid].take(rows) for vid in self._vids}
        pieces, places = np.divmod(np.searchsorted(self._rows, rows), self._step)
        for piece in np.unique(pieces).tolist():
            here = pieces == piece
            values = {vid: x[here] for vid, x in held.items()}
            self._aside.setdefault(piece, []).append((places[here], values))
