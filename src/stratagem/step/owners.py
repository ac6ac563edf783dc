"""Whose rows a value has, where tables that are looked up by the same ids could be meant."""

from __future__ import annotations

from typing import Any


class Owners:
    """For groups of values with the same rows, the tables whose they may be (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}
        self._may: dict[Any, frozenset[int]] = {}

    def add(self, v: Any, tables: frozenset[int]) -> None:
        """A new value, and whose rows it may be."""
        self._parent[v] = v
        self._may[v] = tables

    def _root(self, v: Any) -> Any:
        while self._parent[v] is not v:
            v = self._parent[v]
        return v

    def of(self, v: Any) -> frozenset[int]:
        """Whose rows a value may be."""
        return self._may[self._root(v)]

    def join(self, a: Any, b: Any) -> bool:
        """Makes two values of the same rows; False where no table has both."""
        a, b = self._root(a), self._root(b)
        both = self._may[a] & self._may[b]
        if not both:
            return False
        self._parent[b] = a
        self._may[a] = both
        return True

    def choose(self, v: Any, table: int) -> None:
        """Says whose rows a value is."""
        self._may[self._root(v)] = frozenset([table])
