"""Accounted data: which batch of a dataset goes to whom, so that each is used exactly once."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from stratagem.coordinator.watermark import Watermark


class Leases:
    """The batches of one dataset, numbered from 0. Its end is the program's to know.

    A batch is bound to the number under which its closure pushes, its token, for good: whoever
    executes it, and after how many losses, a server applies it once.

    Args:
        done: batches that are finished already.
        tokens: tokens of batches that were leased before, and are not known to be finished.
    """

    def __init__(
        self, done: Watermark | None = None, tokens: Mapping[int, int] | None = None
    ) -> None:
        self.done = done or Watermark()
        self._tokens = dict(tokens or {})
        self._back: list[int] = []  # A heap of batches that were leased and not executed.
        self._next = 0
        self._skip()

    def _skip(self) -> None:
        while self._next in self.done:
            self._next += 1

    def take(self, token: int) -> tuple[int, int]:
        """Lease the next batch.

        Args:
            token: what its closure pushes under, unless the batch has a token already.

        Returns:
            the batch and its token.
        """
        if self._back:
            batch = heapq.heappop(self._back)
        else:
            batch, self._next = self._next, self._next + 1
            self._skip()
        return batch, self._tokens.pop(batch, token)

    def give_back(self, batch: int, token: int | None) -> None:
        """A leased batch was not executed, or may not have been; it is leased again.

        Args:
            token: what it is bound to; None where nothing pushed under it can ever be applied.
        """
        heapq.heappush(self._back, batch)
        if token is not None:
            self._tokens[batch] = token

    def finish(self, batch: int) -> None:
        """A batch has been used, or has failed for good."""
        self.done.add(batch)

    def free_tokens(self) -> list[int]:
        """Tokens that wait for their batch to be leased again."""
        return list(self._tokens.values())
