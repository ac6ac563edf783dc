"""The thread that owns the connections: carries out what the coordinator's state decides.

Events (a call of `schedule`, a worker's answer, a lost connection, the clock) go to `State`, which
is pure; what it answers are instructions, which this file carries out in order. The user's threads
and this one share the state under one lock; connections are used in this thread alone.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import numpy as np

from stratagem.coordinator import instructions as do
from stratagem.coordinator.crew import Crew
from stratagem.coordinator.flights import Question
from stratagem.coordinator.guard import Guard
from stratagem.coordinator.plans import Plan
from stratagem.coordinator.record import Record
from stratagem.coordinator.replies import error_of
from stratagem.coordinator.scheduled import Scheduled
from stratagem.coordinator.state import State, Terms
from stratagem.coordinator.watermark import Watermark
from stratagem.errors import JobMismatchError, RemoteError
from stratagem.parameter_server.link import Link
from stratagem.transport.message import Message

_TICK_SECONDS = 0.25
_LOOK_SECONDS = 1.0  # after which a thread that waits asks again, come what may
_STOP_SECONDS = 5.0
_GONE_SECONDS = 2.0  # after which who is silent is not waited for at the end

_log = logging.getLogger("stratagem")


class Dispatcher:
    """Runs closures on workers. Coordinator only.

    Args:
        link: to the parameter servers; its thread does all the work.
        workers: name and address of each, by index.
        terms: what the user allows.
        setup: what a worker is told first.
        staged: for a plan, the updates that wait for the commit of a round; None for all.
        told: what each server said of itself, see `Servers.hello`.
        record: where it is noted what is finished; None: nowhere.

    Attributes:
        let_go: numbers of iterators that the program has no more. A finalizer may append to it, at
            any moment in any thread, so that takes no lock; the hub's thread looks at each tick.
    """

    def __init__(
        self,
        link: Link,
        workers: Sequence[tuple[str, str]],
        terms: Terms,
        setup: dict[str, Any],
        staged: Callable[[Plan], list[Any] | None],
        told: list[dict[str, Any]],
        record: Record | None = None,
    ):
        self._link, self._staged = link, staged
        self._changed = threading.Condition()
        self._record = record
        resumed = None if record is None else record.resumed
        self._state = State(terms, time.monotonic(), resumed)
        self._lost = self._state.lost_pushes
        self._todo: deque[do.Instruction] = deque()
        self._closed = False
        self._watching = 0  # threads that wait for something to be carried out
        self.let_go: deque[int] = deque()
        self._closures: dict[int, Scheduled] = {}
        self._again: dict[int, Scheduled] = {}  # that have a result, and may have to run again
        self._batches: dict[tuple[str, int], Scheduled] = {}
        self._tracer = ThreadPoolExecutor(1, "stratagem-tracer")
        self._handlers: dict[type, Callable[[Any], None]] = {
            do.Dispatch: self._dispatch,
            do.Install: lambda i: None,  # `_dispatch` sends what a worker lacks
            do.Cancel: lambda i: self._crew.cancel(i.worker, i.closure),
            do.Commit: lambda i: self._guard.commit(i),
            do.Restore: lambda i: self._guard.restore(i),
            do.Snapshot: lambda i: self._guard.snapshot(i),
            do.Pause: lambda i: _log.warning("Training pauses: %s", i.why),
            do.Resume: lambda i: _log.warning("Training goes on."),
            do.Released: lambda i: self._crew.release(i.worker),
            do.Forget: lambda i: self._crew.forget(int(i.iterator)),
            do.Resolve: self._resolve,
            do.Counted: self._counted,
            do.Wake: lambda i: self._wake(),
            do.Warn: lambda i: _log.warning("%s", i.text),
        }
        self._crew = Crew(setup, self._event)
        self._guard = Guard(link, told, self._event)
        link.thread.do(self._guard.connect, "servers to be connected", 30)
        now = time.monotonic()
        for name, where in workers:
            self._add(self._state.add_worker(name, where, now))
        for peer, said in zip(link.servers.peers, told, strict=True):
            self._add(self._state.add_server(peer.name, peer.address, now))
            self._add(self._state.server_up(peer.name, said["incarnation"], said["ready"], now))
        link.thread.do(lambda hub: self._crew.connect(hub, workers), "workers to be connected", 30)
        link.thread.each(_TICK_SECONDS, self._tick)

    # The user's threads.

    def ask(self, what: Question) -> bool:
        """Waits until the program may "schedule" or has joined; or says whether all is "done".

        Raises:
            Exception: the first error of a closure since the last that was raised.
            RuntimeError: the strategy was closed.
        """
        with self._changed:
            while True:
                answer = self._asked(what)
                if isinstance(answer, do.Wait):
                    self._changed.wait(_LOOK_SECONDS)
                elif what == "schedule" or not (isinstance(answer, do.Go) and self._todo):
                    return isinstance(answer, do.Go)
                elif what == "done":
                    return False  # the last results are not handed over yet
                else:
                    self._wait_for_results()

    def schedule(self, closure: Scheduled, most: int | None = None) -> None:
        """Hands a closure over. As `ask`, it raises the error of an earlier one.

        Args:
            closure: to be run once.
            most: waits until fewer closures than this are unfinished.
        """
        if closure.counts and self._link.unkept:
            self._link.keep()
        with self._changed:
            while True:
                if isinstance(self._asked("schedule"), do.Wait):
                    self._changed.wait(_LOOK_SECONDS)
                elif most is not None and len(self._closures) >= most:
                    self._wait_for_results()
                else:
                    break
            batch = closure.batch
            number, found = self._state.schedule(
                time.monotonic(), closure.needs, None if batch is None else batch[0],
                closure.counts, closure.parts, closure.family.where,
            )  # fmt: skip
            self._closures[number] = closure
            if batch is not None:
                self._batches[batch] = closure
            if self._record is not None:
                self._record.used(number)
            self._add(found)

    def begin_data(self, key: str) -> Watermark:
        """Batches of a dataset are accounted for, with a record; gives those that are finished."""
        with self._changed:
            self._check_open()
            self._add(self._state.add_dataset(key, time.monotonic()))
        return Watermark() if self._record is None else self._record.begin(key)

    def end_data(self, key: str) -> None:
        """All of a dataset is done, or nobody needs it any more."""
        with self._changed:
            self._add(self._state.release_dataset(key, time.monotonic()))
            for batch in list(self._batches):  # what is left is of closures that did not count
                if batch[0] == key:
                    self._batches.pop(batch, None)
        if self._record is not None:
            self._record.release(key)

    def open_iterator(self, number: int, pickled: bytes, seconds: float) -> Any:
        """Has each worker open a per-worker iterator; gives the shapes of its first element.

        Raises:
            PeerTimeoutError: no worker could say in time.
            StopIteration: there is no element.
        """
        opens = lambda hub: self._crew.open_iterator(number, pickled)  # noqa: E731
        self._link.thread.do(opens, "a dataset to be opened", 30)
        try:
            return self._crew.opened(number, seconds)
        except BaseException:
            self.let_go.append(number)
            raise

    @property
    def staleness(self) -> Any:
        """Of the pushes so far: how many others were applied between pull and push."""
        with self._changed:
            return copy.deepcopy(self._state.staleness)

    @property
    def counts(self) -> Any:
        """How many closures finished, failed, ran again."""
        with self._changed:
            return copy.copy(self._state.counts)

    @property
    def lost_pushes(self) -> int:
        """How many pushes, to one server each, were lost with servers; at most, where unsure."""
        with self._changed:
            return self._state.lost_pushes

    def add_worker(self, name: str, address: str) -> None:
        """A further worker takes part as soon as it is there."""
        self._link.thread.do(lambda hub: self._crew.add(name, address), "a worker to connect", 30)
        self._event(lambda s, now: s.add_worker(name, address, now))

    def remove_worker(self, name: str) -> None:
        """A worker leaves when it has answered what it has; it is not stopped."""
        self._check_open()
        self._event(lambda s, now: s.remove_worker(name, now))

    def close(self, stop_tasks: bool = False) -> None:
        """Carries out nothing any more, and cancels what is unfinished; who waits, or asks for
        something later, is told. The connections are those of the link.

        Args:
            stop_tasks: whether workers and servers are told that the job is done.
        """
        self._crew.ending = True
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._link.thread.later(lambda hub: self._cancel())  # where closures get their results
        if stop_tasks:
            self._link.thread.do(self._stop, "tasks to be stopped", 2 * _STOP_SECONDS)
        self._tracer.shutdown(wait=False, cancel_futures=True)

    # Under the lock.

    def _asked(self, what: Question) -> do.Answer:
        """The state's answer; raises the error that it has."""
        self._check_open()
        answer, found = self._state.ask(what, time.monotonic())
        self._add(found)
        if isinstance(answer, do.Raise):
            self._again.clear()  # nothing is unfinished now
            raise answer.error
        return answer

    def _check_open(self) -> None:
        if self._closed:
            raise self._link.thread.closed()

    def _wait_for_results(self) -> None:
        """Waits until some more is carried out."""
        self._watching += 1
        self._changed.wait(_LOOK_SECONDS)
        self._watching -= 1

    # The hub's thread.

    def _stop(self, hub: Any) -> None:
        tickets = [*self._crew.stop(_STOP_SECONDS), *self._guard.stop(_STOP_SECONDS)]
        while not all(t.done or t.peer.silence > _GONE_SECONDS for t in tickets):
            hub.turn(0.1)

    def _add(self, found: Sequence[do.Instruction]) -> None:
        """Notes what is to be done, under the lock or before there are threads."""
        if found and not self._closed:
            first = not self._todo
            self._todo.extend(found)
            if first:
                self._link.thread.later(lambda hub: self._drain())

    def _cancel(self) -> None:
        """The job is closed: nobody will answer what is unfinished."""
        self._drain()
        while self._closures:
            self._closures.popitem()[1].value.cancel()
        self._crew.end(self._link.thread.closed())

    def _event(self, change: Callable[[State, float], Sequence[do.Instruction]]) -> None:
        """Tells the state what has happened."""
        with self._changed:
            self._add(change(self._state, time.monotonic()))

    def _wake(self) -> None:
        """Whoever waits asks the state again."""
        with self._changed:
            self._changed.notify_all()

    def _drain(self) -> None:
        """Carries out what there is to do."""
        while self._todo:
            instruction = self._todo[0]
            try:
                self._handlers[type(instruction)](instruction)
            except Exception:  # it must not keep the others from being carried out
                _log.exception("Could not carry out %r", instruction)
            finally:
                self._todo.popleft()
        self._crew.flush()
        if self._watching:
            self._wake()

    def _tick(self) -> None:
        self._crew.look()
        self._guard.look()
        while self.let_go:
            self._release(str(self.let_go.popleft()))
        self._event(lambda state, now: state.tick(now))
        if self._record is not None and self._lost != self._state.lost_pushes:
            self._lost = self._state.lost_pushes
            self._record.lost(self._lost)

    def _release(self, iterator: str) -> None:
        self._event(lambda state, now: state.release_iterator(iterator, now))

    def _dispatch(self, what: do.Dispatch) -> None:
        closure = self._scheduled(what)
        if closure is None:  # else the state would wait for its answer for ever
            self._ran(what, self._crew.incarnation(what.worker), ValueError(
                f"Expected closure {what.closure} to be known here. Got none. This is a fault of "
                "Stratagem: please report it, with what the program schedules."
            ))  # fmt: skip
            return
        if what.lease is not None and what.fresh and self._record is not None:
            self._record.leased(what.token, what.lease)
        try:
            for key, plan in list(closure.family.plans.items()):
                self._crew.give_plan(what.worker, closure.family.number, key, plan, self._wire)
            arrays = closure.arguments(self._crew.index(what.worker))
            self._guard.begins(what.round, closure.family)
            ran = functools.partial(self._ran, what)
            fields = closure.fields(what, self._state.share)
            self._crew.run(what.worker, fields, arrays, ran, what.together)
        except Exception as error:  # what cannot be sent will not be answered
            self._ran(what, self._crew.incarnation(what.worker), error)

    def _wire(self, plan: Plan) -> tuple[dict[str, Any], list[np.ndarray]]:
        return plan.to_wire(self._link.specs, self._staged(plan))

    def _scheduled(self, what: do.Dispatch) -> Scheduled | None:
        """What is to be run: that of the batch, where the batch has come from another closure."""
        found = self._closures.get(what.closure) or self._again.get(what.closure)
        return found if what.lease is None else self._batches.get(what.lease, found)

    def _ran(self, what: do.Dispatch, incarnation: str, answer: Message | Exception) -> None:
        """A worker has answered, or it is known that it will not."""
        finished = functools.partial(
            State.finished, worker=what.worker, incarnation=incarnation, closure=what.closure
        )
        if isinstance(answer, RemoteError | ValueError | JobMismatchError):
            self._event(lambda s, now: finished(s, outcome="error", result=answer, now=now))
            return
        if isinstance(answer, Exception):
            self._crew.lost(what.worker, str(answer))
            return
        fields, outcome = answer.fields, answer.fields["outcome"]
        if outcome == "needs-program":
            self._tracer.submit(self._trace, what, answer, finished)
            return
        closure = self._scheduled(what)
        result: Any = fields.get("reason")
        if outcome == "error":
            result = error_of(answer, "" if closure is None else closure.family.where)
        elif outcome == "ok":
            result = (fields["variant"], answer.arrays)
        ended = fields.get("iterator")
        rows = 0 if closure is None else closure.rows or 0
        self._event(lambda s, now: finished(
            s, outcome=outcome, result=result, now=now, rows=rows,
            staleness=fields.get("staleness"), iterator=None if ended is None else str(ended),
        ))  # fmt: skip

    def _trace(self, what: do.Dispatch, answer: Message, finished: Callable[..., Any]) -> None:
        """Makes the plan for elements that no plan is for. In the tracer's thread."""
        try:
            if (closure := self._scheduled(what)) is not None and answer.arrays:
                closure.family.variant(cloudpickle.loads(answer.arrays[0].tobytes()))
            self._event(lambda s, now: finished(s, outcome="needs-program", now=now))
        except Exception as error:
            failed = error
            self._event(lambda s, now: finished(s, outcome="error", result=failed, now=now))

    def _counted(self, what: do.Counted) -> None:
        self._again.pop(what.token, None)
        if what.lease is not None:
            self._batches.pop(what.lease, None)
        if self._record is not None:
            self._record.counted(what)

    def _resolve(self, what: do.Resolve) -> None:
        closure = self._closures.pop(what.closure)
        closure.resolve(what.outcome, what.result)
        if what.outcome == "ok" and closure.batch is None:
            self._again[what.closure] = closure  # until it is counted, at once or in its round
