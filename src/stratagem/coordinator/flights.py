"""The life of closures: from the queue to a worker, to what counts. Pure."""

from __future__ import annotations

from typing import Any, Literal

from stratagem.coordinator.closures import Closure, Phase, Queue
from stratagem.coordinator.consistency import Bounded, Rounds, Synchronous, Window
from stratagem.coordinator.instructions import (
    Cancel,
    Counted,
    Dispatch,
    Forget,
    Instruction,
    Lease,
    Released,
    Resolution,
    Resolve,
    Wake,
    Warn,
)
from stratagem.coordinator.iterators import Iterators
from stratagem.coordinator.leases import Leases
from stratagem.coordinator.progress import Progress
from stratagem.coordinator.servers import Servers
from stratagem.coordinator.statistics import Counts, Staleness
from stratagem.coordinator.terms import Terms
from stratagem.coordinator.watermark import Watermark
from stratagem.coordinator.workers import Worker, Workers

Question = Literal["schedule", "join", "done"]


class Flights:
    """What is queued, in flight and staged: handing out and counting. `State` has the events."""

    def __init__(
        self, terms: Terms | None = None, now: float = 0.0, resumed: Progress | None = None
    ) -> None:
        self.terms = terms = terms or Terms()
        self.counts = Counts()
        self.staleness = Staleness()
        progress = resumed or Progress()
        self._resumed = dict(progress.data)
        self._next = progress.next_token
        reserved = {token for data in progress.data.values() for token in data.open.values()}
        lowest = min(reserved, default=self._next)
        used = (token for token in range(lowest, self._next) if token not in reserved)
        self._done = Watermark(lowest, used)
        self._workers = Workers(terms.depth, terms.short_depth, terms.ahead)
        self._queue = Queue(self._workers)
        self._servers = Servers(
            terms.server_seconds,
            terms.snapshot_seconds,
            terms.snapshot_closures,
            now,
            resumed is not None,
            progress.snapshot,
        )
        self._servers.lost_pushes = progress.lost_pushes
        self._servers.pushes = progress.since
        rule = terms.consistency
        self._window = Window(rule.max_staleness) if isinstance(rule, Bounded) else None
        self._rounds = Rounds(rule.backup, self._next) if isinstance(rule, Synchronous) else None
        self._closures: dict[int, Closure] = {}  # All that are not finished.
        self._data: dict[str, Leases] = {}
        self._iterators = Iterators()
        self._error: BaseException | None = None
        self._broken: Exception | None = None  # Why the job cannot go on.
        self._cancelling = False
        self._flush = False  # The program waits for all: rounds end with what is there.
        self._asking: set[Question] = set()
        self._stopping: dict[int, float] = {}  # Cancelled closures in flight: until when.
        self._later: list[tuple[float, int]] = []  # A heap: when a closure runs again.
        self._starving: float | None = None
        self._warned = now
        self._out: list[Instruction] = []

    def _release(self, worker: Worker) -> None:
        """A worker that was removed goes when it has answered all."""
        if worker.removed and not worker.held:
            self._workers.forget(worker)
            self._out.append(Released(worker.name))

    def _ended(self, closure: Closure) -> None:
        """There are no data for a closure."""
        self._resolve(closure, "ended")
        self._forget(closure)

    def _failed(self, closure: Closure, error: BaseException) -> None:
        if closure.lease is not None and closure.lease.dataset in self._data:
            self._data[closure.lease.dataset].finish(closure.lease.batch)
        if not closure.cancelled:
            self._keep(error)
        self.counts.failed += 1
        self._resolve(closure, "error", error)
        self._forget(closure)

    def _keep(self, error: BaseException) -> None:
        """The first error is kept, for the next that asks."""
        if self._error is None:
            self._error = error

    def server_failed(self, error: Exception, now: float) -> list[Instruction]:
        """A server cannot be restored, or serves another job: whoever schedules or waits from now
        on is told."""
        self._broken = error
        self._recall()
        return self._end(now)

    def _recall(self) -> None:
        if self._broken is not None and self._closures:
            self._keep(self._broken)

    def _stop(self, closure: Closure, now: float) -> None:
        """Nobody needs a closure any more."""
        closure.cancelled = True
        if closure.phase is Phase.FLYING:
            self._stopping[closure.number] = now + self.terms.cancel_seconds
            self._out += [Cancel(holder, closure.number) for holder in closure.holders]
        elif closure.phase is not Phase.STAGED or self._broken is not None:
            self._drop(closure)  # a round that a broken server will never apply ends too

    def _cancel_all(self, now: float) -> None:
        self._cancelling = self._flush = True
        for closure in list(self._closures.values()):
            self._stop(closure, now)

    def _drop(self, closure: Closure) -> None:
        """A cancelled closure ends without an answer; its batch is leased again."""
        lease, bound = closure.lease, None
        if lease is not None and lease.dataset in self._data:
            # What was staged under a token is never applied without its round, and a token of a
            # round that was left is refused.
            bound = None if self._rounds is not None else closure.token
            self._data[lease.dataset].give_back(lease.batch, bound)
        self._resolve(closure, "cancelled")
        self._forget(closure, keep_token=bound is not None)

    def _resolve(self, closure: Closure, outcome: Resolution, result: Any = None) -> None:
        if closure.resolved:
            return
        closure.resolved = True
        if outcome == "cancelled":
            self.counts.cancelled += 1
        elif outcome == "ended":
            self.counts.ended += 1
        self._out.append(Resolve(closure.number, outcome, result))

    def _count(self, closure: Closure, rows: int, dropped: bool) -> None:
        """The effects of a closure are in the variables, or will never be."""
        if dropped:
            self.counts.dropped += 1
            self.counts.dropped_rows += rows
        else:
            self.counts.finished += 1
            self._servers.pushes += closure.pushes
        self._out.append(Counted(closure.token, closure.lease, dropped, closure.pushes))
        lease = closure.lease
        leases = self._data.get(lease.dataset) if lease is not None else None
        if lease is not None and leases is not None:
            leases.finish(lease.batch)
        self._forget(closure)

    def _forget(self, closure: Closure, keep_token: bool = False) -> None:
        number = closure.number
        del self._closures[number]
        self._out += [Cancel(holder, number) for holder in closure.holders]
        self._queue.withdraw(closure, Phase.DONE)
        self._stopping.pop(number, None)
        if self._window is not None:
            self._window.leave(number)
        if self._rounds is not None:
            self._rounds.leave(number)
        if not keep_token:
            self._done.add(closure.token)
        self._forget_iterators(self._iterators.finish(closure.needs))

    def _forget_iterators(self, gone: list[str]) -> None:
        for iterator in gone:
            self._queue.drop(iterator)
            self._workers.release(iterator)
            self._out.append(Forget(iterator))

    # Handing out.

    def _may_start(self, closure: Closure) -> bool:
        if self._window is not None:
            return self._window.may_start()
        return self._rounds is None or self._rounds.may_start(closure.parts or self._workers.active)

    def _dispatch(self, now: float) -> None:
        for closure in list(self._queue.without_data()):
            if closure.lost:
                self._out.append(
                    Warn(
                        f"Closure {closure.number} was on a worker that is lost, and the iterators "
                        "that it reads have ended on all others: it resolves as ended"
                    )
                )
            self._ended(closure)
        if self._servers.paused or self._cancelling:
            return
        while (found := self._queue.next(self._may_start)) is not None:
            self._start(*found, now)
        if not self._queue.length:
            self._help(now)

    def _start(self, closure: Closure, worker: Worker, first: bool, now: float) -> None:
        if not first:
            self._hand(closure, worker, now, fresh=False)
            return
        if closure.dataset is not None:
            leases = self._data.get(closure.dataset)
            if leases is None:
                self._ended(closure)
                return
            batch, closure.token = leases.take(closure.number)
            closure.lease = Lease(closure.dataset, batch)
            if closure.token != closure.number:
                self._done.add(closure.number)
        if closure.pushes and self._window is not None:
            self._window.start(closure.number)
        if closure.pushes and self._rounds is not None:
            self._rounds.start(closure.number, closure.token)
        self._hand(closure, worker, now, fresh=True)

    def _hand(self, closure: Closure, worker: Worker, now: float, fresh: bool) -> None:
        number = closure.number
        worker.held[number] = now
        self._workers.place(worker)
        closure.holders.append(worker.name)
        closure.phase = Phase.FLYING
        rounds = self._rounds
        round_ = None
        if rounds is not None and closure.pushes:
            round_ = rounds.late.get(number, rounds.number)
        token, lease, below = closure.token, closure.lease, self._done.below
        self._out.append(
            Dispatch(worker.name, number, token, lease, round_, fresh, below, worker.together)
        )

    def _help(self, now: float) -> None:
        """Idle workers also execute what waits behind another closure on a busy one.

        Speculative execution (Dean and Ghemawat 2004, "MapReduce", section 3.6): the first answer
        counts. Only where it does not matter which worker it is.
        """
        while (idle := self._workers.any.idle()) and (busy := self._workers.any.busiest()):
            number, since = next(reversed(busy.held.items()))
            closure = self._closures.get(number)
            if now - since < self.terms.patience or closure is None or closure.cancelled:
                return
            if closure.needs or closure.phase is not Phase.FLYING or len(closure.holders) != 1:
                return
            self.counts.helped += 1
            self._out.append(Cancel(busy.name, number))
            self._hand(closure, idle, now, fresh=False)

    # After every event.

    def _end(self, now: float) -> list[Instruction]:
        if self._rounds is not None:
            commit = self._rounds.commit(self._flush and not self._queue.length)
            if commit is not None:
                self._out.append(commit)
        self._dispatch(now)
        if self._asking and any(self._answerable(question) for question in self._asking):
            self._asking.clear()
            self._out.append(Wake())
        out, self._out = self._out, []
        return out

    def _answerable(self, question: Question) -> bool:
        if self._error is not None:
            return not self._cancelling or not self._closures
        if question == "schedule":
            return self._queue.length < self.terms.queue_limit
        return not self._closures
