"""A per-worker dataset that workers open: who has to say what its elements are like."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future
from typing import Any

COME_SECONDS = 60.0  # in which a worker has to come to have a say in whether data are empty


@dataclasses.dataclass
class Opening:
    """An iterator that workers open.

    Attributes:
        first: shapes and dtypes of the first element of whichever has one and answers first.
        awaited: the workers that have not answered; also those that have not come yet.
        empty: whether one has answered that it has no element.
        until: when those are not awaited any more that have not come.
        at_work: who opens it now, and since when.
    """

    first: Future[Any] = dataclasses.field(default_factory=Future)
    awaited: set[str] = dataclasses.field(default_factory=set)
    empty: bool = False
    until: float = dataclasses.field(default_factory=lambda: time.monotonic() + COME_SECONDS)
    at_work: dict[str, float] = dataclasses.field(default_factory=dict)

    def fail(self, error: BaseException) -> None:
        """It cannot be opened, unless it is already."""
        if not self.first.done():
            self.first.set_exception(error)

    def settle(self, name: str) -> None:
        """A worker has answered, or is lost; where none of the others has an element, none has."""
        self.awaited.discard(name)
        self.at_work.pop(name, None)
        if self.empty and not self.awaited and not self.first.done():
            self.first.set_result(None)
