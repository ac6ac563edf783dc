"""What follows from a worker's answer. Pure."""

from __future__ import annotations

import heapq
from typing import Any

from stratagem.coordinator.closures import Closure, Phase
from stratagem.coordinator.consistency import Rounds
from stratagem.coordinator.flights import Flights
from stratagem.coordinator.instructions import Cancel, Install, Instruction, Outcome
from stratagem.coordinator.workers import Worker
from stratagem.errors import JobMismatchError, PeerTimeoutError

_PROGRAMS = 3  # How often a worker may say that it lacks the program of one closure.
_LONGEST_RETRY = 5.0  # Seconds.


class Answers(Flights):
    """The event that comes most often."""

    def finished(
        self,
        worker: str,
        incarnation: str | int,
        closure: int,
        outcome: Outcome,
        now: float,
        *,
        result: Any = None,
        staleness: int | None = None,
        rows: int = 0,
        iterator: str | None = None,
    ) -> list[Instruction]:
        """A worker has answered a `Dispatch`. May come late, twice, and from one that is lost.

        Args:
            result: the value for `"ok"`, the exception for `"error"`, the reason for `"aborted"`.
            staleness: how many pushes of others came between its pull and its push.
            rows: how many rows its batch had; 0 where that is not known.
            iterator: for `"data-ended"`: the per-worker iterator that has ended on that worker.
        """
        task = self._workers.get(worker)
        here = None  # The worker, where this is its answer to what it has in hand.
        if task is not None and task.up and task.incarnation == incarnation:
            since = task.held.pop(closure, None)
            if since is not None:
                here = task
                self._workers.answered(task, since, now)
                self._release(task)
        known = self._closures.get(closure)
        if known is not None:
            if here is not None and worker in known.holders:
                known.holders.remove(worker)
            else:
                here = None
            doubtful = here is not None and worker in known.doubtful
            if doubtful:
                known.doubtful.remove(worker)
            if outcome == "ok":
                if doubtful:
                    self._resolve(known, "ok", result)
                    self._put_back(known)
                elif here is not None or not known.restaged:
                    self._succeeded(known, result, staleness, rows)
            elif here is not None:
                self._did_not(known, here, outcome, result, iterator, now)
        return self._end(now)

    def _succeeded(self, closure: Closure, result: Any, staleness: int | None, rows: int) -> None:
        if closure.phase is Phase.STAGED:
            return
        if staleness is not None:
            self.staleness.add(staleness)
        for holder in closure.holders:
            self._out.append(Cancel(holder, closure.number))
        closure.holders.clear()
        self._stopping.pop(closure.number, None)
        self._resolve(closure, "ok", result)
        rounds = self._rounds
        if rounds is None or not closure.pushes:
            self._count(closure, rows, dropped=False)
        elif closure.number in rounds.late:
            self._count(closure, rows, dropped=True)
        else:
            rounds.stage(closure.number, rows)
            self._queue.withdraw(closure, Phase.STAGED)

    def _did_not(
        self,
        closure: Closure,
        worker: Worker,
        outcome: Outcome,
        result: Any,
        iterator: str | None,
        now: float,
    ) -> None:
        if outcome == "error":
            self._failed(closure, result)
        elif outcome == "data-ended" and iterator is not None:
            worker.ended.add(iterator)
            self._workers.place(worker)
            self._put_back(closure)
        elif outcome == "needs-program" and not closure.cancelled:
            closure.programs += 1
            if closure.programs > _PROGRAMS:
                text = (
                    f"Expected {worker} to execute closure {closure.number} with the program that "
                    f"it was sent. Got {closure.programs} times that it has none. Look at that "
                    "worker's log; it may have no room to keep programs"
                )
                self._failed(closure, JobMismatchError(text))
            else:
                self._out.append(Install(worker.name, closure.number))
                if self._servers.paused:
                    self._put_back(closure)
                    return
                self._hand(closure, worker, now, fresh=False)
        elif outcome in ("aborted", "needs-program"):
            self._aborted(closure, result, now)
        else:
            raise ValueError(
                f"Expected an outcome of a closure as Outcome lists them. Got {outcome!r} from "
                f"{worker}. Run the same version of Stratagem everywhere"
            )

    def _aborted(self, closure: Closure, why: Any, now: float) -> None:
        """A worker gave it back, because it was told to, or a server was out of reach."""
        if closure.holders or closure.cancelled or self._servers.paused:
            self._put_back(closure)
            return
        since = max(closure.since, self._servers.resumed_at)
        if not closure.aborts or since > closure.since:
            closure.aborts, closure.since = 0, now
        seconds = self.terms.server_seconds
        if closure.aborts and now - closure.since >= seconds:
            text = (
                f"Expected closure {closure.number} to come through within {seconds:g} s. Got it "
                f"back from workers {closure.aborts + 1} times, although no server is known to be "
                f"lost; the last time: {why}. Look at the network between workers and servers"
            )
            self._failed(closure, PeerTimeoutError(text))
            return
        pause = min(self.terms.retry_seconds * 2**closure.aborts, _LONGEST_RETRY)
        closure.aborts += 1
        closure.phase = Phase.WAITING
        heapq.heappush(self._later, (now + pause, closure.number))

    def _put_back(self, closure: Closure) -> None:
        if closure.holders:
            return
        if closure.cancelled:
            self._drop(closure)
        else:
            self.counts.reruns += 1
            self._queue.put(closure)

    def _unstage(self, rounds: Rounds) -> None:
        """A server has lost what was staged in it: the round's gradients are made once more."""
        staged = rounds.unstage()
        for closure in list(self._closures.values()):
            if closure.number in rounds:  # Also one that waits for another worker.
                closure.restaged = True
                closure.doubtful = set(closure.holders)
        for number in staged:
            closure = self._closures[number]
            closure.restaged = True
            closure.phase = Phase.WAITING
            if self._cancelling:
                self._drop(closure)
            else:
                self._put_back(closure)
