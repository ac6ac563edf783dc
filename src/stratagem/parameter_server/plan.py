"""Which parameter server holds which rows of which variable. Pure.

TensorFlow's placement (`parameter_server_strategy_v2.py`): variables and shards share one
counter, and the n-th of them goes to server n modulo the number of servers. The rows are cut in
consecutive ranges ("div"), of which the first (rows modulo shards) have a row more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stratagem.parameter_server.dtypes import dtype_of

Partition = Callable[..., Sequence[int]]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows `start` to `stop` (not included) on one server; a scalar counts as one row."""

    server: int
    start: int
    stop: int


@dataclass(frozen=True)
class Spec:
    """A variable and where it is.

    Attributes:
        vid: its number in the job.
        name: what errors call it.
        shape: of the whole variable.
        dtype: the name of it.
        shards: all of them, by their rows.
        beside: the variable whose shards these are, for a slot of an optimizer.
        dynamic: of a table whose rows are made for ids (dynamic.py): {"start", "policy"}, how a
            row starts and which ids have one; None in slots. Its shape and shards are nominal: one
            shard a server, which has the ids of its buckets (buckets.py). None: another variable.
    """

    vid: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]
    beside: int | None = None
    dynamic: dict[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        dtype_of(self.dtype)
        at = 0
        for shard in self.shards:
            if shard.start != at or shard.stop < at or shard.server < 0:
                break
            at = shard.stop
        if not self.shards or at != self.rows or min(self.shape, default=0) < 0:
            raise ValueError(
                f"variable {self.vid} {self.name!r}: expected shards that follow each other and "
                f"hold all rows of the shape {self.shape}. Got {self.shards}. Use Placement."
            )

    @property
    def rows(self) -> int:
        """How many there are; one for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return math.prod(self.shape[1:]) * dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Size of the whole variable."""
        return self.rows * self.row_bytes

    @property
    def sharded(self) -> bool:
        """Whether there is more than one shard."""
        return len(self.shards) > 1

    def shard_shape(self, index: int) -> tuple[int, ...]:
        """The shape of one shard."""
        shard = self.shards[index]
        return (shard.stop - shard.start, *self.shape[1:]) if self.shape else ()

    def held_by(self, server: int) -> list[int]:
        """Indices of the shards on a server."""
        return [i for i, shard in enumerate(self.shards) if shard.server == server]

    def blocks_on(self, server: int) -> list[int]:
        """Likewise of those whose rows have numbers: none of a dynamic table."""
        return [] if self.dynamic is not None else self.held_by(server)

    def wire(self) -> dict[str, Any]:
        """As plain data."""
        shards = [[s.server, s.start, s.stop] for s in self.shards]
        return {
            "vid": self.vid, "name": self.name, "shape": list(self.shape), "dtype": self.dtype,
            "shards": shards, "beside": self.beside, "dynamic": self.dynamic,
        }  # fmt: skip

    @classmethod
    def from_wire(cls, data: Any) -> Spec:
        """What `wire` was; raises ValueError for anything else."""
        good = (
            isinstance(data, dict)
            and set(data) == {"vid", "name", "shape", "dtype", "shards", "beside", "dynamic"}
            and is_count(data["vid"])
            and isinstance(data["name"], str)
            and isinstance(data["dtype"], str)
            and are_counts(data["shape"])
            and isinstance(data["shards"], (list, tuple))
            and all(are_counts(s) and len(s) == 3 for s in data["shards"])
            and (data["beside"] is None or is_count(data["beside"]))
            and (data["dynamic"] is None or isinstance(data["dynamic"], dict))
        )
        if not good:
            raise ValueError(
                f"Expected a variable's description. Got {data!r:.200}. Use Spec.wire."
            )
        shards = tuple(Shard(*s) for s in data["shards"])
        shape = tuple(data["shape"])
        known = data["vid"], data["name"], shape, data["dtype"], shards
        return cls(*known, data["beside"], data["dynamic"])


@dataclass(frozen=True)
class Unit:
    """Variables that are updated together, row by row: a weight and its slots.

    Attributes:
        uid: its number or name in the job.
        vids: the variables, all of one shape and with the same shards.
        program: the update as plain data, see `rows.py` and `whole.py`.
    """

    uid: int | str
    vids: tuple[int, ...]
    program: dict[str, Any] = field(repr=False)

    def wire(self) -> dict[str, Any]:
        """As plain data."""
        return {"uid": self.uid, "vids": list(self.vids), "program": self.program}

    @classmethod
    def from_wire(cls, data: Any) -> Unit:
        """What `wire` was; raises ValueError for anything else."""
        good = (
            isinstance(data, dict)
            and set(data) == {"uid", "vids", "program"}
            and is_uid(data["uid"])
            and are_counts(data["vids"])
            and data["vids"]
            and isinstance(data["program"], dict)
        )
        if not good:
            raise ValueError(f"Expected a unit's description. Got {data!r:.200}. Use Unit.wire.")
        return cls(data["uid"], tuple(data["vids"]), data["program"])


class Placement:
    """Hands out servers to variables, in the order in which they are created.

    Args:
        servers: how many there are.
        partitioner: into how many shards a variable is cut; None: none is.
    """

    def __init__(self, servers: int, partitioner: Partition | None = None):
        if servers < 1:
            raise ValueError(
                f"Expected at least one parameter server. Got {servers}. Add `ps` tasks to the "
                "cluster."
            )
        self._servers = servers
        self._partitioner = partitioner
        self._next = 0

    def place(
        self, vid: int, name: str, shape: Sequence[int], dtype: Any, beside: Spec | None = None,
        dynamic: dict[str, Any] | None = None,
    ) -> Spec:  # fmt: skip
        """Where a new variable goes.

        Args:
            vid: its number.
            name: what errors call it.
            shape: of the whole.
            dtype: of the elements.
            beside: it gets the shards of this one, which must have as many rows.
            dynamic: of a dynamic table, or a slot of one; see `spread`.

        Raises:
            ValueError: the partitioner cuts along another axis than the first.
        """
        if dynamic is not None:
            return self.spread(vid, name, shape, dtype, dynamic, beside)
        shape, dtype = tuple(int(n) for n in shape), dtype_of(dtype).name
        if beside is not None:
            return Spec(vid, name, shape, dtype, beside.shards, beside.vid)
        shards = []
        rows, parts = (shape[0] if shape else 1), self._parts(name, shape, dtype)
        base, extra = divmod(rows, parts)
        start = 0
        for i in range(parts):
            stop = start + base + (i < extra)
            shards.append(Shard(self._next % self._servers, start, stop))
            start = stop
            self._next += 1
        return Spec(vid, name, shape, dtype, tuple(shards))

    def spread(
        self, vid: int, name: str, shape: Sequence[int], dtype: Any, dynamic: dict[str, Any],
        beside: Spec | None = None,
    ) -> Spec:  # fmt: skip
        """A dynamic table, or a slot of one: each server has its part of the ids.

        Args:
            vid: its number.
            name: what errors call it.
            shape: nominal rows, and the shape of a row.
            dtype: of the elements.
            dynamic: see `Spec`.
            beside: the table whose slot it is.
        """
        bounds = [shape[0] * i // self._servers for i in range(self._servers + 1)]
        shards = tuple(Shard(i, *bounds[i : i + 2]) for i in range(self._servers))
        of = None if beside is None else beside.vid
        return Spec(vid, name, tuple(shape), dtype_of(dtype).name, shards, of, dynamic)

    def _parts(self, name: str, shape: tuple[int, ...], dtype: str) -> int:
        if self._partitioner is None or not shape:
            return 1
        parts = list(self._partitioner(shape=shape, dtype=dtype))
        if not parts or parts[0] < 1 or any(n != 1 for n in parts[1:]):
            raise ValueError(
                f"variable {name!r} of shape {shape}: expected a variable_partitioner that "
                f"returns a list whose first number is positive and whose others are 1. Got "
                f"{parts}. Variables are cut along their first axis only."
            )
        return max(1, min(int(parts[0]), shape[0]))


def is_count(value: Any) -> bool:
    """Whether something that came over the wire is a number that counts or numbers things."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def are_counts(values: Any) -> bool:
    """Whether it is a list of such."""
    return isinstance(values, (list, tuple)) and all(map(is_count, values))


def is_uid(value: Any) -> bool:
    """Whether it can name a unit."""
    return is_count(value) or (isinstance(value, str) and 0 < len(value) <= 200)
