"""Units of work, and the order in which they are handed out. Pure."""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from stratagem.coordinator.instructions import Lease
from stratagem.coordinator.workers import Pool, Worker, Workers


class Phase(enum.Enum):
    """Where a closure is."""

    QUEUED = enum.auto()
    FLYING = enum.auto()  # At least one worker has it.
    WAITING = enum.auto()  # It is queued in a moment, or not at all.
    STAGED = enum.auto()  # Its gradients wait for their round.
    DONE = enum.auto()


class Closure:
    """One unit of work. Its number is unique in the job.

    Attributes:
        what: the function that it calls, for texts.
        token: number that it pushes under.
        parts: how many closures make its round; 0: as many as there are workers then.
        holders: names of the workers that have it; one is usual.
        started: whether it was ever handed out.
        resolved: whether the program has its result.
        cancelled: whether nobody needs it any more.
        restaged: whether a server lost its gradients, so that they must come anew; `doubtful`
            are the workers that have had it since before, and may have staged them before.
        aborts: how often in a row workers gave it back, the last time after `since`.
        programs: how often in a row the worker that has it lacked its program.
        lost: how often a worker was lost that had it.
    """

    __slots__ = (
        "aborts",
        "cancelled",
        "dataset",
        "doubtful",
        "holders",
        "lease",
        "lost",
        "needs",
        "number",
        "parts",
        "phase",
        "programs",
        "pushes",
        "resolved",
        "restaged",
        "since",
        "started",
        "token",
        "what",
    )

    def __init__(
        self,
        number: int,
        needs: frozenset[str],
        dataset: str | None,
        pushes: bool,
        parts: int = 0,
        what: str = "",
    ) -> None:
        self.number = number
        self.what = what or f"closure {number}"
        self.token = number
        self.needs = needs
        self.dataset = dataset
        self.pushes = pushes
        self.parts = parts
        self.lease: Lease | None = None
        self.phase = Phase.WAITING
        self.holders: list[str] = []
        self.doubtful: set[str] = set()
        self.started = self.resolved = self.cancelled = self.restaged = False
        self.aborts = self.programs = self.lost = 0
        self.since = 0.0

    def __lt__(self, other: Closure) -> bool:
        return self.number < other.number


class Kind:
    """Closures that the same workers can take, under the same conditions; oldest first."""

    def __init__(self, pool: Pool, dataset: str | None, pushes: bool) -> None:
        self.pool = pool
        self.dataset = dataset
        self._pushes = pushes
        self._queue: deque[Closure] = deque()
        self._again: list[Closure] = []  # A heap: started before, so they go first.

    def __bool__(self) -> bool:
        return bool(self._queue or self._again)

    def put(self, closure: Closure) -> None:
        """Add one, at the place that its age gives it."""
        if closure.started:
            heapq.heappush(self._again, closure)
        else:
            self._queue.append(closure)

    def head(self, may_start: Callable[[Closure], bool]) -> Closure | None:
        """The next one; None where there is none, or it may not start."""
        again, queue = self._again, self._queue
        while again and again[0].phase is not Phase.QUEUED:
            heapq.heappop(again)
        if again:
            return again[0]
        while queue and queue[0].phase is not Phase.QUEUED:
            queue.popleft()
        return queue[0] if queue and (not self._pushes or may_start(queue[0])) else None

    def pop(self) -> None:
        """Remove what `head` has just said."""
        if self._again:
            heapq.heappop(self._again)
        else:
            self._queue.popleft()

    def waiting(self) -> list[Closure]:
        """All of them, the oldest first."""
        every = dict.fromkeys((*sorted(self._again), *self._queue))
        return [each for each in every if each.phase is Phase.QUEUED]


class Queue:
    """All closures that wait for a worker. A few kinds; O(kinds) for each operation.

    Attributes:
        length: how many were never handed out.
    """

    def __init__(self, workers: Workers) -> None:
        self.length = 0
        self._workers = workers
        self._kinds: dict[tuple[frozenset[str], str | None, bool], Kind] = {}
        self._needy = 0  # Kinds that need an iterator.

    def put(self, closure: Closure) -> None:
        """A closure waits for a worker."""
        closure.phase, closure.programs = Phase.QUEUED, 0
        if not closure.started:
            self.length += 1
        key = (closure.needs, closure.dataset, closure.pushes)
        kind = self._kinds.get(key)
        if kind is None:
            kind = Kind(self._workers.pool(closure.needs), closure.dataset, closure.pushes)
            self._kinds[key] = kind
            self._needy += bool(closure.needs)
        kind.put(closure)

    def withdraw(self, closure: Closure, phase: Phase) -> None:
        """A closure waits no more; it stays where it is until its turn, and is skipped then."""
        if closure.phase is Phase.QUEUED and not closure.started:
            self.length -= 1
        closure.phase = phase

    def next(self, may_start: Callable[[Closure], bool]) -> tuple[Closure, Worker, bool] | None:
        """The oldest closure that a worker can take now, that worker, and whether it is new."""
        best: tuple[Closure, Worker, Kind] | None = None
        empty = None
        for key, kind in self._kinds.items():
            worker = kind.pool.least()
            if not kind:
                empty = key
            if worker is None:
                continue
            head = kind.head(may_start)
            if head is not None and (best is None or head.number < best[0].number):
                best = head, worker, kind
        if empty is not None:
            del self._kinds[empty]
            self._needy -= bool(empty[0])
        if best is None:
            return None
        closure, worker, kind = best
        kind.pop()
        first = not closure.started
        self.length -= first
        closure.started, closure.phase = True, Phase.FLYING
        return closure, worker, first

    def without_data(self) -> Iterator[Closure]:
        """Closures that need an iterator which has ended on every worker that is there."""
        if self._needy and self._workers.active:
            for kind in self._kinds.values():
                if kind.pool.needs and not len(kind.pool):
                    yield from kind.waiting()

    def unstarted(self, dataset: str) -> list[Closure]:
        """Closures that wait for a first batch of a dataset."""
        kinds: Iterable[Kind] = self._kinds.values()
        mine = [each for kind in kinds if kind.dataset == dataset for each in kind.waiting()]
        return [closure for closure in mine if not closure.started]

    def drop(self, iterator: str) -> None:
        """No closure will need an iterator any more."""
        for key in [key for key in self._kinds if iterator in key[0]]:
            del self._kinds[key]
            self._needy -= 1
