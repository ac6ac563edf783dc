"""A job of equal workers event by event: who waits for what, and until when.

Every resource serves in the order of arrival; a message that passes two networks goes through both
at once.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from stratagem.coordinator.consistency import Consistency, Synchronous
from stratagem.coordinator.instructions import (
    Cancel,
    Commit,
    Counted,
    Dispatch,
    Go,
    Instruction,
    Resolve,
)
from stratagem.coordinator.state import State
from stratagem.coordinator.terms import AHEAD_SECONDS, Terms
from stratagem.planning.machines import Serving
from stratagem.planning.servers import (
    COORDINATOR,
    CPU,
    ENCRYPTION,
    NETWORK_IN,
    NETWORK_OUT,
    Costs,
    Exchange,
)

AHEAD = 4  # closures that wait for each worker, as in `fit`
SERVERS = 4  # that are simulated one by one: the busiest; others are as fast as these or faster
_TICK_SECONDS = 0.25  # as the coordinator looks at its state
_STALLED = 100_000  # ticks without anything else


@dataclass
class Line:
    """A resource that does one thing after the other; `busy`: seconds so far."""

    free: float = 0.0
    busy: float = 0.0

    def take(self, now: float, seconds: float) -> float:
        """Does something as soon as it can; gives the time when that is done."""
        self.free = max(self.free, now) + seconds
        self.busy += seconds
        return self.free

    def follow(self, done: float, seconds: float) -> float:
        """Passes on what comes out of another line until `done`, as it comes."""
        return max(done, self.take(done - seconds, seconds))


@dataclass(eq=False)
class _Server:
    number: int
    costs: Exchange
    cpu: Line = field(default_factory=Line)
    out: Line = field(default_factory=Line)
    into: Line = field(default_factory=Line)
    cipher: Line = field(default_factory=Line)
    version: int = 0


@dataclass
class _Worker:
    name: str
    inbox: deque[Dispatch] = field(default_factory=deque)
    cancelled: set[int] = field(default_factory=set)
    at_work: bool = False
    out: Line = field(default_factory=Line)
    into: Line = field(default_factory=Line)
    cipher: Line = field(default_factory=Line)
    free_since: float = 0.0


@dataclass(eq=False)
class _Task:
    """A closure on a worker, and how long its parts took."""

    worker: _Worker
    dispatch: Dispatch
    pulled: list[int] = field(default_factory=list)
    staleness: int = 0
    left: int = 0
    times: list[float] = field(default_factory=list)


def terms(rule: Consistency) -> Terms:
    """What the coordinator of a job may do, without snapshots, which are not in the model."""
    return Terms(consistency=rule, snapshot_seconds=math.inf, ahead=AHEAD_SECONDS)


class Job:
    """The events of a job, in order.

    Args:
        costs: of a step.
        workers: how many.
        rule: of consistency.
        jitter: standard deviation of the time of computing, of its mean.
        random: where it comes from.

    Attributes:
        counted: closures whose effects are in the variables.
        dropped: those whose gradients came too late for their round.
        times: of each closure: waiting, pull, compute, push.
    """

    def __init__(
        self, costs: Costs, workers: int, rule: Consistency, jitter: float, random: Random
    ) -> None:
        self._costs, self._serving = costs, costs.serving
        self._shape = 1 / jitter**2 if jitter else 0.0
        self._random = random
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._others = 0  # events besides ticks
        self._state = State(terms(rule), 0.0)
        self._hybrid = isinstance(rule, Synchronous) and rule.hybrid
        self._coordinator = Line()
        # By its slowest server a step is bound; of the others only what reaches the worker matters.
        busiest = sorted(costs.exchanges, key=lambda e: -_load(e, costs.serving))[:SERVERS]
        self._servers = [_Server(i, exchange) for i, exchange in enumerate(busiest)]
        self._more = len(costs.exchanges) / max(1, len(busiest))
        self._more_in = _sum(e.pulled for e in costs.exchanges) / _sum(e.pulled for e in busiest)
        self._more_out = _sum(e.pushed for e in costs.exchanges) / _sum(e.pushed for e in busiest)
        self._workers = {f"worker {i}": _Worker(f"worker {i}") for i in range(workers)}
        self._applied: set[tuple[int, int]] = set()  # server and token
        self._most = AHEAD * workers
        self.counted = self.dropped = 0
        self.times: list[list[float]] = []

    def start(self) -> None:
        """The workers are there, and closures are scheduled."""
        for name in self._workers:
            self._obey(self._state.add_worker(name, "", 0.0), 0.0)
            self._obey(self._state.worker_up(name, 1, 0.0), 0.0)
        self._at(_TICK_SECONDS, self._tick, tick=True)
        self._schedule(0.0)

    @property
    def histogram(self) -> Counter[int]:
        """How many pushes had which staleness so far."""
        return Counter(self._state.staleness.histogram)

    def lines(self) -> dict[str, list[Line]]:
        """The resources that all share, by kind."""
        return {
            CPU: [s.cpu for s in self._servers],
            NETWORK_OUT: [s.out for s in self._servers],
            NETWORK_IN: [s.into for s in self._servers],
            ENCRYPTION: [s.cipher for s in self._servers],
            COORDINATOR: [self._coordinator],
        }

    def until(self, count: int) -> float:
        """Lets events happen until so many closures are done; gives the time."""
        now, idle = 0.0, 0
        while self.counted + self.dropped < count:
            idle = 0 if self._others else idle + 1
            if idle > _STALLED:
                raise RuntimeError(
                    f"Expected {count} closures to be done. Got {self.counted}, and nothing that "
                    "goes on. This is an error of the simulation; report it."
                )
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        return now

    def _at(self, when: float, happens: Callable[[float], None], tick: bool = False) -> None:
        def counted(now: float) -> None:
            self._others -= 1
            happens(now)

        self._others += not tick
        heapq.heappush(self._events, (when, next(self._order), happens if tick else counted))

    # The coordinator.

    def _tick(self, now: float) -> None:
        self._obey(self._state.tick(now), now)
        self._at(now + _TICK_SECONDS, self._tick, tick=True)

    def _schedule(self, now: float) -> None:
        while self._state.unfinished < self._most:
            answer, found = self._state.ask("schedule", now)
            self._obey(found, now)
            if not isinstance(answer, Go):
                return
            self._obey(self._state.schedule(now)[1], now)

    def _obey(self, found: Iterable[Instruction], now: float) -> None:
        for each in found:
            match each:
                case Dispatch():
                    self._dispatch(each, now)
                case Cancel():
                    self._workers[each.worker].cancelled.add(each.closure)
                case Commit():
                    self._commit(each, now)
                case Counted():
                    self.counted += not each.dropped
                    self.dropped += each.dropped
                case Resolve():
                    self._at(now, self._schedule)
                case _:
                    pass  # Nothing of it takes time.

    def _dispatch(self, what: Dispatch, now: float) -> None:
        s = self._serving
        sent = self._coordinator.take(now, self._costs.dispatch / 2)
        arrives = sent + s.latency + self._costs.sent / s.stream
        worker = self._workers[what.worker]

        def got(now: float) -> None:
            worker.inbox.append(what)
            self._next(worker, now)

        self._at(arrives, got)

    def _commit(self, what: Commit, now: float) -> None:
        """All servers apply what was staged; the coordinator's thread waits for them."""
        s, left = self._serving, len(self._servers)
        start = self._coordinator.take(now, left * self._more * s.message)

        def applied(server: _Server, now: float) -> None:
            nonlocal left
            server.version += 1
            left -= 1
            if not left:
                back = now + s.latency
                self._coordinator.free = max(self._coordinator.free, back)
                self._at(back, lambda now: self._obey(self._state.committed(what.round, now), now))

        def arrived(server: _Server, now: float) -> None:
            at_once = self._hybrid and server.costs.by_row
            done = server.cpu.take(now, s.message if at_once else server.costs.push)
            self._at(done, functools.partial(applied, server))

        for server in self._servers:
            self._at(start + s.latency, functools.partial(arrived, server))

    # Workers and servers.

    def _next(self, worker: _Worker, now: float) -> None:
        if worker.at_work or not worker.inbox:
            return
        dispatch = worker.inbox.popleft()
        if dispatch.closure in worker.cancelled:
            worker.cancelled.discard(dispatch.closure)
            self._answer(worker, dispatch, "aborted", None, now)
            self._next(worker, now)
            return
        worker.at_work = True
        task = _Task(worker, dispatch)
        task.times.append(now - worker.free_since)
        task.pulled = [0] * len(self._servers)
        self._ask(task, now, [s for s in self._servers if s.costs.pull], self._pull, self._compute)

    def _ask(
        self,
        task: _Task,
        now: float,
        servers: Sequence[_Server],
        each: Callable[[_Task, _Server, float, Callable[[float], None]], None],
        then: Callable[[_Task, float], None],
    ) -> None:
        """Asks several servers at once; `then`, when all have answered."""
        task.left, began = len(servers), now

        def joined(now: float) -> None:
            task.left -= 1
            if task.left <= 0:
                task.times.append(now - began)
                then(task, now)

        if not servers:
            joined(now)
        for position, server in enumerate(servers, 1):
            each(task, server, now + position * self._more * self._serving.message, joined)

    def _pull(
        self, task: _Task, server: _Server, sent: float, joined: Callable[[float], None]
    ) -> None:
        worker, s = task.worker, self._serving
        costs = server.costs

        def arrived(now: float) -> None:
            done = server.cpu.take(now, costs.pull)
            self._at(done, answered)

        def answered(now: float) -> None:
            task.pulled[server.number] = server.version
            left = server.out.take(now, costs.pulled / s.bandwidth)
            left = max(left, server.cipher.take(now, (costs.asked + costs.pulled) / s.encrypt))
            left = max(left, now + costs.pulled / s.stream)
            self._at(left, received)

        def received(now: float) -> None:
            nbytes = self._more_in * costs.pulled
            got = worker.into.follow(now, nbytes / s.bandwidth)
            got = max(got, worker.cipher.follow(now, nbytes / s.encrypt))
            self._at(got + s.latency, joined)

        self._at(sent + s.latency + costs.asked / s.stream, arrived)

    def _compute(self, task: _Task, now: float) -> None:
        seconds = self._costs.compute
        if self._shape:
            seconds *= self._random.gammavariate(self._shape, 1 / self._shape)
        task.times.append(seconds)
        pushed = [s for s in self._servers if s.costs.push]
        self._at(now + seconds, lambda now: self._ask(task, now, pushed, self._push, self._done))

    def _push(
        self, task: _Task, server: _Server, sent: float, joined: Callable[[float], None]
    ) -> None:
        worker, s = task.worker, self._serving
        costs, token = server.costs, task.dispatch.token
        staged = task.dispatch.round is not None and not (self._hybrid and costs.by_row)

        def arrived(now: float) -> None:
            got = server.into.follow(now, costs.pushed / s.bandwidth)
            got = max(got, server.cipher.follow(now, costs.pushed / s.encrypt))
            self._at(got, began)

        def began(now: float) -> None:
            seconds = s.message + costs.pushed / s.copy if staged else costs.push
            self._at(server.cpu.take(now, seconds), applied)

        def applied(now: float) -> None:
            task.staleness = max(task.staleness, server.version - task.pulled[server.number])
            if not staged and (server.number, token) not in self._applied:
                self._applied.add((server.number, token))
                server.version += 1
            self._at(now + s.latency, joined)

        nbytes = self._more_out * costs.pushed
        left = worker.out.take(sent, nbytes / s.bandwidth)
        left = max(left, worker.cipher.take(sent, nbytes / s.encrypt))
        self._at(max(left, sent + costs.pushed / s.stream) + s.latency, arrived)

    def _done(self, task: _Task, now: float) -> None:
        worker = task.worker
        worker.at_work, worker.free_since = False, now
        self.times.append(task.times)
        staleness = task.staleness if any(s.costs.push for s in self._servers) else None
        self._answer(worker, task.dispatch, "ok", staleness, now)
        self._next(worker, now)

    def _answer(
        self, worker: _Worker, what: Dispatch, outcome: str, staleness: int | None, now: float
    ) -> None:
        s = self._serving

        def heard(now: float) -> None:
            self._at(self._coordinator.take(now, self._costs.dispatch / 2), told)

        def told(now: float) -> None:
            self._obey(
                self._state.finished(
                    worker.name, 1, what.closure, outcome, now,  # type: ignore[arg-type]
                    staleness=staleness, rows=1,
                ),
                now,
            )  # fmt: skip

        self._at(now + s.latency + self._costs.returned / s.stream, heard)


def _load(exchange: Exchange, s: Serving) -> float:
    """How long a step keeps the busiest resource of a server busy."""
    nbytes = exchange.asked + exchange.pulled + exchange.pushed
    return max(exchange.pull + exchange.push, nbytes / s.encrypt, nbytes / s.bandwidth)


def _sum(sizes: Iterable[float]) -> float:
    """Bytes; 1 where there are none, so that they can be compared."""
    return sum(sizes) or 1.0
