"""The workers: who is there, what each has in hand, and who takes the next closure. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

_NEW_PART = 0.1  # of a mean that forgets, what the newest value weighs
_MESSAGES = 4  # in which a worker has its short closures in hand


class Worker:
    """One worker task.

    Attributes:
        held: closures that it has and has not answered, and since when, oldest first.
        depth: how many it may have in hand.
        ended: per-worker iterators that have no more data here.
        why: why it was lost last.
    """

    __slots__ = (
        "_answered", "_pace", "depth", "ended", "held", "incarnation", "name", "removed", "up",
        "where", "why",
    )  # fmt: skip

    def __init__(self, name: str, where: str, depth: int) -> None:
        self.name = name
        self.where = where
        self.depth = depth
        self._answered = 0.0
        self._pace: float | None = None
        self.incarnation: str | int | None = None
        self.up = False
        self.removed = False
        self.held: dict[int, float] = {}
        self.ended: set[str] = set()
        self.why = "never heard of"

    @property
    def together(self) -> int:
        """How many closures it may be sent at once: a part, so that it always has more in hand."""
        return max(1, self.depth // _MESSAGES)

    @property
    def active(self) -> bool:
        """Whether it takes closures."""
        return self.up and not self.removed

    def answered(self, since: float, now: float) -> float:
        """Notes an answer to what it had in hand; gives the seconds that it takes for one."""
        seconds = now - max(since, self._answered)
        self._answered = now
        pace = seconds if self._pace is None else self._pace
        self._pace = pace + (seconds - pace) * _NEW_PART
        return self._pace

    def __str__(self) -> str:
        return f"{self.name} at {self.where}" if self.where else self.name


class Pool:
    """Workers that can serve closures of one kind, by how much they have in hand: O(1)."""

    def __init__(self, needs: frozenset[str], depth: int) -> None:
        self.needs = needs
        self._levels: list[OrderedDict[str, Worker]] = [OrderedDict() for _ in range(depth + 1)]
        self._level: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._level)

    def place(self, worker: Worker) -> None:
        """A worker has changed."""
        name = worker.name
        level = self._level.pop(name, None)
        if level is not None:
            del self._levels[level][name]
        if worker.active and not (self.needs and self.needs & worker.ended):
            full = len(self._levels) - 1
            level = len(worker.held) if len(worker.held) < worker.depth else full
            self._levels[level][name] = worker
            self._level[name] = level

    def least(self) -> Worker | None:
        """Who has least in hand, and is not full; of these, who has waited longest."""
        if len(self._levels[-1]) == len(self._level):
            return None
        for level in self._levels:
            if level:
                return next(iter(level.values()))
        return None

    def idle(self) -> Worker | None:
        """A worker with nothing in hand."""
        return next(iter(self._levels[0].values()), None)

    def busiest(self) -> Worker | None:
        """A worker that has at least two closures in hand, and most of all."""
        for level in self._levels[:1:-1]:
            if level:
                worker = next(iter(level.values()))
                return worker if len(worker.held) > 1 else None
        return None


class Workers:
    """All workers of a job.

    Args:
        depth: how many closures a worker has in hand at most.
        short_depth: likewise where they are short.
        ahead: as many closures as take this time, in seconds, are short.

    Attributes:
        active: how many take closures.
        gone: names of those that belong to the job no more.
    """

    def __init__(self, depth: int, short_depth: int = 1, ahead: float = 0.0) -> None:
        self.active = 0
        self.gone: set[str] = set()
        self._depth, self._ahead = depth, ahead
        self._most = max(depth, short_depth) if ahead else depth
        self.any = Pool(frozenset(), self._most)
        self._all: dict[str, Worker] = {}
        self._pools: dict[frozenset[str], Pool] = {frozenset(): self.any}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all.values())

    def get(self, name: str) -> Worker | None:
        """The worker of a name."""
        return self._all.get(name)

    def add(self, name: str, where: str = "") -> Worker:
        """A worker of this name belongs to the job; it need not be there yet."""
        worker = self._all.get(name)
        if worker is None:
            worker = self._all[name] = Worker(name, where, self._depth)
        worker.where = where or worker.where
        return worker

    def pool(self, needs: Iterable[str]) -> Pool:
        """The workers that have data left for all of some iterators."""
        key = frozenset(needs)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(key, self._most)
            for worker in self._all.values():
                pool.place(worker)
        return pool

    def release(self, iterator: str) -> None:
        """An iterator is gone."""
        for key in [key for key in self._pools if iterator in key]:
            del self._pools[key]
        for worker in self._all.values():
            worker.ended.discard(iterator)

    def place(self, worker: Worker) -> None:
        """A worker has changed: whether it is there, what it has in hand or at its end."""
        for pool in self._pools.values():
            pool.place(worker)
        self.active = len(self.any)

    def answered(self, worker: Worker, since: float, now: float) -> None:
        """A worker has answered a closure that it had in hand since then."""
        pace = worker.answered(since, now)
        if self._ahead:
            fit = int(self._ahead / pace) if pace * self._most > self._ahead else self._most
            worker.depth = max(self._depth, fit)
        self.place(worker)

    def forget(self, worker: Worker) -> None:
        """A worker belongs to the job no more."""
        worker.removed = True
        self.gone.add(worker.name)
        self.place(worker)
        self._all.pop(worker.name, None)

    def missing(self) -> str:
        """All that are not there, and why, for a text."""
        lost = [worker for worker in self._all.values() if not worker.active]
        shown = "; ".join(f"{worker}: {worker.why}" for worker in lost[:8])
        more = f"; and {len(lost) - 8} more" if len(lost) > 8 else ""
        return shown + more or "no worker was ever added"
