"""What is known of a step whose variables are on parameter servers: counted, as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stratagem.planning.program import Program


@dataclass(frozen=True)
class Load:
    """What a step does with one shard of a variable and its slots. Sizes are bytes.

    Attributes:
        name: of the variable.
        server: which ps has it.
        sharded: the variable has other shards elsewhere.
        held: of the variable and its slots.
        pulled: values that a worker gets.
        asked: row numbers that a worker sends for them.
        pushed: row numbers and values that a worker sends back.
        summed: gradients of rows that the server adds up.
        rows: that are looked up, as often as the server reads them.
        touched: rows that are updated; 0 where all are.
        updated: state that the update changes.
    """

    name: str
    server: int
    sharded: bool
    held: float
    pulled: float = 0.0
    asked: float = 0.0
    pushed: float = 0.0
    rows: float = 0.0
    touched: float = 0.0
    updated: float = 0.0
    summed: float = 0.0


@dataclass(frozen=True)
class Table:
    """A variable that is pulled by row.

    Attributes:
        name: of it.
        rows: that it has; 0 for a dynamic table, which grows.
        row_bytes: of one.
        mentions: row numbers of a step, each time that one is named counted.
        distinct: rows of a step, each once.
        known: "batch": counted in the script's first batch; "argument": the user said it;
            "estimate": of a smaller batch, by proportion, which is more than there will be.
        bags: sums of rows that travel instead of rows, on the number of servers that the step was
            placed on; 0 where rows do.
    """

    name: str
    rows: int
    row_bytes: int
    mentions: int
    distinct: int
    known: str
    bags: int = 0


@dataclass(frozen=True)
class Served:
    """A step in parts, counted.

    Attributes:
        work: the worker's part; `state` and `trainable` are what it pulls and pushes.
        servers: how many ps the variables are placed on.
        loads: of each shard.
        tables: those that are pulled by row.
        whole: names of the variables that are pulled whole, with their bytes.
        sent: bytes that go along with a closure from the coordinator.
        returned: bytes of results that go back to it.
        partitioner: the script's; "" for none.
    """

    work: Program
    servers: int
    loads: tuple[Load, ...]
    tables: tuple[Table, ...]
    whole: tuple[tuple[str, int], ...]
    sent: int
    returned: int
    partitioner: str = ""

    @property
    def pulled(self) -> float:
        """Bytes that a step pulls from all servers."""
        return sum(load.pulled for load in self.loads)

    @property
    def pushed(self) -> float:
        """Bytes that a step pushes to all servers."""
        return sum(load.pushed for load in self.loads)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Served:
        """What `to_json` wrote."""
        raw: dict[str, Any] = json.loads(text)
        return cls(
            **{
                **raw,
                "work": Program.from_json(json.dumps(raw["work"])),
                "loads": tuple(Load(**each) for each in raw["loads"]),
                "tables": tuple(Table(**each) for each in raw["tables"]),
                "whole": tuple((name, nbytes) for name, nbytes in raw["whole"]),
            }
        )


def on_each(loads: Iterable[Load], servers: int) -> list[Load]:
    """What a step does with each server, summed; where nothing is, with zeros."""
    sums = [Load(f"ps {index}", index, False, 0.0) for index in range(servers)]
    for load in loads:
        sums[load.server] = _plus(sums[load.server], load)
    return sums


def on_others(loads: Sequence[Load], servers: int) -> list[Load]:
    """The same on another number of servers.

    Variables that are in one piece go round robin, as `Placement` has them. Others are divided into
    as many consecutive parts as there are servers; within a shard all rows are alike.
    """
    whole = [load for load in loads if not load.sharded]
    moved = [replace(load, server=index % servers) for index, load in enumerate(whole)]
    shards: dict[str, list[Load]] = {}
    for load in loads:
        if load.sharded:
            shards.setdefault(load.name, []).append(load)
    for parts in shards.values():
        moved += _divided(parts, servers)
    return on_each(moved, servers)


def _divided(shards: Sequence[Load], servers: int) -> list[Load]:
    """Equal shards, by their rows, as other equal shards."""
    found = []
    for index in range(servers):
        start, stop = index / servers, (index + 1) / servers
        for at, shard in enumerate(shards):
            shared = min(stop, (at + 1) / len(shards)) - max(start, at / len(shards))
            if shared > 0:
                found.append(_times(replace(shard, server=index), shared * len(shards)))
    return found


# The numbers of a Load, which add up.
SIZES = ("held", "pulled", "asked", "pushed", "rows", "touched", "updated", "summed")


def _plus(a: Load, b: Load) -> Load:
    return replace(a, **{name: getattr(a, name) + getattr(b, name) for name in SIZES})


def _times(load: Load, factor: float) -> Load:
    return replace(load, **{name: getattr(load, name) * factor for name in SIZES})
