"""What requests to a parameter server say, and how a store carries them out.

Fields come from another process: each is checked, and ValueError says which is not what it should
be. Arrays are named by their place in the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server import rounds
from stratagem.parameter_server.bags import Bagged, Bags
from stratagem.parameter_server.plan import Spec, Unit, are_counts, is_count, is_uid
from stratagem.parameter_server.rounds import Change, Place
from stratagem.parameter_server.store import Store, Token
from stratagem.transport.incoming import told

Answer = tuple[dict[str, Any], Sequence[np.ndarray]]
Allocate = Callable[[tuple[int, ...], Any], np.ndarray]

_KINDS = ("scalar", "rows", "whole")


class Fields:
    """The fields and arrays of a request, read with checks.

    Args:
        method: of the request, for errors.
        fields: as they came.
        arrays: as they came.

    Attributes:
        raw: the fields.
    """

    def __init__(self, method: str, fields: Mapping[str, Any], arrays: Sequence[np.ndarray]):
        self._method, self.raw, self._arrays = method, fields, arrays

    def get(self, name: str, expected: str, good: Callable[[Any], bool]) -> Any:
        """A field that `good` accepts; `expected` says what that is."""
        value = self.raw.get(name)
        if not good(value):
            self.refuse(name, expected, value)
        return value

    def count(self, name: str) -> int:
        """A number from 0 on."""
        return self.get(name, "a number from 0 on", is_count)

    def maybe_count(self, name: str) -> int | None:
        """A number from 0 on, or None."""
        return self.get(name, "a number from 0 on, or None", lambda x: x is None or is_count(x))

    def counts(self, name: str) -> list[int]:
        """A list of numbers."""
        return self.get(name, "a list of numbers from 0 on", are_counts)

    def flag(self, name: str) -> bool:
        """True or False."""
        return self.get(name, "True or False", lambda x: isinstance(x, bool))

    def text(self, name: str) -> str:
        """Some characters."""
        return self.get(name, "a text", lambda x: isinstance(x, str) and 0 < len(x) <= 1000)

    def entries(self, name: str, length: int) -> list[Any]:
        """A list of lists of one length."""
        return self.get(
            name,
            f"a list of lists of {length}",
            lambda x: (
                isinstance(x, (list, tuple))
                and all(isinstance(e, (list, tuple)) and len(e) == length for e in x)
            ),
        )

    def specs(self) -> list[Spec]:
        """The field `specs`."""
        return [Spec.from_wire(x) for x in self.get("specs", "a list", _is_list)]

    def units(self) -> list[Unit]:
        """The field `units`."""
        return [Unit.from_wire(x) for x in self.get("units", "a list", _is_list)]

    def places(self, name: str) -> list[Place]:
        """Places: a unit, and which of the values that it is handed."""
        found = self.entries(name, 2)
        if not all(is_uid(unit) and is_count(place) for unit, place in found):
            self.refuse(name, "units and numbers from 0 on", found)
        return [(unit, place) for unit, place in found]

    def array(self, place: Any, name: str) -> np.ndarray:
        """The array at a place that a field names."""
        if not is_count(place) or place >= len(self._arrays):
            self.refuse(name, f"the place of one of {len(self._arrays)} arrays", place)
        return self._arrays[place]

    def inner(self, fields: Mapping[str, Any], first: int) -> Fields:
        """Fields in a list, whose arrays begin at a place."""
        return Fields(self._method, fields, self._arrays[first:])

    def refuse(self, name: str, expected: str, value: Any) -> None:
        """Raises ValueError."""
        raise ValueError(
            f"{self._method}: expected {expected} as {name!r}. Got {value!r:.200}. Use the client "
            "of this version."
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _are_mappings(value: Any) -> bool:
    return _is_list(value) and all(isinstance(one, dict) for one in value)


def _is_weight(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def starts(said: Fields) -> dict[int, Any]:
    """The field `starts` of `create`: [[vid, start]]; values as arrays by shard."""
    found: dict[int, Any] = {}
    for vid, start in said.entries("starts", 2):
        if isinstance(start, dict) and start.get("kind") == "value":
            places = Fields("create", start, ()).entries("places", 2)
            arrays = {_number(said, "starts", i): said.array(p, "starts") for i, p in places}
            start = {"kind": "value", "arrays": arrays}
        found[_number(said, "starts", vid)] = start
    return found


def pull(
    store: Store, said: Fields, allocate: Allocate = np.empty, with_room: bool = False
) -> Answer:
    """`pull`: whole [[vid, shard]], rows [[vid, shard, place of the numbers, room, in bags]].

    The places and bounds of bags follow the numbers.
    Room is made where it does not travel; elsewhere the client makes it.
    """
    whole = [
        (_number(said, "whole", v), _number(said, "whole", s)) for v, s in said.entries("whole", 2)
    ]
    asked = said.entries("rows", 5)
    rows = [
        (_number(said, "rows", v), _number(said, "rows", s), said.array(a, "rows"))
        for v, s, a, _, _ in asked
    ]
    rooms = [_number(said, "rows", room) for _, _, _, room, _ in asked]
    bags = [_bags(said, "rows", place) if bagged else None for _, _, place, _, bagged in asked]
    found = store.pull(whole, rows, allocate, rooms if with_room else (), bags)
    return {"version": store.version}, found


def read(store: Store, said: Fields) -> Answer:
    """`read`: vid, shard, start, stop."""
    found = store.read(*(said.count(name) for name in ("vid", "shard", "start", "stop")))
    return {"version": store.version}, (found,)


def _bags(said: Fields, name: str, place: int) -> Bags:
    """Places and bounds, after the array at a place."""
    return Bags(said.array(place + 1, name), said.array(place + 2, name))


def changes(said: Fields, store: Store | None = None) -> list[Change]:
    """The field `items`: [[unit, shard, place of row numbers or None, [[kind, place]]]].

    Args:
        said: the request.
        store: adds gradients of bags up by row; None: there are none.
    """
    found = []
    for uid, shard, rows, handed in said.entries("items", 4):
        if not is_uid(uid):
            said.refuse("items", "the name of a unit", uid)
        if not _is_list(handed) or not all(_is_list(x) and len(x) == 2 for x in handed):
            said.refuse("items", "kinds and arrays", handed)
        numbers = None if rows is None else said.array(rows, "items")
        values = []
        for kind, place in handed:
            value = said.array(place, "items")
            if kind == "bags" and store is not None and numbers is not None:
                bagged = Bagged(_bags(said, "items", place), value)
                kind, value = "rows", store.updates.by_row(uid, numbers, bagged, store.specs)
            if kind not in _KINDS:
                said.refuse("items", f"a kind of {', '.join(_KINDS)}", kind)
            values.append((kind, value))
        found.append(Change(uid, _number(said, "items", shard), numbers, tuple(values)))
    return found


def push(store: Store, said: Fields) -> Answer:
    """`push`: each, a list of `_push`, each with its number of `arrays`, which follow each other.

    Each is answered by itself, as some may be refused: what became of it, or its error.
    """
    answers: list[dict[str, Any]] = []
    at = 0
    for one in said.get("each", "a list of pushes", _are_mappings):
        mine = said.inner(one, at)
        at += mine.count("arrays")
        try:
            answers.append(_push(store, mine))
        except Exception as error:
            answers.append(told(error))
    return {"each": answers}, ()


def _push(store: Store, said: Fields) -> dict[str, Any]:
    """Closure, below, items (`changes`), pulled, round, staged, weight."""
    staged = said.get(
        "staged",
        "None or a list of units",
        lambda x: x is None or (_is_list(x) and all(is_uid(u) for u in x)),
    )
    done = store.push(
        said.count("closure"),
        said.count("below"),
        changes(said, store),
        said.maybe_count("pulled"),
        said.maybe_count("round"),
        staged,
        float(said.get("weight", "a finite number from 0 on", _is_weight)),
    )
    return {"applied": done.applied, "staleness": done.staleness, "late": done.late}


def squares(store: Store, said: Fields) -> Answer:
    """`squares`: round, closures, weights, mean, places; of the mean gradients of a round."""
    number, closures, weights = _round(said)
    missing = store.rounds.missing(number, closures)
    if missing:
        return {"missing": list(missing)}, ()
    changes = store.rounds.combined(number, closures, weights, said.flag("mean"))
    return {"missing": []}, (rounds.squares(changes, said.places("places")),)


def commit(store: Store, said: Fields) -> Answer:
    """`commit`: round, closures, weights, mean; places, for each of which a number comes; and
    totals, places where what closures hand over is added up."""
    number, closures, weights = _round(said)
    places = said.places("places") if "places" in said.raw else []
    totals = said.places("totals") if "totals" in said.raw else []
    given = [said.array(i, "places") for i in range(len(places))]
    if any(one.shape != () for one in given):
        said.refuse("places", "a number for each", places)
    numbers = {**dict.fromkeys(totals), **dict(zip(places, given, strict=True))}
    done = store.commit(number, closures, weights, said.flag("mean"), numbers)
    return {"applied": done.applied, "missing": list(done.missing), "dropped": done.dropped}, ()


def _round(said: Fields) -> tuple[int, list[int], list[float] | None]:
    """Number, closures and weights of a round."""
    closures = said.counts("closures")
    weights = said.get(
        "weights",
        "None or a finite number from 0 on a closure",
        lambda x: (
            x is None or (_is_list(x) and len(x) == len(closures) and all(map(_is_weight, x)))
        ),
    )
    if len(set(closures)) < len(closures):
        said.refuse("closures", "each closure once", closures)
    return said.count("round"), closures, weights


def assign(store: Store, said: Fields) -> Answer:
    """`assign`: vid, shard, op, rows (None, [start, stop] or a place), token; the value first."""
    where = said.get("rows", "None, a range or a place", lambda x: (
        x is None or is_count(x) or (are_counts(x) and len(x) == 2)
    ))  # fmt: skip
    rows = tuple(where) if _is_list(where) else where
    if is_count(where):
        rows = said.array(where, "rows")
    token = said.get("token", "client, number and lowest number at work", _is_token)
    done = store.assign(
        said.count("vid"), said.count("shard"), said.text("op"), said.array(0, "value"), rows,
        _as_token(token),
    )  # fmt: skip
    return {"applied": done}, ()


def table(store: Store, said: Fields) -> Answer:
    """`table`: vid and the first and last bucket; ids of a dynamic table, and their rows."""
    low, high = said.count("low"), said.count("high")
    return {}, store.tables.rows(_dynamic(store, said), low, high)


def put(store: Store, said: Fields) -> Answer:
    """`put`: vid; ids and rows of a dynamic table. The same again changes nothing."""
    ids, rows = said.array(0, "ids"), said.array(1, "rows")
    store.tables.put(_dynamic(store, said), ids, rows, store.version)
    return {}, ()


def _dynamic(store: Store, said: Fields) -> int:
    vid = said.count("vid")
    if vid not in store.tables:
        said.refuse("vid", "a dynamic table that is here", vid)
    return vid


def install(store: Store, said: Fields) -> Answer:
    """`install`: units."""
    store.install(said.units())
    return {}, ()


def delete(store: Store, said: Fields) -> Answer:
    """`delete`: vids."""
    store.delete(said.counts("vids"))
    return {}, ()


CHANGES: Mapping[str, Callable[[Store, Fields], Answer]] = {
    "push": push, "commit": commit, "assign": assign, "install": install, "delete": delete,
    "put": put,
}  # fmt: skip
"""Methods that change the state at once; `create` does it in steps."""


def _number(said: Fields, name: str, value: Any) -> int:
    if not is_count(value):
        said.refuse(name, "a number from 0 on", value)
    return value


def _is_token(value: Any) -> bool:
    return (
        _is_list(value) and len(value) == 3 and isinstance(value[0], str) and are_counts(value[1:])
    )


def _as_token(value: Sequence[Any]) -> Token:
    return value[0], value[1], value[2]
