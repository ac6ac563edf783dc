"""Starts the tasks of a job, passes on what they write, and acts when one ends.

What to do is decided in `recovery/policy.py`, and in `recovery/serving_policy.py` for jobs with
parameter servers; where the tasks run is the business of an `Executor`.
"""

from __future__ import annotations

import abc
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from stratagem.cluster.roles import SERVING, TRAINERS
from stratagem.launcher.abstract import Job, Task, task_environment
from stratagem.launcher.lines import LineBuffer
from stratagem.launcher.output import Output
from stratagem.launcher.signals import stop_signals
from stratagem.recovery import policy, serving_policy
from stratagem.recovery.policy import (
    PEER_LOST,
    PREEMPTED,
    SERVICE,
    Action,
    Decision,
    Ended,
    Event,
    LetGo,
    Replaced,
    Restarted,
    ServiceLost,
    first_failure,
)

# After the last failure the others may end by themselves and say what they saw. And where all that
# is known is that one has lost a peer, the one that it lost may still be writing its traceback.
_PEERS_SECONDS = 1.0
_CULPRIT_SECONDS = 5.0
# Then they are asked to leave, and killed after some seconds. Nothing of the old group is of use to
# a new one, which starts from the last backup; and who presses Ctrl-C does not want to wait. Only
# after SIGTERM, from an engine, and with parameter servers, there may be something to save:
# `Job.grace_seconds`.
_RESTART_GRACE_SECONDS = 1.0
_FAILURE_GRACE_SECONDS = 3.0
_INTERRUPT_GRACE_SECONDS = 5.0
# Tasks on other machines may still need the service to leave. (It ends by itself when all have.)
_OTHER_MACHINES_SECONDS = 5.0
_UNWRITTEN = 256  # Pieces of output in memory, while the terminal is slow; then tasks have to wait.

Name: TypeAlias = Task | str


@dataclass(frozen=True)
class Wrote:
    """A task has written to its standard output, or error."""

    name: Name
    is_error: bool
    data: bytes


@dataclass(frozen=True)
class Exited:
    """A task has ended, and all that it wrote has been posted; code as in `policy.Ended`."""

    name: Name
    code: int


@dataclass(frozen=True)
class Stop:
    """A signal asks to end the job."""

    signum: int


Message: TypeAlias = Wrote | Exited | Stop
Post: TypeAlias = Callable[[Message], None]


@dataclass(frozen=True)
class Plan:
    """One attempt at running a job.

    Args:
        addresses: of all tasks of the job, wherever they run.
        own: the tasks that this supervisor starts.
        coordination: the address of the coordination service; None where none is needed.
        hosts_service: whether this supervisor starts it.
    """

    addresses: Mapping[Task, str]
    own: tuple[Task, ...]
    coordination: str | None
    hosts_service: bool


class Running(abc.ABC):
    """A task that was started."""

    @abc.abstractmethod
    def signal(self, signum: int) -> None:
        """Sends a signal to the task's own process; nothing where it has ended."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends the task and all that it has started, at once."""


class Executor(abc.ABC):
    """Where tasks run: processes of this machine, or actors of an engine."""

    @abc.abstractmethod
    def plan(self, job: Job, attempt: int) -> Plan:
        """Places the tasks of one attempt; raises `LaunchError` where that is not possible."""

    @abc.abstractmethod
    def start(self, job: Job, task: Task, told: Mapping[str, str], post: Post) -> Running:
        """Starts a task, with variables on top of the environment; posts what it does."""

    @abc.abstractmethod
    def start_service(self, plan: Plan, tasks: int, post: Post) -> Running:
        """Starts the coordination service for a number of tasks, under the name `SERVICE`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all that is left."""


class Supervisor:
    """Runs one job on an executor.

    Args:
        job: what to run.
        executor: where.
        output: the terminal.
    """

    def __init__(
        self,
        job: Job,
        executor: Executor,
        output: Output,
    ) -> None:
        self._job, self._executor, self._output = job, executor, output
        self._decide = serving_policy.decide if job.servers else policy.decide
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._unwritten = threading.Semaphore(_UNWRITTEN)
        self._buffers: dict[tuple[Name, bool], LineBuffer] = {}
        self._running: dict[Name, Running] = {}
        self._codes: dict[Name, int] = {}
        self._events: list[Event] = []
        self._stops: list[int] = []
        self._attempt = 0

    def run(self) -> int:
        """Runs the job to its end; the exit code for the command. Call it in the main thread."""
        with stop_signals(lambda signum: self._inbox.put(Stop(signum))):
            try:
                while True:
                    self._start()
                    decision = self._end_group(self._watch())
                    if self._stops and decision.action is not Action.FINISH:
                        return self._stop_code()
                    if decision.action is not Action.RESTART:
                        return self._result(decision)
                    self._prepare_restart(decision)
            except BrokenPipeError:  # Nobody reads us any more, as in `stratagem run ... | head`.
                return 128 + signal.SIGPIPE
            finally:
                self._executor.close()

    def _start(self) -> None:
        self._plan = self._executor.plan(self._job, self._attempt)
        self._own = [(task.type, task.index) for task in self._plan.own]
        self._signalled = False
        self._later: list[tuple[float, Event, Decision]] = []
        self._started_at = time.monotonic()
        if self._plan.hosts_service:
            trainers = self._job.trainers
            service = self._executor.start_service(self._plan, trainers, self._post)
            self._running[SERVICE] = service
        for task in self._plan.own:
            self._start_task(task)

    def _start_task(self, task: Task, join: bool = False) -> None:
        told = task_environment(
            self._job,
            task,
            self._plan.addresses,
            coordination=self._plan.coordination,
            attempt=self._attempt + self._starts_alone(task),
            join=join,
        )
        self._running[task] = self._executor.start(self._job, task, told, self._post)

    def _starts_alone(self, task: Task) -> int:
        """How often a task was started again, where that does not happen to the whole group."""
        if not self._job.servers:
            return 0
        return serving_policy.starts(self._events, task.type, task.index)

    def _watch(self) -> Decision:
        """Waits until the group has to end, and says why; acts where one task can be spared."""
        while not self._stops:
            for _, lost, decided in self._take_due():
                self._do_without(lost, decided)
            seen = len(self._events)
            self._receive(self._seconds_until_due())
            if len(self._events) == seen:
                continue
            decision = self._decide(self._own, self._events, self._job.limits)
            if decision.seconds:
                due = time.monotonic() + decision.seconds
                self._later.append((due, self._events[-1], decision))
            elif decision.action in (Action.REPLACE, Action.AGAIN, Action.CONTINUE):
                self._do_without(self._events[-1], decision)
            elif decision.action is not Action.WAIT:
                return decision
        return Decision(Action.GIVE_UP, "a signal asked to end")

    def _take_due(self) -> list[tuple[float, Event, Decision]]:
        now = time.monotonic()
        due = [each for each in self._later if each[0] <= now]
        self._later = [each for each in self._later if each[0] > now]
        return due

    def _seconds_until_due(self) -> float | None:
        if not self._later:
            return None
        return max(0.0, min(due for due, _, _ in self._later) - time.monotonic())

    def _do_without(self, lost: Event, decision: Decision) -> None:
        if not isinstance(lost, Ended):
            raise TypeError(f"expected a decision about a task that has ended. Got {lost!r}.")
        self._output.say(f"{decision.action.value}: {decision.reason}")
        if decision.action is Action.CONTINUE:
            self._events.append(LetGo(lost.task_type, lost.index))
            return
        at = time.monotonic() - self._started_at
        self._events.append(Replaced(lost.task_type, lost.index, at))
        task = Task(lost.task_type, lost.index)
        self._output.forget(task)
        self._start_task(task, join=task.trains and decision.action is Action.REPLACE)

    def _end_group(self, decision: Decision) -> Decision:
        """Ends what still runs; the decision again, now that more is known about the cause."""
        action = decision.action
        if action is not Action.FINISH and not self._stops:
            self._hear_peers(action)
            again = self._decide(self._own, self._events, self._job.limits)
            decision = again if again.action is action else decision
        self._signalled = True
        self._ask_to_leave(self._grace_seconds(action))
        if action is Action.FINISH and len(self._plan.own) < len(self._plan.addresses):
            self._wait(_OTHER_MACHINES_SECONDS, lambda: SERVICE not in self._running)
        for running in self._running.values():
            running.kill()
        while self._running:
            self._receive()
        return decision

    def _ask_to_leave(self, seconds: float) -> None:
        """Asks all tasks, and waits. Servers stay until the coordinator has saved what they have,
        and workers, whose steps it may wait for."""
        stops, deadline = len(self._stops), time.monotonic() + seconds
        asked = self._stops[-1] if self._stops else signal.SIGTERM
        serving = [t for t in self._alive() if self._job.servers and t.type in SERVING]
        for task in self._alive():
            if task not in serving:
                self._running[task].signal(asked)
        if serving:
            self._wait(seconds, lambda: Task("chief", 0) not in self._running)
            for task in serving:
                if task in self._running:
                    self._running[task].signal(asked)
        if len(self._stops) == stops:
            self._wait(max(deadline - time.monotonic(), _FAILURE_GRACE_SECONDS))

    def _grace_seconds(self, action: Action) -> float:
        if self._stops:
            asked = self._stops[-1]
            interrupted = asked == signal.SIGINT and not self._job.servers
            seconds = _INTERRUPT_GRACE_SECONDS if interrupted else self._job.grace_seconds
            name = signal.Signals(asked).name
            self._output.say(
                f"{name}: asked all tasks to end; killed after {seconds:g} s, or at a second signal"
            )
            self._output.flush()
            return seconds
        if action is Action.FINISH or self._job.servers:
            return self._job.grace_seconds
        return _RESTART_GRACE_SECONDS if action is Action.RESTART else _FAILURE_GRACE_SECONDS

    def _hear_peers(self, action: Action) -> None:
        """Lets the others end by themselves, so that they are heard, and the cause is known."""
        first = first_failure(self._events)
        if first is not None and first.code == PEER_LOST:
            self._wait(_CULPRIT_SECONDS, self._knows_the_cause)
        if first is not None and action is not Action.RESTART:
            self._wait(_PEERS_SECONDS)

    def _wait(self, seconds: float, enough: Callable[[], bool] | None = None) -> None:
        """Some seconds, or until `enough` (all tasks have ended); a signal cuts it short."""
        enough = enough or (lambda: not self._alive())
        deadline, stops = time.monotonic() + seconds, len(self._stops)
        while len(self._stops) == stops and not enough():
            if (left := deadline - time.monotonic()) <= 0:
                return
            self._receive(left)

    def _knows_the_cause(self) -> bool:
        first = first_failure(self._events)
        return not self._alive() or (first is not None and first.code != PEER_LOST)

    def _alive(self) -> list[Task]:
        """The tasks that run. (The service is none, and outlives them: they need it to leave.)"""
        return [name for name in self._running if isinstance(name, Task)]

    def _receive(self, seconds: float | None = None) -> None:
        """Takes in one message, or waits some seconds for one."""
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        if isinstance(message, Wrote):
            buffer = self._buffers.setdefault((message.name, message.is_error), LineBuffer())
            self._unwritten.release()
            self._print(message.name, message.is_error, buffer.feed(message.data, time.monotonic()))
        elif isinstance(message, Exited):
            self._take_end(message)
        else:
            self._stops.append(message.signum)
        if self._inbox.empty():
            self._output.flush()

    def _take_end(self, end: Exited) -> None:
        for is_error in (False, True):
            if (buffer := self._buffers.pop((end.name, is_error), None)) is not None:
                self._print(end.name, is_error, buffer.close())
        del self._running[end.name]
        self._codes[end.name] = end.code
        at = time.monotonic() - self._started_at
        if self._signalled:  # It ended because we asked it to.
            return
        if isinstance(end.name, Task):
            self._events.append(Ended(end.name.type, end.name.index, end.code, at))
        elif end.code:
            self._events.append(ServiceLost(end.code, at))

    def _print(self, name: Name, is_error: bool, lines: list[bytes]) -> None:
        for line in lines:
            self._output.line(name, line, is_error)

    def _prepare_restart(self, decision: Decision) -> None:
        self._attempt += 1
        self._output.say(f"{decision.action.value}: {decision.reason}")
        self._events.append(Restarted(after_preemption=first_failure(self._events) is None))
        for task in self._plan.own:
            self._output.forget(task)

    def _result(self, decision: Decision) -> int:
        if decision.action is Action.FINISH:
            return 0
        first = first_failure(self._events)
        if first is None or self._job.limits.max_restarts or self._job.servers:
            self._output.say(f"{decision.action.value}: {decision.reason}")
        if first is None:
            return PREEMPTED
        others = [e for e in self._events if isinstance(e, Ended) and e.code and e is not first]
        self._output.failure(first, [e for e in others if e in self._since_restart()])
        self._output.flush()
        return exit_code(first.code)

    def _since_restart(self) -> list[Event]:
        starts = [i for i, event in enumerate(self._events) if isinstance(event, Restarted)]
        return self._events[starts[-1] + 1 :] if starts else self._events

    def _stop_code(self) -> int:
        """42 where all that trains has saved, so that an engine outside starts it again."""
        own = self._plan.own
        decisive = ("chief",) if self._job.servers else TRAINERS
        trainers = [task for task in own if task.type in decisive] or own
        saved = all(self._codes.get(task) == PREEMPTED for task in trainers)
        return PREEMPTED if saved else 128 + self._stops[0]

    def _post(self, message: Message) -> None:
        """What executors call, in any thread."""
        if isinstance(message, Wrote):
            self._unwritten.acquire()
        self._inbox.put(message)


def exit_code(code: int) -> int:
    """The exit code of a command for that of a task: 128 + n for signal n, as in shells."""
    return code if code >= 0 else 128 - code
