"""Accounted data: which batch of a dataset goes to whom, so that each is used exactly once."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from stratagem.coordinator.watermark import Watermark


class Leases:
    """The batches of one dataset, numbered from 0.

    A batch is bound to the number under which its closure pushes, its token, for good: whoever
    executes it, and after how many losses, a server applies it once.

    Args:
        key: name of the dataset.
        total: how many batches it has; None where only its end will tell.
        done: batches that are finished already.
        tokens: tokens of batches that were leased before, and are not known to be finished.
    """

    def __init__(
        self,
        key: str,
        total: int | None,
        done: Watermark | None = None,
        tokens: Mapping[int, int] | None = None,
    ) -> None:
        self.key = key
        self.total = total
        self.done = done or Watermark()
        self._declared = total is not None
        self._tokens = dict(tokens or {})
        self._back: list[int] = []  # A heap of batches that were leased and not executed.
        self._next = 0
        self._last = self.done.last
        self._skip()

    def _skip(self) -> None:
        while self._next in self.done:
            self._next += 1

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing to lease now."""
        return not self._back and self.total is not None and self._next >= self.total

    @property
    def left(self) -> int | None:
        """How many batches are not finished; None where that is not known."""
        return None if self.total is None else self.total - len(self.done)

    def take(self, token: int) -> tuple[int, int] | None:
        """Lease the next batch.

        Args:
            token: what its closure pushes under, unless the batch has a token already.

        Returns:
            the batch and its token; None where no batch is left.
        """
        if self.exhausted:
            return None
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
        if self.total is not None and batch >= self.total:
            return
        heapq.heappush(self._back, batch)
        if token is not None:
            self._tokens[batch] = token

    def finish(self, batch: int) -> str:
        """A batch has been used, or has failed for good; what is wrong with that, or nothing."""
        self.done.add(batch)
        self._last = max(self._last, batch)
        return self._contradiction()

    def end(self, batch: int) -> str:
        """A worker found that there is no such batch; what is wrong with that, or nothing."""
        if self._declared and self.total is not None and batch < self.total:
            return (
                f"Expected {self.total} batches of dataset {self.key!r}, as was said. Got its end "
                f"at batch {batch} (counted from 0). Give the right number, or none"
            )
        self.total = batch if self.total is None else min(self.total, batch)
        self._back = [number for number in self._back if number < self.total]
        heapq.heapify(self._back)
        return self._contradiction()

    def _contradiction(self) -> str:
        if self.total is None or self._last < self.total:
            return ""
        return (
            f"Expected dataset {self.key!r} to have the same batches on every worker. Got a batch "
            f"{self._last} from one, and the end at batch {self.total} from another (counted from "
            "0). Make its order and length depend on nothing but its arguments and seeds"
        )

    def free_tokens(self) -> list[int]:
        """Tokens that wait for their batch to be leased again."""
        return list(self._tokens.values())
