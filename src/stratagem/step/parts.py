"""A step in parts, as data: what a worker pulls, computes and pushes, and what servers do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem.step.norms import Norms


@dataclasses.dataclass(frozen=True)
class Given:
    """A value that the worker puts in; see `step.primitives.given`.

    Attributes:
        kind: "closure" (number of the closure, whose `key` is None), or as it was bound.
        key: which one of the kind; plain data.
        shape: of the value.
        dtype: its name.
    """

    kind: str
    key: Any
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A variable that is pulled by row.

    Attributes:
        vid: its number on the servers.
        name: its path.
        rows: how many it has in all.
        shape: of one row.
        dtype: name of it.
        lookups: results of the ids program that are row numbers of this table.
        clip: for each lookup, whether numbers outside mean the first or last row.
        from_end: for each lookup, whether the number of rows has been added to negative numbers.
        servers: of a table without a preset size, on how many servers its ids are; else 0. Its
            lookups are operands of `step.ids.row_number_p`.
        by_lookup: the compute program takes the rows that each lookup got, `[*lookup, *row]`,
            instead of the pulled rows and positions in them.
        bags: for each lookup, over how many of its last dimensions the compute program takes the
            sum of the rows, `[*lookup[:-n], *row]`; empty: it takes rows.
    """

    vid: int
    name: str
    rows: int
    shape: tuple[int, ...]
    dtype: str
    lookups: tuple[int, ...]
    clip: tuple[bool, ...]
    from_end: tuple[bool, ...]
    servers: int = 0
    by_lookup: bool = False
    bags: tuple[int, ...] = ()

    def bags_of(self, lookups: Sequence[np.ndarray]) -> list[int]:
        """How many bags each lookup is."""
        every = zip(lookups, self.bags, strict=True)
        return [math.prod(ids.shape[: ids.ndim - n]) for ids, n in every]


@dataclasses.dataclass(frozen=True)
class Sum:
    """A gradient of a table's pulled rows, which the worker adds up itself.

    Attributes:
        table: position in `Parts.tables`.
        terms: the number among the handed values of the gradients of a lookup, `[..., *row]`, and
            its position among the table's. Each is of one row number, or of as many that follow
            each other as fit.
    """

    table: int
    terms: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Push:
    """What a worker sends to a unit.

    Attributes:
        uid: the unit.
        table: position in `Parts.tables` of the table whose rows are touched, None for all rows.
        handed: for each input of the update its kind ("scalar", "rows", "whole"), and its number
            among the handed values; of kind "sum" it is handed as "rows", and its number is that
            among `Parts.sums`; of kind "number" it is one of its round, and of no worker.
    """

    uid: str
    table: int | None
    handed: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Variables that change together.

    Attributes:
        uid: a digest of the rest.
        vids: the variables, in the order of the program's state.
        program: as `parameter_server.whole.program_of` takes it.
    """

    uid: str
    vids: tuple[int, ...]
    program: dict[str, Any]


@dataclasses.dataclass
class Parts:
    """A step in parts.

    Rows of a table that a closure's ids do not name get no update at all: momentum, moving
    averages and weight decay of such rows rest (as in TensorFlow's lazy optimizers, and as sparse
    gradients do in most of its others).

    Attributes:
        whole: numbers of the variables that are pulled whole.
        tables: variables that are pulled by row.
        given: values that the worker puts in.
        local: how many values the caller passes besides the arguments, and gets back.
        results: how many results the step has, without those.
        sums: gradients of rows that the worker adds up.
        pushes: what is pushed, and to which units.
        units: what the servers must know before the first push.
        ids: serialised program: `(*arguments, *given) -> row numbers [lookups]`; empty without
            tables.
        compute: serialised program: `(*whole, *rows, *lookups, *arguments, *given, *local) ->
            (*results, *local, *handed)`. Rows are those of tables that are not `by_lookup`;
            lookups are, table by table, positions in them, or what the lookup got.
        by_part: what is pushed that is not linear in gradients: the unit, path of its first
            variable, and the operation; not on the wire. A round of that is not one device's step.
        norms: what is computed at the end of a round; not on the wire.
        totals: units, and places of what they are handed, where a round adds up what its closures
            hand over, instead of taking the mean; not on the wire.
        out_tree: structure of the function's result; not on the wire.
        out_leaves: as of `Program`; not on the wire.
    """

    whole: tuple[int, ...]
    tables: tuple[Table, ...]
    given: tuple[Given, ...]
    local: int
    results: int
    sums: tuple[Sum, ...]
    pushes: tuple[Push, ...]
    units: tuple[Unit, ...]
    ids: bytes
    compute: bytes
    by_part: Sequence[tuple[str, str, str]] = ()
    norms: Norms | None = None
    totals: Sequence[tuple[str, int]] = ()
    out_tree: Any = None
    out_leaves: Sequence[tuple[str, Any]] = ()

    def unpack(self, results: Sequence[Any]) -> Any:
        """The function's result, from a worker's results."""
        values = iter(results)
        leaves = [static if kind == "static" else next(values) for kind, static in self.out_leaves]
        return jax.tree.unflatten(self.out_tree, leaves[: self.out_tree.num_leaves])

    def to_wire(self) -> tuple[dict[str, Any], list[bytes]]:
        """What a worker needs, without the units: plain data, and serialised programs."""
        return {
            "whole": list(self.whole),
            "tables": [_plain(t) for t in self.tables],
            "given": [_plain(g) for g in self.given],
            "local": self.local,
            "results": self.results,
            "sums": [_plain(s) for s in self.sums],
            "pushes": [_plain(p) for p in self.pushes],
        }, [self.ids, self.compute]

    @classmethod
    def from_wire(cls, data: dict[str, Any], blobs: Sequence[Any]) -> Parts:
        """The parts that a coordinator sent, as a worker runs them.

        Args:
            data: plain data of `to_wire`.
            blobs: bytes or byte arrays of `to_wire`.

        Raises:
            ValueError: they are none.
        """
        try:
            ids, compute = (bytes(b) for b in blobs)
            return cls(
                tuple(data["whole"]),
                tuple(Table(**_tuples(t)) for t in data["tables"]),
                tuple(Given(**_tuples(g)) for g in data["given"]),
                int(data["local"]),
                int(data["results"]),
                tuple(Sum(**_tuples(s)) for s in data["sums"]),
                tuple(Push(**_tuples(p)) for p in data["pushes"]),
                (),
                ids,
                compute,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Expected a step in parts. Got {data!r:.100}. Use the same version of Stratagem "
                "in all tasks."
            ) from error


def _plain(item: Any) -> dict[str, Any]:
    return {f.name: _lists(getattr(item, f.name)) for f in dataclasses.fields(item)}


def _lists(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_lists(v) for v in value]
    return int(value) if isinstance(value, np.integer) else value


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, (tuple, list)) else value
