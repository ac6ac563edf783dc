"""Where a run through a dataset stands, and how to stand there again in another process."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stratagem.errors import BackupMismatchError
from stratagem.recovery import randomness

_BYTES = "base64"


class Pass(Iterator[Any]):
    """One run through a dataset that knows how far it is.

    A run is resumed by the state of its iterator where that has `get_state` and `set_state` (those
    of Grain do); else the same run is begun again, with the random state it began with, and the
    batches that were drawn are drawn and dropped.

    Args:
        source: the batches.
        resumed: what `position` returned in the run to go on with; None begins a new run.
        random: the random state to go on with (`randomness.get_state`), with `resumed`.
        in_flight: how many of the batches drawn last may not be trained yet when `position` is
            asked.

    Attributes:
        ended: True once it was asked for a batch and had none.
    """

    def __init__(
        self, source: Iterable[Any], resumed: Any = None, random: Any = None, in_flight: int = 0
    ):
        self._source = source
        begun = resumed and (resumed["drawn"] or resumed.get("ahead"))
        self._resumed = resumed if begun else None
        self._random = random
        self._iterator: Iterator[Any] | None = None
        self._began: Any = None
        self._drawn = 0
        self.ended = False
        self._ahead: list[Any] = []
        self._before_ahead: tuple[Any, Any] | None = None
        self._states: deque[Any] = deque(maxlen=in_flight)  # of the iterator, before each draw

    def __next__(self) -> Any:
        iterator = self._begun()
        self._before_ahead = None
        try:
            batch = self._ahead.pop(0) if self._ahead else self._draw(iterator)
        except StopIteration:
            self.ended = True
            raise
        self._drawn += 1
        return batch

    def is_over(self) -> bool:
        """True when there is no further batch; draws one ahead to find out."""
        iterator = self._begun()
        if not self._ahead:
            self._before_ahead = self._now()
            try:
                self._ahead.append(self._draw(iterator))
            except StopIteration:
                return True
        return False

    def position(self, in_flight: int = 0) -> dict[str, Any]:
        """How far the run is, as JSON can hold it: batches drawn, how it began, the iterator.

        Args:
            in_flight: how many of the batches drawn last are to be trained again. The random
                state is then the one after they were drawn.
        """
        if self._resumed is not None:
            return self._resumed
        state = self._before_ahead[0] if self._before_ahead else self._iterator_state()
        if in_flight and self._states:
            state = encoded(self._states[-in_flight - len(self._ahead)])
        drawn = self._drawn - in_flight
        return {"drawn": drawn, "ahead": in_flight, "began": self._began, "iterator": state}

    def _draw(self, iterator: Iterator[Any]) -> Any:
        if self._states.maxlen and is_checkpointable(iterator):
            self._states.append(iterator.get_state())  # type: ignore[attr-defined]
        return next(iterator)

    def random_state(self) -> dict[str, Any]:
        """The process's random state as it is when the next batch is drawn."""
        if self._resumed is not None:
            return self._random
        return self._before_ahead[1] if self._before_ahead else randomness.get_state()

    def _now(self) -> tuple[Any, Any]:
        return self._iterator_state(), randomness.get_state()

    def _iterator_state(self) -> Any:
        if not is_checkpointable(self._iterator):
            return None
        return encoded(self._iterator.get_state())  # type: ignore[union-attr]

    def _begun(self) -> Iterator[Any]:
        if self._iterator is None:
            resumed, self._resumed = self._resumed, None
            if resumed is None:
                self._began = randomness.get_state()
                self._iterator = iter(self._source)
            else:
                self._iterator = self._resume(resumed)
        return self._iterator

    def _resume(self, resumed: dict[str, Any]) -> Iterator[Any]:
        self._began, self._drawn = resumed["began"], resumed["drawn"]
        randomness.set_state(self._began)
        iterator = iter(self._source)
        if resumed["iterator"] is not None and is_checkpointable(iterator):
            iterator.set_state(decoded(resumed["iterator"]))  # type: ignore[attr-defined]
        else:
            self._drop(iterator)
        self._ahead = [self._draw(iterator) for _ in range(resumed.get("ahead", 0))]
        randomness.set_state(self._random)
        return iterator

    def _drop(self, iterator: Iterator[Any]) -> None:
        for n in range(self._drawn):
            try:
                next(iterator)
            except StopIteration:
                raise BackupMismatchError(
                    f"Expected data with more than {self._drawn} batches, of which the backup had "
                    f"seen that many. Got {n}. Go on with the same data and batch size, or name "
                    "another directory to start anew."
                ) from None


def is_checkpointable(thing: Any) -> bool:
    """True for what can say and be told where it is."""
    return hasattr(thing, "get_state") and hasattr(thing, "set_state")


def encoded(state: Any) -> Any:
    """A state of `get_state` as JSON can hold it: bytes as text, NumPy's numbers as Python's."""
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    if isinstance(state, dict):
        return {key: encoded(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [encoded(value) for value in state]
    if isinstance(state, (np.ndarray, np.generic)):
        return state.tolist()
    return state


def decoded(state: Any) -> Any:
    """What `encoded` was given, its tuples and arrays as lists."""
    if isinstance(state, dict):
        if list(state) == [_BYTES]:
            return base64.b64decode(state[_BYTES])
        return {key: decoded(value) for key, value in state.items()}
    if isinstance(state, list):
        return [decoded(value) for value in state]
    return state
