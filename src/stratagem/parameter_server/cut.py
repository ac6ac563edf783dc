"""Requests to several servers, cut from what is asked of them together, and answers joined. Pure.

Row numbers are sorted, so that those of one shard are a slice: nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server.bags import Bags
from stratagem.parameter_server.buckets import server_of
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.plan import Spec

_ALIGNMENT = 64  # bytes, of XLA's CPU buffers

Part = tuple[int, int, int]
"""Index of a shard, and from where to where its row numbers are in the sorted ones."""


def by_shard(spec: Spec, rows: np.ndarray) -> list[Part]:
    """Where the shards of a variable are in sorted row numbers; those with none are left out.

    Raises:
        ValueError: they are no such numbers.
    """
    if spec.dynamic is not None and rows.dtype == np.int64:
        return _by_bucket(spec, rows)
    if rows.dtype != np.int64 or rows.ndim != 1 or not spec.shape:
        raise ValueError(
            f"variable {spec.name!r}: expected row numbers int64[n] of a variable that has rows. "
            f"Got {rows.dtype}{list(rows.shape)} for {list(spec.shape)}."
        )
    if len(rows) and not 0 <= rows[0] <= rows[-1] < spec.rows:
        raise ValueError(
            f"variable {spec.name!r}: expected row numbers from 0 to {spec.rows - 1}. Got "
            f"{rows[0]} to {rows[-1]}."
        )
    if not spec.sharded:
        return [(0, 0, len(rows))] if len(rows) else []
    ends = np.searchsorted(rows, [shard.stop for shard in spec.shards]).tolist()
    starts = [0, *ends[:-1]]
    return [(i, a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]


def _by_bucket(spec: Spec, ids: np.ndarray) -> list[Part]:
    """Likewise for ids of a dynamic table, in the order of `tables.in_order`."""
    count = len(spec.shards)
    owners = server_of(ids, count)
    if len(ids) > 1 and not bool((owners[1:] >= owners[:-1]).all()):
        raise ValueError(
            f"dynamic table {spec.name!r}: expected ids by the server that has them. Got others. "
            "Use tables.in_order."
        )
    ends = np.searchsorted(owners, np.arange(count), side="right").tolist()
    starts = [0, *ends[:-1]]
    return [(i, a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]


class Pull:
    """One pull from all servers.

    Args:
        servers: how many there are.
        whole: variables to be had whole.
        rows: variables and sorted row numbers.
        rooms: how long the arrays of rows are to be, with zeros at the end; None: as many as are
            asked for.
        bags: of the rows of each, of which the sums are asked for; None: the rows.
    """

    def __init__(
        self, servers: int, whole: Sequence[Spec], rows: Sequence[tuple[Spec, np.ndarray]],
        rooms: Sequence[int] | None = None, bags: Sequence[Bags | None] = (),
    ):  # fmt: skip
        self._whole, self._rows = whole, rows
        self._bags = bags or [None] * len(rows)
        self._rooms = [len(ids) for _, ids in rows] if rooms is None else rooms
        self._parts = [by_shard(spec, ids) for spec, ids in rows]
        # For each server the shards that it is asked for: whole ones, then parts of rows.
        self._asked_whole: list[list[tuple[int, int]]] = [[] for _ in range(servers)]
        self._asked_rows: list[list[tuple[int, Part]]] = [[] for _ in range(servers)]
        for at, spec in enumerate(whole):
            for index, shard in enumerate(spec.shards):
                self._asked_whole[shard.server].append((at, index))
        for at, parts in enumerate(self._parts):
            for part in parts:
                server = rows[at][0].shards[part[0]].server
                self._asked_rows[server].append((at, part))

    def servers(self) -> list[int]:
        """Those that are asked."""
        every = zip(self._asked_whole, self._asked_rows, strict=True)
        return [i for i, (whole, rows) in enumerate(every) if whole or rows]

    def request(self, server: int) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Fields and arrays for one."""
        whole = [[self._whole[at].vid, index] for at, index in self._asked_whole[server]]
        rows: list[Any] = []
        arrays: list[np.ndarray] = []
        for at, (index, a, b) in self._asked_rows[server]:
            (spec, ids), bags = self._rows[at], self._bags[at]
            alone = len(self._parts[at]) == 1 and spec.dynamic is None and bags is None
            room = self._rooms[at] if alone else b - a
            rows.append([spec.vid, index, len(arrays), room, bags is not None])
            arrays.append(ids[a:b])
            if bags is not None:
                own = bags.within(a, b, len(ids))
                arrays += [own.places, own.bounds]
        return {"whole": whole, "rows": rows}, arrays

    def join(
        self, answers: Mapping[int, Sequence[np.ndarray]]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Whole values, and rows or sums of bags, of the arrays that each server sent."""
        whole: list[list[Any]] = [[None] * len(spec.shards) for spec in self._whole]
        rows: list[list[Any]] = [[] for _ in self._rows]
        for server, arrays in answers.items():
            asked = self._asked_whole[server]
            for (at, index), array in zip(asked, arrays[: len(asked)], strict=True):
                whole[at][index] = array
            pieces = zip(self._asked_rows[server], arrays[len(asked) :], strict=True)
            for (at, (index, _, _)), array in pieces:
                rows[at].append((index, array))
        ordered = [[array for _, array in sorted(r, key=lambda x: x[0])] for r in rows]
        every = zip(self._rows, ordered, self._rooms, self._bags, strict=True)
        return (
            [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in whole],
            [
                _in_room(spec, parts, room) if bags is None else _total(spec, parts, len(bags))
                for (spec, _), parts, room, bags in every
            ],
        )


def _total(spec: Spec, parts: list[np.ndarray], bags: int) -> np.ndarray:
    """Sums of bags, of those over the rows of each server."""
    if len(parts) == 1:
        return parts[0]
    total = aligned((bags, *spec.shape[1:]), dtype_of(spec.dtype))
    total[...] = parts[0] if parts else 0
    for part in parts[1:]:
        total += part
    return total


def _in_room(spec: Spec, parts: Sequence[np.ndarray], room: int) -> np.ndarray:
    if len(parts) == 1 and len(parts[0]) == room:
        return parts[0]
    joined = aligned((room, *spec.shape[1:]), dtype_of(spec.dtype))
    at = 0
    for part in parts:
        joined[at : at + len(part)] = part
        at += len(part)
    joined[at:] = 0
    return joined


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array with any values that XLA reads where it is; it copies what lies elsewhere."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


class Push:
    """One push to all servers.

    Args:
        servers: how many there are.
    """

    def __init__(self, servers: int):
        self._items: list[list[Any]] = [[] for _ in range(servers)]
        self._arrays: list[list[np.ndarray]] = [[] for _ in range(servers)]

    def add(
        self, spec: Spec, uid: int | str, rows: np.ndarray | None,
        handed: Sequence[tuple[str, Any]],
    ) -> None:  # fmt: skip
        """Adds a change of a unit, whose variables are placed as one variable is."""
        if rows is None:
            parts = [(i, shard.start, shard.stop) for i, shard in enumerate(spec.shards)]
        else:
            parts = by_shard(spec, rows)
        total = spec.rows if rows is None else len(rows)
        for kind, value in handed:
            if kind == "rows" and spec.shape and len(value) != total:
                raise ValueError(
                    f"unit {uid}: expected values of {total} rows. Got {list(value.shape)}."
                )
        for index, start, stop in parts:
            server = spec.shards[index].server
            arrays = self._arrays[server]
            place = None
            if rows is not None:
                place = len(arrays)
                arrays.append(rows[start:stop])
            values = []
            for kind, value in handed:
                values.append([kind, len(arrays)])
                if kind == "bags":
                    own = value.bags.within(start, stop, total)
                    arrays += [value.gradients, own.places, own.bounds]
                    continue
                cut = kind == "rows" and bool(spec.shape)
                arrays.append(value[start:stop] if cut else value)
            self._items[server].append([uid, index, place, values])

    def request(self, server: int) -> tuple[list[Any], list[np.ndarray]]:
        """Items and arrays for one."""
        return self._items[server], self._arrays[server]


def pieces(spec: Spec, start: int, stop: int, step: int) -> Iterator[Part]:
    """A range of rows as ranges of at most `step` rows, each in one shard, with its index."""
    for index, shard in enumerate(spec.shards):
        low, high = max(start, shard.start), min(stop, shard.stop)
        for first in range(low, high, step):
            yield index, first, min(high, first + step)


def assignment(
    spec: Spec, value: np.ndarray, rows: np.ndarray | tuple[int, int] | None
) -> Iterator[tuple[int, Any, np.ndarray]]:
    """For each shard its index, which of its rows (None: all) and their values."""
    total = spec.rows if rows is None else len(rows)
    if isinstance(rows, tuple):
        total = rows[1] - rows[0]
    shape = (total, *spec.shape[1:]) if spec.shape else ()
    if value.shape != shape:
        raise ValueError(
            f"variable {spec.name!r}: expected values of shape {shape}. Got {value.shape}."
        )
    if isinstance(rows, np.ndarray):
        numbers = rows.astype(np.int64, copy=False)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < spec.rows:
            raise ValueError(
                f"variable {spec.name!r}: expected row numbers from 0 to {spec.rows - 1}. Got "
                f"{numbers.min()} to {numbers.max()}."
            )
        for index, shard in enumerate(spec.shards):
            here = (numbers >= shard.start) & (numbers < shard.stop)
            if here.all():
                yield index, numbers, value
            elif here.any():
                yield index, numbers[here], value[here]
        return
    start, stop = (0, spec.rows) if rows is None else rows
    if not 0 <= start <= stop <= spec.rows:
        raise ValueError(
            f"variable {spec.name!r}: expected a range of its {spec.rows} rows. Got {start} to "
            f"{stop}."
        )
    for index, first, last in pieces(spec, start, stop, max(1, spec.rows)):
        part = value[first - start : last - start] if spec.shape else value
        yield index, [first, last], part
