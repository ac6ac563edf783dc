"""A store's state as messages: all but the rows, and the ranges in which rows travel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server import protocol
from stratagem.parameter_server.applied import Applied, Tokens
from stratagem.parameter_server.plan import Spec, Unit
from stratagem.parameter_server.protocol import Fields
from stratagem.parameter_server.store import Store

_COPY_BYTES = 2 << 20  # of rows at a time


def ranges(spec: Spec, index: int) -> Iterator[tuple[int, int]]:
    """Ranges of the rows of a shard, none too large for one message."""
    shard = spec.shards[index]
    step = max(1, _COPY_BYTES // max(1, spec.row_bytes))
    for start in range(shard.start, shard.stop, step):
        yield start, min(shard.stop, start + step)


def pack_state(store: Store) -> tuple[dict[str, Any], list[np.ndarray]]:
    """All but the rows."""
    below, above = store.applied.wire()
    arrays = [np.array(above, np.int64)]
    staged = []
    for number, closures in store.rounds.staged.items():
        for closure, (weight, changes) in closures.items():
            items = []
            for change in changes:
                place = None
                if change.rows is not None:
                    place = len(arrays)
                    arrays.append(change.rows)
                handed = []
                for kind, value in change.handed:
                    handed.append([kind, len(arrays)])
                    arrays.append(value)
                items.append([change.uid, change.shard, place, handed])
            staged.append([number, closure, weight, items])
    tables = []
    for vid, (names, columns) in store.tables.content(rows=1 << 62):
        tables.append([vid, list(names), len(arrays)])
        arrays += columns
    fields = {
        "specs": [spec.wire() for spec in store.specs.values()],
        "units": [unit.wire() for unit in store.units.values()],
        "version": store.version, "below": below, "tokens": store.tokens.wire(),
        "committed": store.rounds.committed + 1, "late": store.rounds.late,
        "dropped": store.rounds.dropped, "staged": staged, "tables": tables,
    }  # fmt: skip
    return fields, arrays


def unpack_state(
    store: Store,
    fields: Mapping[str, Any],
    arrays: Sequence[np.ndarray],
    rows: Mapping[tuple[int, int], np.ndarray],
) -> None:
    """Fills an empty store.

    Args:
        store: of the same server as the one that was packed.
        fields: as they came; so are `arrays`.
        arrays: the first has numbers of closures.
        rows: by variable and shard.
    """
    said = Fields("state", fields, arrays)
    staged = []
    for number, closure, weight, items in said.entries("staged", 4):
        changes = protocol.changes(Fields("state", {"items": items}, arrays))
        staged.append((number, closure, weight, changes))
    applied = Applied(said.count("below"), said.array(0, "above").tolist())
    tokens = Tokens.from_wire(fields.get("tokens"))
    units: list[Unit] = said.units()
    store.keep(said.specs(), rows)
    for vid, names, first in said.entries("tables", 3):
        store.tables.fill(vid, names, [said.array(first + i, "tables") for i in range(len(names))])
    store.install(units)
    store.applied, store.tokens, store.version = applied, tokens, said.count("version")
    rounds = store.rounds
    rounds.committed = said.count("committed") - 1
    rounds.late, rounds.dropped = said.count("late"), said.count("dropped")
    for number, closure, weight, changes in staged:
        rounds.stage(number, closure, float(weight), changes)
