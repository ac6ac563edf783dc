"""What a job has counted so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Closures, by how they ended and what happened to them on the way.

    Attributes:
        finished: their effects are in the variables.
        failed: they raised.
        cancelled: nobody needed them any more.
        ended: there was no data for them.
        dropped: their gradients came too late for their round; with `dropped_rows` rows in all.
        reruns: how often one ran again, because a worker or a server was lost.
        helped: how often one was given to an idle worker, too, while it waited on a busy one.
    """

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    ended: int = 0
    dropped: int = 0
    dropped_rows: int = 0
    reruns: int = 0
    helped: int = 0


@dataclass
class Staleness:
    """How many pushes of others came between a closure's pull and its own push.

    Attributes:
        histogram: how many closures had which staleness.
    """

    count: int = 0
    total: int = 0
    max: int = 0
    histogram: Counter[int] = field(default_factory=Counter)

    def add(self, staleness: int) -> None:
        """One more closure has pushed."""
        self.count += 1
        self.total += staleness
        self.max = max(self.max, staleness)
        self.histogram[staleness] += 1

    @property
    def mean(self) -> float:
        """The mean over all closures; 0 where there are none."""
        return self.total / self.count if self.count else 0.0
