"""What a worker does with the parts of a step: row numbers, rows, results, and what to push."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server.bags import Bagged, Bags, fewer
from stratagem.parameter_server.cut import aligned
from stratagem.parameter_server.rows import SCALAR
from stratagem.parameter_server.tables import in_order
from stratagem.step.distinct import Distinct
from stratagem.step.ids import whole as whole_ids
from stratagem.step.parts import Parts, Sum, Table
from stratagem.step.ship import unship

# A part of the rows, by which later batches may need more before another shape is compiled.
_ROOM = 8
# In the place of a number that servers get at the end of the round.
_UNKNOWN = np.full((), np.nan, np.float32)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The rows of one table that a closure needs.

    Attributes:
        ids: int64 `[n]`, sorted, distinct.
        positions: for each lookup, where in `ids` its row numbers are, int32.
        padded: how many rows are pulled, at least n; those beyond are zero.
        bags: of these rows, of which the sums alone are pulled; None: rows are.
        servers: on how many servers they are at most; 0 where nobody said, or none adds rows up.
    """

    ids: np.ndarray
    positions: tuple[np.ndarray, ...]
    padded: int
    bags: Bags | None = None
    servers: int = 0

    def fewer(self, bags: int) -> bool:
        """Whether sums of so many bags are less than these rows."""
        return fewer(bags, len(self.ids), self.servers)


class Runner:
    """Runs closures of one step. Use it in one thread at a time.

    Args:
        parts: of the step, as from the wire.
    """

    def __init__(self, parts: Parts):
        self.parts = parts
        self._ids = unship(parts.ids) if parts.tables else None
        self._compute = unship(parts.compute)
        self._distinct = [Distinct(t.rows) for t in parts.tables]
        self._padded = [0] * len(parts.tables)
        self._constant: list[np.ndarray] | None = None  # what a program without inputs gives

    def prepare(
        self, arguments: Sequence[Any], given: Sequence[Any], servers: Sequence[int] = ()
    ) -> list[Wanted]:
        """The rows of each table that a closure needs.

        Args:
            arguments: of the step.
            given: values of `parts.given`.
            servers: on how many servers each table is; nothing: rows are to be pulled, and pushed.

        Raises:
            ValueError: a row number is not in its table.
        """
        if self._ids is None:
            return []
        numbers = [np.asarray(v) for v in self._ids(*arguments, *given)]
        wanted = [self._wanted(i, t, numbers) for i, t in enumerate(self.parts.tables)]
        if servers:
            every = zip(self.parts.tables, wanted, servers, strict=True)
            # Rows of a table without a preset size come into being; servers add none up.
            wanted = [w if t.servers else _in_bags(t, w, n) for t, w, n in every]
        return wanted

    def _wanted(self, index: int, table: Table, numbers: Sequence[np.ndarray]) -> Wanted:
        if table.servers:
            return self._wanted_ids(index, table, [whole_ids(numbers[k]) for k in table.lookups])
        own = [
            _valid(numbers[k], table, clip, from_end)
            for k, clip, from_end in zip(table.lookups, table.clip, table.from_end, strict=True)
        ]
        flat = np.concatenate([n.reshape(-1) for n in own])
        ids, where = self._distinct[index].of(flat)
        room = len(ids) + len(ids) // _ROOM
        return self._found(index, ids, where, own, min(bucket(room), flat.size, table.rows))

    def _wanted_ids(self, index: int, table: Table, own: Sequence[np.ndarray]) -> Wanted:
        """Likewise of a table without a preset size: ids in the order of their servers."""
        flat = np.concatenate([n.reshape(-1) for n in own])
        sorted_ids, where = np.unique(flat, return_inverse=True)
        ids = in_order(sorted_ids, table.servers)
        place = np.empty(len(ids), np.int32)
        place[np.searchsorted(sorted_ids, ids)] = np.arange(len(ids), dtype=np.int32)
        found = place[where.reshape(-1)]
        return self._found(index, ids, found, own, min(bucket(len(ids)), flat.size))

    def _found(
        self, index: int, ids: np.ndarray, where: np.ndarray, own: Sequence[np.ndarray], rows: int
    ) -> Wanted:
        """The rows of a table, with where each lookup's are among them."""
        parts = np.split(where, np.cumsum([n.size for n in own])[:-1])
        positions = tuple(w.reshape(n.shape) for w, n in zip(parts, own, strict=True))
        if self.parts.tables[index].by_lookup:
            return Wanted(ids, positions, len(ids))
        # Few shapes are compiled, none of them without rows: what was once needed is kept.
        self._padded[index] = max(self._padded[index], rows, 1)
        return Wanted(ids, positions, self._padded[index])

    def compute(
        self, whole: Sequence[Any], rows: Sequence[np.ndarray], wanted: Sequence[Wanted],
        arguments: Sequence[Any], given: Sequence[Any], local: Sequence[Any] = (),
    ) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:  # fmt: skip
        """Runs the worker's part; compiles it where shapes are new.

        Args:
            whole: values of `parts.whole`.
            rows: for each table the rows `[padded, ...]` that `wanted` asks for, or sums of bags.
            wanted: of `prepare`.
            arguments: of the step.
            given: values of `parts.given`.
            local: values that the caller passes.

        Returns:
            Results, new local values, and what is handed to the updates. Read-only.
        """
        tables = list(zip(self.parts.tables, rows, wanted, strict=True))
        kept = [r for t, r, _ in tables if not t.by_lookup]
        looked_up = [
            x for t, r, w in tables for x in (_looked_up(t, r, w) if t.by_lookup else w.positions)
        ]
        inputs = (*whole, *kept, *looked_up, *arguments, *given, *local)
        values = self._constant
        if values is None or inputs:
            values = [np.asarray(v) for v in self._compute(*inputs)]
            self._constant = None if inputs else values
        first, second = self.parts.results, self.parts.results + self.parts.local
        return values[:first], values[first:second], values[second:]

    def items(self, handed: Sequence[np.ndarray], wanted: Sequence[Wanted]) -> list[dict[str, Any]]:
        """What to push: for each unit `uid`, `rows` (ids, or None for all), and `handed` pairs."""
        sums = [self._sum(s, handed, wanted[s.table]) for s in self.parts.sums]
        return [
            {
                "uid": push.uid,
                "rows": None if push.table is None else wanted[push.table].ids,
                "handed": [_handed(handed, *h, push.table, sums, wanted) for h in push.handed],
            }
            for push in self.parts.pushes
        ]

    def _sum(self, about: Sum, handed: Sequence[np.ndarray], wanted: Wanted) -> Any:
        """The gradient of each row; or those of bags, if they are fewer."""
        row = self.parts.tables[about.table].shape
        terms = [(handed[g], wanted.positions[k]) for g, k in about.terms]
        own = [(g.reshape(math.prod(g.shape[: g.ndim - len(row)]), *row), p) for g, p in terms]
        if wanted.fewer(sum(len(g) for g, _ in own)):
            bags = Bags.of([(p, len(g)) for g, p in own])
            return Bagged(bags, own[0][0] if len(own) == 1 else np.concatenate([g for g, _ in own]))
        total = np.zeros((len(wanted.ids), *row), own[0][0].dtype)
        for g, p in own:
            Bagged(Bags.of([(p, len(g))]), g).add_to(total)
        return total


def _handed(
    handed: Sequence[np.ndarray], kind: str, number: int, table: int | None,
    sums: Sequence[Any], wanted: Sequence[Wanted],
) -> tuple[str, Any]:  # fmt: skip
    if kind == "sum":
        return "bags" if isinstance(sums[number], Bagged) else "rows", sums[number]
    if kind == "number":
        return SCALAR, _UNKNOWN
    value = handed[number]
    if table is None or kind == "scalar":
        return kind, value
    return kind, value[: len(wanted[table].ids)]


def _in_bags(table: Table, wanted: Wanted, servers: int) -> Wanted:
    """Sums of bags instead of rows, where the step needs those alone and they are fewer."""
    wanted = dataclasses.replace(wanted, servers=servers)
    if not table.bags or not wanted.fewer(sum(table.bags_of(wanted.positions))):
        return wanted
    return dataclasses.replace(wanted, bags=_bags(table, wanted))


def _bags(table: Table, wanted: Wanted) -> Bags:
    return Bags.of(list(zip(wanted.positions, table.bags_of(wanted.positions), strict=True)))


def _looked_up(table: Table, rows: np.ndarray, wanted: Wanted) -> list[np.ndarray]:
    """What each lookup gets."""
    if not table.bags:
        return [taken(rows, where) for where in wanted.positions]
    if wanted.bags is None:
        bags = _bags(table, wanted)
        rows = bags.sums(rows, aligned((len(bags), *table.shape), rows.dtype))
    every = np.split(rows, np.cumsum(table.bags_of(wanted.positions))[:-1])
    shapes = [w.shape[: w.ndim - n] for w, n in zip(wanted.positions, table.bags, strict=True)]
    return [x.reshape(*s, *table.shape) for x, s in zip(every, shapes, strict=True)]


def taken(rows: np.ndarray, where: np.ndarray) -> np.ndarray:
    """`rows[where]`, where XLA reads it without a copy.

    Args:
        rows: `[n, *row]`.
        where: places of rows, in bounds, of any shape.
    """
    out = aligned((*where.shape, *rows.shape[1:]), rows.dtype)
    if out.size:
        # "clip" does not clip anything; but "raise" would go through a buffer.
        np.take(rows, where, axis=0, out=out, mode="clip")
    return out


def bucket(count: int) -> int:
    """The next number of rows that is compiled: powers of two, and 1.5 times those."""
    size = 8
    while size < count:
        if size + size // 2 >= count:
            return size + size // 2
        size *= 2
    return size


def _valid(ids: np.ndarray, table: Table, clip: bool, from_end: bool) -> np.ndarray:
    if not ids.size:
        return ids
    low, high = int(ids.min()), int(ids.max())
    if 0 <= low and high < table.rows:
        return ids
    if clip:
        return np.clip(ids, 0, table.rows - 1)
    wrong = high if high >= table.rows else low - table.rows * from_end
    raise ValueError(
        f"Expected row numbers from 0 to {table.rows - 1} for {table.name!r}, which has "
        f"{table.rows} rows. Got {wrong} (among {ids.size} looked up). Map unknown ids to a row "
        "of their own (StringLookup and IntegerLookup do), or give the table more rows "
        "(Embedding(input_dim=...))."
    )
