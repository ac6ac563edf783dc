"""Gradients that wait for the end of their round, in synchronous and hybrid training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stratagem.parameter_server.bags import Bagged
from stratagem.parameter_server.dtypes import is_small_float

# A unit, and the place of a value among those it is handed.
Place = tuple[int | str, int]
# Numbers of a round; None: what its closures hand over there is added up, whatever their weights.
Numbers = Mapping[Place, np.ndarray | None] | None


@dataclass(frozen=True)
class Change:
    """What one push does to one shard of a unit.

    Attributes:
        uid: the unit.
        shard: index of the shard.
        rows: global numbers of the rows, int64, sorted, no number twice; None: all of the shard.
        handed: kind ("scalar", "rows" or "whole") and value of each.
    """

    uid: int | str
    shard: int
    rows: np.ndarray | None
    handed: tuple[tuple[str, np.ndarray], ...]

    @property
    def nbytes(self) -> int:
        """What it takes to keep it."""
        return sum(x.nbytes for _, x in self.handed) + (
            0 if self.rows is None else self.rows.nbytes
        )

    def copy(self) -> Change:
        """One whose arrays are its own."""
        rows = None if self.rows is None else self.rows.copy()
        return Change(self.uid, self.shard, rows, tuple((k, x.copy()) for k, x in self.handed))


@dataclass(frozen=True)
class Pushed:
    """What became of a push.

    Attributes:
        applied: whether any of it was applied or staged now.
        staleness: how many pushes were applied here since the values that it used were pulled.
        late: its round was committed without it.
    """

    applied: bool
    staleness: int
    late: bool = False


@dataclass(frozen=True)
class Committed:
    """What became of a round.

    Attributes:
        applied: whether its gradients were applied now.
        missing: closures whose gradients are not here; then nothing was done.
        dropped: how many closures' gradients were thrown away.
    """

    applied: bool
    missing: tuple[int, ...] = ()
    dropped: int = 0


@dataclass
class Rounds:
    """Staged gradients by round and closure; rounds count up, and are committed in order.

    Attributes:
        committed: the last round that was.
        late: pushes that came after their round.
        dropped: closures whose gradients were thrown away at a commit.
        nbytes: size of all that waits.
    """

    committed: int = -1
    late: int = 0
    dropped: int = 0
    nbytes: int = 0
    staged: dict[int, dict[int, tuple[float, tuple[Change, ...]]]] = field(default_factory=dict)
    _combined: tuple[Any, list[Change]] | None = field(default=None, init=False, repr=False)

    def stage(self, number: int, closure: int, weight: float, changes: Sequence[Change]) -> bool:
        """Keeps a closure's gradients for a round; False where it is too late, or again."""
        if number <= self.committed:
            self.late += 1
            return False
        closures = self.staged.setdefault(number, {})
        if closure in closures:
            return False
        # Copies: what came may lie in memory that is shared with the sender.
        copies = tuple(change.copy() for change in changes)
        closures[closure] = weight, copies
        self.nbytes += sum(change.nbytes for change in copies)
        return True

    def missing(self, number: int, closures: Sequence[int]) -> tuple[int, ...]:
        """Those of the closures that were not staged for a round."""
        here = self.staged.get(number, {})
        return tuple(c for c in closures if c not in here)

    def combined(
        self, number: int, closures: Sequence[int], weights: Sequence[float] | None, mean: bool,
        numbers: Numbers = None,
    ) -> list[Change]:  # fmt: skip
        """The weighted sum of what closures staged, one change a unit and shard.

        Floating-point gradients are multiplied by their weights, and for the mean divided by the
        sum of the weights; integers are only added. A scalar that is the same in all closures,
        as a learning rate is, stays as it is. It is kept until the round is finished.

        Args:
            number: of the round.
            closures: in the order in which they are added.
            weights: of each; None: those that came with the pushes.
            mean: divides by the sum of the weights.
            numbers: of the round, in place of what was pushed.

        Raises:
            ValueError: a unit got rows from one closure and all of it from another.
        """
        known = {place: value for place, value in (numbers or {}).items() if value is not None}
        totals = frozenset(place for place in numbers or () if place not in known)
        key = (number, tuple(closures), None if weights is None else tuple(weights), mean, totals)
        if self._combined is None or self._combined[0] != key:
            self._combined = key, self._combine(number, closures, weights, mean, totals)
        changes = self._combined[1]
        return [_with(known, change) for change in changes] if known else changes

    def _combine(
        self, number: int, closures: Sequence[int], weights: Sequence[float] | None, mean: bool,
        totals: frozenset[Place],
    ) -> list[Change]:  # fmt: skip
        here = self.staged.get(number, {})
        given = list(weights) if weights is not None else [here[c][0] for c in closures]
        total = sum(given) if mean else 1.0
        if total <= 0:
            raise ValueError(
                f"round {number}: expected weights with a positive sum. Got {given}. Weigh each "
                "closure by its rows."
            )
        parts: dict[tuple[Any, int], list[tuple[float, Change]]] = {}
        for closure, weight in zip(closures, given, strict=True):
            for change in here[closure][1]:
                parts.setdefault((change.uid, change.shard), []).append((weight / total, change))
        return [_sum(found, totals) for found in parts.values()]

    def finish(self, number: int, closures: Sequence[int]) -> int:
        """Forgets all up to a round; how many closures' gradients were thrown away."""
        before = sum(len(here) for r, here in self.staged.items() if r <= number)
        dropped = before - len(closures)
        self.staged = {r: here for r, here in self.staged.items() if r > number}
        every = (s for closures in self.staged.values() for s in closures.values())
        self.nbytes = sum(change.nbytes for _, changes in every for change in changes)
        self.committed, self._combined = number, None
        self.dropped += dropped
        return dropped


def squares(changes: Sequence[Change], places: Sequence[Place]) -> np.ndarray:
    """Sums of the squares of what changes hand over at some places, float64 `[places]`."""
    totals = dict.fromkeys(places, 0.0)
    for change in changes:
        for place, (_, value) in enumerate(change.handed):
            if (change.uid, place) in totals:
                square = np.square(value.astype(np.float64))
                totals[change.uid, place] += float(square.sum())
    return np.asarray([totals[place] for place in places], np.float64)


def _with(numbers: Mapping[Place, np.ndarray], change: Change) -> Change:
    handed = (
        (kind, numbers.get((change.uid, place), value) if kind == "scalar" else value)
        for place, (kind, value) in enumerate(change.handed)
    )
    return replace(change, handed=tuple(handed))


def _sum(found: Sequence[tuple[float, Change]], totals: frozenset[Place] = frozenset()) -> Change:
    first = found[0][1]
    if len({change.rows is None for _, change in found}) > 1:
        raise ValueError(
            f"unit {first.uid}: expected rows from all closures of a round, or from none. Got "
            "both. Commit closures of one function."
        )
    if len({tuple(kind for kind, _ in change.handed) for _, change in found}) > 1:
        raise ValueError(
            f"unit {first.uid}: expected the same kinds of values from all closures of a round. "
            "Got several. Commit closures of one function."
        )
    rows = None
    if first.rows is not None:
        rows = np.unique(np.concatenate([c.rows for _, c in found if c.rows is not None]))
    handed = []
    for i, (kind, value) in enumerate(first.handed):
        terms = [(w, change.handed[i][1], change.rows) for w, change in found]
        if (first.uid, i) in totals:
            terms = [(1.0, value, own) for _, value, own in terms]
            handed.append((kind, _weighted(terms, rows if kind == "rows" else None)))
        elif kind == "scalar" and all(
            np.array_equal(value, v, equal_nan=True) for _, v, _ in terms
        ):
            handed.append((kind, value))  # such as a learning rate, to the last bit
        elif value.dtype == np.bool_:  # such as whether all gradients are finite
            handed.append((kind, np.logical_and.reduce([v for _, v, _ in terms])))
        else:
            handed.append((kind, _weighted(terms, rows if kind == "rows" else None)))
    return Change(first.uid, first.shard, rows, tuple(handed))


def weighed(value: Any, weight: float) -> Any:
    """A gradient, or those of bags, times a weight; integers stay as they are."""
    if isinstance(value, Bagged):
        return replace(value, gradients=weighed(value.gradients, weight))
    wide = np.dtype(np.float32) if is_small_float(value.dtype) else value.dtype
    if wide.kind not in "fc":
        return value
    return (value.astype(wide, copy=False) * wide.type(weight)).astype(value.dtype, copy=False)


def _weighted(
    terms: Sequence[tuple[float, np.ndarray, np.ndarray | None]], rows: np.ndarray | None
) -> np.ndarray:
    like = terms[0][1]
    wide = np.dtype(np.float32) if is_small_float(like.dtype) else like.dtype
    shape = like.shape if rows is None else (len(rows), *like.shape[1:])
    total = np.zeros(shape, wide)
    for weight, value, own in terms:
        scaled = value if wide.kind not in "fc" else value.astype(wide) * wide.type(weight)
        if rows is None or own is None:
            total += scaled
        else:
            total[np.searchsorted(rows, own)] += scaled
    return total.astype(like.dtype, copy=False)
