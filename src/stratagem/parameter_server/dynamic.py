"""A table without a preset size: a row for each id that occurs, made when it first occurs.

What one parameter server keeps of such a table. Ids are any int64, for instance hashes. Which
server an id is on: `buckets.py`. Values of a new row depend on the id and the seed alone, so that
neither the order of ids nor the number of servers changes them.

The design is Monolith's (Liu et al., arXiv 2209.07663, section 2.2): no two ids share a row, rare
ids get none, and ids that do not occur any more lose theirs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.errors import TableFullError
from stratagem.parameter_server.admission import Candidates
from stratagem.parameter_server.block import update
from stratagem.parameter_server.buckets import BUCKETS, bucket_of
from stratagem.parameter_server.column import Column
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.index import IdIndex, grown
from stratagem.parameter_server.policy import Policy
from stratagem.parameter_server.rows import ROWS, RowProgram

_EVICT_SHARE = 32  # a full table evicts this part of its rows at once: finding them reads them all

# Initial values of rows: ids `[n]` to `[n, *shape]`.
First = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass
class Counts:
    """What happened to rows since the table was made. `dropped` are pushed rows of no effect."""

    created: int = 0
    expired: int = 0
    evicted: int = 0
    dropped: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some ids and all that a table knows of them: what snapshots and moves consist of.

    Args:
        ids: `[n]`, those that have a row.
        touched: `[n]`, when each was last used.
        columns: by variable, `[n, *shape]`.
        seen: `[m]`, ids that have no row yet.
        seen_times: `[m]`, how often each occurred.
        seen_touched: `[m]`, when each occurred last.
    """

    ids: np.ndarray
    touched: np.ndarray
    columns: Mapping[Hashable, np.ndarray]
    seen: np.ndarray
    seen_times: np.ndarray
    seen_touched: np.ndarray


class DynamicTable:
    """One server's rows of a table: a weight and, beside it, optimizer slots.

    Times are those of one clock that only the caller knows: seconds, or steps. It should go on
    where it was when a job is started again; `Piece` carries times of it.

    Attributes:
        columns: values of rows, by variable.
        before_write: called with numbers of rows before what they hold changes.
    """

    def __init__(self, name: str, policy: Policy | None = None) -> None:
        self.name, self.policy, self.counts = name, policy or Policy(), Counts()
        self._index = IdIndex()
        self._touched = np.empty(0, np.float64)  # by row
        self.columns: dict[Hashable, Column] = {}
        self.before_write: Callable[[np.ndarray], None] | None = None
        self._first: dict[Hashable, First] = {}
        self._seen = Candidates()

    def __len__(self) -> int:
        return len(self._index)

    def numbers(self) -> np.ndarray:
        """The rows in use, ascending."""
        return self._index.numbers()

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Whose rows they are, of rows in use."""
        return self._index.ids(rows)

    def touched(self, rows: np.ndarray) -> np.ndarray:
        """When rows were last used."""
        return self._touched[rows]

    def seen(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids without a row yet, how often each occurred, and when last; copies."""
        return self._seen.content()

    def add_column(self, vid: Hashable, shape: Sequence[int], dtype: Any, first: First) -> None:
        """Gives every row, also those that are there, a value of one more variable.

        Args:
            vid: the variable, for instance an optimizer's slot.
            shape: of one row.
            dtype: of the values.
            first: ids `[n]` to the initial values of their rows, `[n, *shape]` of the dtype.
        """
        if vid in self.columns:
            raise ValueError(
                f"Expected a variable that dynamic table {self.name!r} does not have. Got "
                f"{vid!r} again. Add each variable once."
            )
        self.columns[vid] = Column(tuple(shape), dtype_of(dtype))
        self._first[vid] = first
        rows = self._index.numbers()
        self.columns[vid].reserve(max(1, self._index.end))
        self.columns[vid].put(rows, first(self._index.ids(rows)))

    def rows_of(
        self, ids: np.ndarray, *, now: float, create: bool = True, times: Any = 1
    ) -> np.ndarray:
        """The row of each id; -1 where it has none.

        Args:
            ids: `[n]`, int64, ascending and distinct.
            now: the time, by the table's clock.
            create: True for training: the ids occur, so that new ones get a row once they occurred
                often enough, and rows count as used. False changes nothing.
            times: `[n]` or one number for all: how often each id occurs.

        Raises:
            ValueError: ids are not ascending and distinct int64.
            TableFullError: there is no room for the new ids, and the policy does not evict, or all
                rows are in use by this call. Nothing has changed then.
        """
        _check_ids(ids)
        rows = self._index.find(ids)
        if not create:
            return rows
        found = rows >= 0
        new, times = ids[~found], np.broadcast_to(times, ids.shape)[~found]
        if self.policy.admit_after > 1:
            times = times + self._seen.times(new)
            admitted = times >= self.policy.admit_after
            old = self._room_for(int(admitted.sum()), rows[found])
            self._seen.note(new[~admitted], times[~admitted], now)
            self._seen.forget(new[admitted])
            new = new[admitted]
        else:
            old = self._room_for(len(new), rows[found])
        self._index.remove(old)
        self.counts.evicted += len(old)
        self._touch(rows[found], now)
        created = self._create(new, now)
        self.counts.created += len(new)
        if len(new):
            rows[np.searchsorted(ids, new)] = created
        return rows

    def gather(self, vid: Hashable, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Values `[n, *shape]` of ids; of those without a row (-1) the values it would start with.

        Args:
            vid: the variable.
            ids: `[n]`.
            rows: `[n]`, what `rows_of` said of them, without a change in between.
        """
        absent = rows < 0
        if not absent.any():
            return self.columns[vid].take(rows)
        values = self.columns[vid].take(np.where(absent, 0, rows))
        values[absent] = self._first[vid](ids[absent])
        return values

    def update(
        self,
        program: RowProgram,
        vids: Sequence[Hashable],
        ids: np.ndarray,
        handed: Sequence[np.ndarray],
        *,
        now: float,
    ) -> int:
        """Applies a push to the rows of ids; ids without one are dropped and counted.

        An id has no row when it was not admitted yet, or lost its row since it was pulled.

        Args:
            program: the update.
            vids: its members.
            ids: `[n]`, int64, ascending and distinct.
            handed: what it is handed; values of the kind "rows" are `[n, *shape]`.
            now: the time, by the table's clock.

        Returns:
            How many of the ids were updated.

        Raises:
            ValueError: ids are not ascending and distinct int64, or the program takes others.
        """
        _check_ids(ids)
        wanted = (len(ids), *self.columns[vids[0]].row_shape)
        kinds = program.handed
        found = [v.shape for kind, v in zip(kinds, handed, strict=True) if kind == ROWS]
        if any(shape != wanted for shape in found):
            raise ValueError(
                f"Expected values of shape {wanted} for {len(ids)} ids of dynamic table "
                f"{self.name!r}. Got {found}. Push one row of values for each id."
            )
        rows = self._index.find(ids)
        there = rows >= 0
        applied = int(there.sum())
        if applied < len(ids):
            rows = rows[there]
            handed = [
                value[there] if kind == ROWS else value
                for kind, value in zip(kinds, handed, strict=True)
            ]
        if applied:
            self._announce(rows)
            update(program, [self.columns[vid].block for vid in vids], rows, handed)
            self._touch(rows, now)
        self.counts.dropped += len(ids) - applied
        return applied

    def expire(self, now: float) -> int:
        """Removes what was not touched for the policy's time; returns how many rows that were."""
        if self.policy.expire_after is None:
            return 0
        until = now - self.policy.expire_after
        rows = self._index.numbers()
        rows = rows[self._touched[rows] <= until]
        self._index.remove(rows)
        self._seen.forget_untouched(until)
        self.counts.expired += len(rows)
        return len(rows)

    def pieces(self, buckets: np.ndarray | None = None, rows: int = 1 << 16) -> Iterator[Piece]:
        """All that the table holds, by bucket and then by id, copied a piece at a time.

        Args:
            buckets: `[1024]`, True for those that are wanted. None: all.
            rows: how many ids a piece has at most. The table must not change between pieces.
        """
        numbers = self._index.numbers()
        numbers = numbers[_order(self._index.ids(numbers), buckets)]
        seen = self.seen()
        order = _order(seen[0], buckets)
        for start in range(0, max(len(numbers), len(order)), rows):
            part, also = numbers[start : start + rows], order[start : start + rows]
            yield Piece(
                self._index.ids(part),
                self._touched[part],
                {vid: column.take(part) for vid, column in self.columns.items()},
                *(array[also] for array in seen),
            )

    def restore(self, piece: Piece, buckets: np.ndarray | None = None) -> None:
        """Takes a piece in, over what the table has of its ids; variables it lacks start anew.

        Args:
            piece: also one of a table on another number of servers.
            buckets: `[1024]`, True for those that this server has; other ids are left out. None:
                all. More than `max_rows` ids are taken in, and count when the next one comes.

        Raises:
            ValueError: the piece has variables that the table has not, or not like this.
        """
        self._check_columns(piece)
        mine = _order(piece.ids, buckets)
        ids, rows = piece.ids[mine], self._index.find(piece.ids[mine])
        absent = rows < 0
        rows[absent] = self._create(ids[absent], 0.0, but=piece.columns)
        self._touched[rows] = piece.touched[mine]
        self._announce(rows)
        for vid, values in piece.columns.items():
            self.columns[vid].put(rows, values[mine])
        self._seen.forget(ids)
        also = _order(piece.seen, buckets)
        also = also[self._index.find(piece.seen[also]) < 0]
        self._seen.note(piece.seen[also], piece.seen_times[also], piece.seen_touched[also])

    def _check_columns(self, piece: Piece) -> None:
        for vid, values in piece.columns.items():
            column = self.columns.get(vid)
            kind = None if column is None else (column.row_shape, column.dtype)
            if kind != (values.shape[1:], values.dtype):
                have = "none" if kind is None else f"{kind[1]} of shape {kind[0]} a row"
                raise ValueError(
                    f"Expected variables of dynamic table {self.name!r}. Got variable {vid!r} of "
                    f"{values.dtype} of shape {values.shape[1:]} a row, where the table has "
                    f"{have}. Restore what a table of this kind wrote."
                )

    def _room_for(self, count: int, used: np.ndarray) -> np.ndarray:
        """Rows to remove before so many new ones fit; none of those in use."""
        limit = self.policy.max_rows
        none = np.empty(0, np.int64)
        if not count or limit is None or (over := len(self) + count - limit) <= 0:
            return none
        idle = self._index.numbers()
        busy = np.zeros(self._index.end, bool)
        busy[used] = True
        idle = idle[~busy[idle]]
        if self.policy.when_full == "error" or over > len(idle):
            raise TableFullError(
                f"Expected at most {limit} rows of dynamic table {self.name!r} on one parameter "
                f"server. Got {count} new ids while it has {len(self)} rows, {len(used)} of them "
                "in use by the same lookup. Allow more with max_rows, use more parameter servers, "
                "or choose when_full='evict' or expire_after."
            )
        count = min(max(over, limit // _EVICT_SHARE), len(idle))
        touched = self._touched[idle]
        edge = np.partition(touched, count - 1)[count - 1]
        sure, ties = idle[touched < edge], idle[touched == edge]
        ties = ties[np.argsort(self._index.ids(ties))]  # which are the same on any run
        return np.concatenate((sure, ties[: count - len(sure)]))

    def _create(self, ids: np.ndarray, now: float, but: Collection[Hashable] = ()) -> np.ndarray:
        """Rows for ids that have none, with initial values of all variables but some."""
        rows = self._index.add(ids)
        self._touched = grown(self._touched, self._index.end)
        self._touched[rows] = now
        self._announce(rows)  # some were those of ids that went
        for vid, column in self.columns.items():
            column.reserve(self._index.end)
            if vid not in but:
                column.put(rows, self._first[vid](ids))
        return rows

    def _announce(self, rows: np.ndarray) -> None:
        if self.before_write is not None:
            self.before_write(rows)

    def _touch(self, rows: np.ndarray, now: float) -> None:
        # News of several workers need not arrive in the order of their clocks.
        self._touched[rows] = np.maximum(self._touched[rows], now)


def _order(ids: np.ndarray, buckets: np.ndarray | None) -> np.ndarray:
    """Places of the ids that are in the wanted buckets, sorted by bucket and then by id."""
    bucket = bucket_of(ids)
    if buckets is None:
        return np.lexsort((ids, bucket))
    if buckets.shape != (BUCKETS,) or buckets.dtype != bool:
        raise ValueError(
            f"Expected buckets as bool of shape ({BUCKETS},). Got {buckets.dtype} of shape "
            f"{buckets.shape}. Mark each bucket that is meant with True."
        )
    mine = np.flatnonzero(buckets[bucket])
    return mine[np.lexsort((ids[mine], bucket[mine]))]


def _check_ids(ids: np.ndarray) -> None:
    if ids.dtype != np.int64 or ids.ndim != 1 or not np.all(ids[1:] > ids[:-1]):
        raise ValueError(
            f"Expected ids of dtype int64, shape [n], ascending and distinct. Got {ids.dtype} of "
            f"shape {ids.shape}{'' if ids.ndim != 1 else ', not ascending or not distinct'}. Pass "
            "numpy.unique(ids)."
        )
