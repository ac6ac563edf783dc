"""Ids that were seen, but not often enough to get a row."""

from __future__ import annotations

import numpy as np

from stratagem.parameter_server.index import IdIndex, grown


class Candidates:
    """How often each id was seen, exactly: about 60 bytes an id, against a row and its slots.

    Monolith (arXiv 2209.07663, section 2.2.2) filters rare ids so; where its counts are
    probabilistic to save memory, these are exact, and expire together with the rows.
    """

    def __init__(self) -> None:
        self._index = IdIndex()
        self._times = np.empty(0, np.int64)
        self._touched = np.empty(0, np.float64)

    def __len__(self) -> int:
        return len(self._index)

    def times(self, ids: np.ndarray) -> np.ndarray:
        """How often each id was seen so far."""
        numbers = self._index.find(ids)
        found = numbers >= 0
        times = np.zeros(len(ids), np.int64)
        times[found] = self._times[numbers[found]]
        return times

    def note(self, ids: np.ndarray, times: np.ndarray, touched: float | np.ndarray) -> None:
        """Sets how often distinct ids were seen, and when last."""
        numbers = self._index.find(ids)
        absent = numbers < 0
        numbers[absent] = self._index.add(ids[absent])
        self._times = grown(self._times, self._index.end)
        self._touched = grown(self._touched, self._index.end)
        self._times[numbers] = times
        self._touched[numbers] = touched

    def forget(self, ids: np.ndarray) -> None:
        """Forgets ids, which need not be there."""
        numbers = self._index.find(ids)
        self._index.remove(numbers[numbers >= 0])

    def forget_untouched(self, until: float) -> None:
        """Forgets what was last seen at that time or before."""
        numbers = self._index.numbers()
        self._index.remove(numbers[self._touched[numbers] <= until])

    def content(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, how often each was seen, when last), in no particular order."""
        numbers = self._index.numbers()
        return self._index.ids(numbers), self._times[numbers], self._touched[numbers]
