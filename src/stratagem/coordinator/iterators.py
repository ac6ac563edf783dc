"""Which per-worker iterators are needed, so that the others can be forgotten. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Iterators:
    """An iterator is gone when the program has let go of it, and no closure needs it any more."""

    def __init__(self) -> None:
        self._needed: Counter[str] = Counter()  # By closures that are not finished.
        self._released: set[str] = set()  # Only those that are needed still.

    def need(self, keys: Iterable[str]) -> None:
        """A closure needs iterators."""
        self._needed.update(keys)

    def finish(self, keys: Iterable[str]) -> list[str]:
        """A closure that needed iterators is finished; those that are gone with it."""
        gone = []
        for key in keys:
            self._needed[key] -= 1
            if not self._needed[key]:
                del self._needed[key]
                if key in self._released:
                    self._released.remove(key)
                    gone.append(key)
        return gone

    def release(self, key: str) -> list[str]:
        """The program has let go of an iterator; itself, if it is gone with that."""
        if key in self._needed:
            self._released.add(key)
            return []
        return [key]
