"""Who executes which closure when, and what follows from all that can happen to a job.

Pure: events in (methods), instructions out (lists, to be carried out in order). No clock, no IO, no
threads, no JAX; `coordinator/dispatcher.py` feeds it, from one thread at a time.

Rules of scheduling and errors are TF's (`ClusterCoordinator`): any free worker takes the next
closure; the first error is kept, and the next `schedule`, `join` or `done` raises it, once, after
what is in flight was cancelled and waited for. Beyond TF: a closure keeps its number over losses
of workers and is counted once, batches are leased, a lost server pauses the job, and how stale a
push may be can be bounded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from stratagem.coordinator.answers import Answers
from stratagem.coordinator.closures import Closure, Phase
from stratagem.coordinator.flights import Question
from stratagem.coordinator.instructions import (
    Answer,
    Go,
    Instruction,
    NotDone,
    Raise,
    Wait,
    Warn,
)
from stratagem.coordinator.leases import Leases
from stratagem.coordinator.terms import Terms as Terms
from stratagem.coordinator.workers import Worker
from stratagem.errors import PeerTimeoutError


class State(Answers):
    """The state of one job's coordination.

    Args:
        now: the time that it begins; all times are of one monotonic clock, in seconds.
        resumed: what the journal of the same job says is finished.
    """

    # What can be read.

    @property
    def below(self) -> int:
        """All tokens below this one are finished; servers need not remember them."""
        return self._done.below

    @property
    def unfinished(self) -> int:
        """How many closures are queued, in flight, or staged for a round."""
        return len(self._closures)

    @property
    def share(self) -> float:
        """The part of a round that one closure is; 1 where there are no rounds."""
        return 1.0 if self._rounds is None else 1.0 / self._rounds.size

    @property
    def paused(self) -> bool:
        """Whether a lost server keeps closures from being dispatched."""
        return self._servers.paused

    @property
    def lost_pushes(self) -> int:
        """How many pushes, to one server each, were lost with servers; at most, where unsure."""
        return self._servers.lost_pushes

    # The user's program.

    def ask(self, question: Question, now: float) -> tuple[Answer, list[Instruction]]:
        """Whether a caller of `schedule`, `join` or `done` may go on.

        Returns:
            `Go`; `Raise`, once for each error, when nothing is in flight any more; `Wait`: ask
            again after the next `Wake`; for `"done"` also `NotDone`. A full queue is a `Wait` of
            `"schedule"`.
        """
        answer: Answer = Go()
        if self._error is not None:
            if not self._cancelling:
                self._cancel_all(now)
            out = self._end(now)
            if self._closures:
                self._asking.add(question)
                return Wait(), out
            error, self._error, self._cancelling = self._error, None, False
            return Raise(error), out
        self._flush = question != "schedule"
        out = self._end(now)
        if question == "schedule":
            if self._queue.length >= self.terms.queue_limit:
                answer = Wait()
        elif self._closures:
            answer = Wait() if question == "join" else NotDone()
        if isinstance(answer, Wait):
            self._asking.add(question)
        return answer, out

    def schedule(
        self,
        now: float,
        iterators: Iterable[str] = (),
        dataset: str | None = None,
        pushes: bool = True,
        parts: int = 0,
        what: str = "",
    ) -> tuple[int, list[Instruction]]:
        """A closure is to be executed; only after `ask("schedule")` has said `Go`.

        Args:
            iterators: per-worker iterators that it reads.
            dataset: accounted dataset that it takes a batch of.
            pushes: whether it may change variables. One that does not is never held back by
                the rule of consistency, and never dropped.
            parts: how many closures, which follow each other, make its round: the parts of one
                batch, whoever computes them; 0: as many as there are workers then.
            what: the function that it calls, for texts.

        Returns:
            its number, and instructions.

        Raises:
            RuntimeError: nobody has asked, and the queue is full or an error waits to be raised.
            ValueError: there is no such dataset.
        """
        if self._error is not None or self._queue.length >= self.terms.queue_limit:
            raise RuntimeError(
                "Expected the state to be asked before a closure is scheduled. Got one while an "
                "error waits to be raised, or the queue is full. Call ask('schedule') first"
            )
        if dataset is not None and dataset not in self._data:
            known = ", ".join(map(repr, self._data)) or "none"
            raise ValueError(
                f"Expected an accounted dataset of this job. Got {dataset!r}; there are: {known}. "
                "Make it with the coordinator that schedules, and keep a reference to it"
            )
        number, self._next = self._next, self._next + 1
        self._flush = False
        closure = Closure(number, frozenset(iterators), dataset, pushes, parts, what)
        self._closures[number] = closure
        self._iterators.need(closure.needs)
        self._queue.put(closure)
        return number, self._end(now)

    # Data.

    def add_dataset(self, key: str, now: float) -> list[Instruction]:
        """A dataset whose batches are accounted for; one that the journal knows goes on."""
        if key in self._data:
            raise ValueError(
                f"Expected a new key for an accounted dataset. Got {key!r}, which there is "
                "already. Release that one first, or number the epochs in the keys"
            )
        known = self._resumed.pop(key, None)
        self._data[key] = Leases() if known is None else Leases(known.done, known.open)
        return self._end(now)

    def release_dataset(self, key: str, now: float) -> list[Instruction]:
        """The program has let go of a dataset; closures that wait for it have ended."""
        leases = self._data.pop(key, None)
        known = self._resumed.pop(key, None)
        tokens = leases.free_tokens() if leases else list(known.open.values()) if known else []
        for token in tokens:
            self._done.add(token)
        for closure in self._queue.unstarted(key):
            self._ended(closure)
        return self._end(now)

    def release_iterator(self, key: str, now: float) -> list[Instruction]:
        """The program has let go of a per-worker iterator; `Forget` when no closure needs it."""
        self._forget_iterators(self._iterators.release(key))
        return self._end(now)

    # Workers.

    def add_worker(self, name: str, where: str, now: float) -> list[Instruction]:
        """A worker belongs to the job; `where` it is, as texts say it."""
        worker = self._workers.add(name, where)
        worker.removed = False
        self._workers.gone.discard(name)
        self._workers.place(worker)
        return self._end(now)

    def remove_worker(self, name: str, now: float) -> list[Instruction]:
        """A worker leaves the job when it has answered what it has: then comes `Released`."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.removed = True
            self._workers.place(worker)
            self._release(worker)
        return self._end(now)

    def worker_up(self, name: str, incarnation: str | int, now: float) -> list[Instruction]:
        """A worker is there, for the first time or again; another incarnation knows nothing."""
        if name in self._workers.gone:  # it was removed before it had come
            return self._end(now)
        worker = self._workers.add(name)
        if worker.up and worker.incarnation != incarnation:
            self._lose(worker, "it was started again")
        if worker.incarnation != incarnation:
            worker.ended.clear()
        worker.up, worker.incarnation = True, incarnation
        self._workers.place(worker)
        return self._end(now)

    def worker_down(
        self, name: str, why: str, now: float, incarnation: str | int | None = None
    ) -> list[Instruction]:
        """A worker is lost. `incarnation`: of which that is known; None: of the present one."""
        worker = self._workers.get(name)
        if worker is not None and incarnation in (None, worker.incarnation):
            self._lose(worker, why)
        return self._end(now)

    def _lose(self, worker: Worker, why: str) -> None:
        worker.up, worker.why = False, why
        held, worker.held = worker.held, {}
        self._workers.place(worker)
        for number in held:
            closure = self._closures.get(number)
            if closure is None or worker.name not in closure.holders:
                continue
            closure.holders.remove(worker.name)
            closure.doubtful.discard(worker.name)
            if not closure.holders:
                closure.lost += 1
                self._put_back(closure)
        self._release(worker)

    # Servers.

    def add_server(self, name: str, where: str, now: float) -> list[Instruction]:
        """A parameter server belongs to the job; `where` it is, as texts say it."""
        self._servers.add(name, where)
        return self._end(now)

    def server_up(
        self, name: str, incarnation: str | int, ready: bool, now: float
    ) -> list[Instruction]:
        """A server is there. `ready`: whether it has content, and not just started empty."""
        return self._servers_said(
            lambda: self._servers.up(name, incarnation, ready, now, self._flying()), now
        )

    def server_down(self, name: str, why: str, now: float) -> list[Instruction]:
        """A server is lost or out of reach: nothing is dispatched until it is back."""
        return self._servers_said(lambda: self._servers.down(name, why, now, self._flying()), now)

    def restored(self, name: str, now: float, lost: int | None = None) -> list[Instruction]:
        """A server has its content again. `lost`: pushes that are missing; None: not known."""
        return self._servers_said(lambda: self._servers.restored(name, now, lost), now)

    def snapshot_written(self, number: int, now: float) -> list[Instruction]:
        """All servers have written a snapshot."""
        self._servers.written(number)
        return self._end(now)

    def snapshot_failed(self, number: int, why: str, now: float) -> list[Instruction]:
        """Not all servers have written a snapshot."""
        self._out += self._servers.failed(number, why)
        return self._end(now)

    def committed(self, number: int, now: float) -> list[Instruction]:
        """All servers have applied the gradients of a round."""
        for closure, rows in self._rounds.committed(number) if self._rounds else ():
            self._count(self._closures[closure], rows, dropped=False)
        return self._end(now)

    def lacks(self, number: int, now: float) -> list[Instruction]:
        """A server has not applied a round, as it lacks gradients of it: they come once more."""
        if self._rounds is not None and number == self._rounds.number:
            self._unstage(self._rounds)
        return self._end(now)

    def _flying(self) -> int:
        return sum(each.phase is Phase.FLYING and each.pushes for each in self._closures.values())

    def _servers_said(self, say: Callable[[], list[Instruction]], now: float) -> list[Instruction]:
        losses = self._servers.losses
        self._out += say()
        if self._rounds is not None and self._servers.losses != losses:
            self._unstage(self._rounds)
        return self._end(now)

    # Time.

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: deadlines, repetitions, snapshots, warnings. At least every second."""
        while self._later and self._later[0][0] <= now:
            closure = self._closures.get(heapq.heappop(self._later)[1])
            if closure is not None and closure.phase is Phase.WAITING:
                self._put_back(closure)
        for number in [each for each, until in self._stopping.items() if until <= now]:
            closure = self._closures[number]
            self._out.append(
                Warn(
                    f"Expected cancelled closure {number} to be answered within "
                    f"{self.terms.cancel_seconds:g} s. Got no answer from "
                    f"{' and '.join(closure.holders)}. It counts as cancelled; what it pushes "
                    "from now on is refused"
                )
            )
            closure.holders.clear()
            self._drop(closure)
        instructions, wrong = self._servers.tick(now)
        self._out += instructions
        wrong = wrong or self._without_workers(now)
        if wrong:
            self._keep(PeerTimeoutError(wrong))
        self._recall()
        if now - self._warned >= self.terms.warn_seconds:
            self._warned = now
            self._warn(now)
        return self._end(now)

    def _without_workers(self, now: float) -> str:
        if self._workers.active or not self._closures or self._error is not None:
            self._starving = None
            return ""
        if self._starving is None:
            self._starving = now
        if now - self._starving < self.terms.worker_seconds:
            return ""
        self._starving = None
        return (
            f"Expected a worker for {len(self._closures)} closures within "
            f"{self.terms.worker_seconds:g} s. Got none ({self._workers.missing()}). Start "
            "workers at these addresses, or add others; then schedule again"
        )

    def _warn(self, now: float) -> None:
        """Tell the user what has been waited for, for long."""
        if self._starving is not None:
            waited = now - self._starving
            self._out.append(
                Warn(
                    f"{len(self._closures)} closures have waited for a worker for {waited:.0f} s "
                    f"({self._workers.missing()}); after {self.terms.worker_seconds:g} s that is "
                    "an error"
                )
            )
        seconds = self.terms.warn_seconds
        slow = [
            (since, number, worker)
            for worker in self._workers
            for number, since in list(worker.held.items())[:1]
            if now - since >= seconds
        ]
        if slow:
            since, number, worker = min(slow, key=lambda each: each[0])
            more = f", and {len(slow) - 1} other workers are as slow" if slow[1:] else ""
            closure = self._closures.get(number)
            what = f"closure {number}" if closure is None else closure.what
            why = "that it computes so long"
            if closure is not None and closure.needs:
                why = "that it waits for its iterator, whose dataset gives no next element"
            self._out.append(
                Warn(
                    f"{worker} has had {what} in hand for {now - since:.0f} s{more}. Nothing ends "
                    f"a step but itself; it may be {why}: look at that worker's log"
                )
            )
