"""The dynamic tables of one parameter server, as its store keeps them.

Their clock is the number of pushes that the store has applied: so that a replica and a restored
server see the same times, and expire the same rows. Rows are made by pushes alone: a pull gives an
id without a row the values that it would start with, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

from stratagem.parameter_server.block import Block
from stratagem.parameter_server.buckets import BUCKETS, deal, server_of
from stratagem.parameter_server.by_id import first_rows
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.dynamic import DynamicTable, Piece
from stratagem.parameter_server.plan import Spec
from stratagem.parameter_server.policy import Policy
from stratagem.parameter_server.rows import RowProgram
from stratagem.parameter_server.table_cut import TableCut

_LOOKS = 8  # how often in the time of `expire_after` a table looks for rows that are due
_FIXED = ("ids", "touched", "seen", "seen_times", "seen_touched")
Named = tuple[list[str | int], list[np.ndarray]]
"""A `Piece` as names and arrays: numbers are those of variables."""


class Tables:
    """The tables by each of their variables."""

    def __init__(self) -> None:
        self._tables: dict[int, DynamicTable] = {}
        self._columns: dict[int, Spec] = {}

    def __contains__(self, vid: int) -> bool:
        return vid in self._tables

    @property
    def nbytes(self) -> int:
        """About what the rows take."""
        return sum(len(self._tables[vid]) * s.row_bytes for vid, s in self._columns.items())

    def add(self, spec: Spec) -> None:
        """Makes a table, or a column of one."""
        if spec.dynamic is None or spec.vid in self._tables:
            return
        if spec.beside is None:
            table = DynamicTable(spec.name, Policy(**spec.dynamic["policy"]))
        else:
            table = self._tables[spec.beside]
        row = spec.shape[1:]
        table.add_column(
            spec.vid, row, spec.dtype, first_rows(spec.dynamic["start"], row, spec.dtype)
        )
        self._tables[spec.vid], self._columns[spec.vid] = table, spec

    def remove(self, vids: Iterable[int]) -> None:
        """Forgets variables; a table goes with the last of them."""
        for vid in vids:
            self._tables.pop(vid, None)
            self._columns.pop(vid, None)

    def pull(self, vid: int, ids: np.ndarray) -> np.ndarray:
        """Values of ids (ascending, distinct int64), `[ids, *shape]`."""
        table = self._tables[vid]
        return table.gather(vid, ids, table.rows_of(ids, now=0.0, create=False))

    def bounds(self, vid: int) -> Block:
        """What checks of row numbers look at: no rows, but any number is one of it."""
        spec = self._columns[vid]
        block = Block(np.empty((0, *spec.shape[1:]), dtype_of(spec.dtype)))
        block.start, block.stop = -(1 << 63), 1 << 63
        return block

    def admit(self, vid: int, ids: np.ndarray | None, now: int) -> None:
        """Makes rows for those of the ids that shall have one.

        Raises:
            TableFullError: there is no room for them; nothing has changed then.
            ValueError: no ids are given.
        """
        table = self._tables[vid]
        if ids is None:
            raise ValueError(
                f"dynamic table {table.name!r}: expected ids of rows to update. Got an update of "
                "all rows. Push what the looked up rows need."
            )
        table.rows_of(ids, now=float(now))

    def update(
        self, program: RowProgram, vids: Sequence[int], ids: np.ndarray,
        handed: Sequence[np.ndarray], now: int,
    ) -> None:  # fmt: skip
        """Applies a push to the ids that have a row."""
        self._tables[vids[0]].update(program, vids, ids, handed, now=float(now))

    def tick(self, now: int) -> None:
        """Removes rows that nobody has used for their time."""
        for table in self._each():
            after = table.policy.expire_after
            if after is not None and now % max(1, int(after) // _LOOKS) == 0:
                table.expire(float(now))

    def _each(self) -> list[DynamicTable]:
        return list({id(t): t for t in self._tables.values()}.values())

    def status(self) -> list[list[object]]:
        """Name, rows, and counts of each table."""
        return [
            [t.name, len(t), t.counts.created, t.counts.expired, t.counts.evicted, t.counts.dropped]
            for t in self._each()
        ]

    def rows(self, vid: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the buckets from `low` to `high` (not included), and a variable's values."""
        wanted = np.zeros(BUCKETS, bool)
        wanted[low:high] = True
        pieces = list(self._tables[vid].pieces(wanted))
        spec = self._columns[vid]
        ids = [p.ids for p in pieces] or [np.empty(0, np.int64)]
        values = [p.columns[vid] for p in pieces]
        values = values or [np.empty((0, *spec.shape[1:]), dtype_of(spec.dtype))]
        return np.concatenate(ids), np.concatenate(values)

    def put(self, vid: int, ids: np.ndarray, values: np.ndarray, now: int) -> None:
        """Sets rows of a variable, which are made where they are not there."""
        table = self._tables[vid]
        n = np.zeros(len(ids), np.float64)
        none = np.empty(0, np.int64)
        table.restore(Piece(ids, n + now, {vid: values}, none, none, np.empty(0, np.float64)))

    # Snapshots and replicas.

    def content(self, rows: int = 1 << 16) -> Iterator[tuple[int, Named]]:
        """All of it, a piece at a time, with a variable of the table. Nothing may change then."""
        for vid, table in self._mains():
            for piece in table.pieces(rows=rows):
                yield vid, _named(piece)

    def cut(self, piece_bytes: int) -> TablesCut:
        """All of it as it is now, to be copied later, so many bytes of rows at a time."""
        return TablesCut(self._mains(), piece_bytes)

    def _mains(self) -> list[tuple[int, DynamicTable]]:
        """Each table, with its weight."""
        return [(vid, self._tables[vid]) for vid, s in self._columns.items() if s.beside is None]

    def fill(
        self, vid: int, names: Sequence[str | int], arrays: Sequence[np.ndarray],
        server: int | None = None,
    ) -> None:  # fmt: skip
        """Takes in a piece of `content`, also of another number of servers.

        Args:
            vid: of the table.
            names: of the piece.
            arrays: likewise.
            server: which this is; ids of others are left out. None: all ids are its own.
        """
        found = dict(zip(names, arrays, strict=True))
        fixed = [found.pop(name) for name in _FIXED]
        ids, touched, seen, times, seen_touched = fixed
        columns: dict[Hashable, np.ndarray] = {
            name: values for name, values in found.items() if name in self._tables
        }
        mine = None
        if server is not None:
            mine = deal(len(self._columns[vid].shards)) == server
        self._tables[vid].restore(Piece(ids, touched, columns, seen, times, seen_touched), mine)


class TablesCut:
    """Tables at one moment; see `TableCut`."""

    def __init__(self, tables: Sequence[tuple[int, DynamicTable]], piece_bytes: int):
        self._cuts = [(vid, TableCut(table, piece_bytes)) for vid, table in tables]

    def content(self) -> Iterator[tuple[int, Named]]:
        """As `Tables.content`; anything may change in between."""
        for vid, cut in self._cuts:
            for piece in cut.pieces():
                yield vid, _named(piece)

    def close(self) -> None:
        """The tables need not tell any more what changes."""
        for _, cut in self._cuts:
            cut.close()


def _named(piece: Piece) -> Named:
    names: list[str | int] = [*_FIXED, *piece.columns]  # type: ignore[list-item]
    return names, [*(getattr(piece, name) for name in _FIXED), *piece.columns.values()]


def in_order(ids: np.ndarray, servers: int) -> np.ndarray:
    """Distinct ids by the server that has them, then ascending."""
    return ids[np.lexsort((ids, server_of(ids, servers)))]
