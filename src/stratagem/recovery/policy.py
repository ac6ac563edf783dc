"""What to do when a task of a job is lost: one pure function, without JAX, clocks or processes."""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stratagem.cluster.membership import PEER_LOST as PEER_LOST
from stratagem.cluster.roles import TRAINERS

PREEMPTED = 42
"""Exit code of a task that was asked to leave, and has saved before it did."""

SERVICE = "coordination service"
"""What that process is called where tasks have their names."""

# Signals that a process gets by a fault of its own, or of the system, and what they often mean.
_HINTS = {
    "SIGKILL": "killed from outside, often for want of memory",
    "SIGSEGV": "a fault in native code",
    "SIGBUS": "a fault in native code, or shared memory that is full",
    "SIGABRT": "native code gave up; its message stands above",
}


class Action(enum.Enum):
    """What is done about the tasks of a job."""

    WAIT = "wait"
    FINISH = "end the job: it is done"
    CONTINUE = "continue with survivors"
    REPLACE = "replace the lost worker"
    AGAIN = "start the task again, alone"
    RESTART = "restart the group"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Ended:
    """A task has ended.

    Args:
        task_type: its job, such as `"worker"`.
        index: its index in the job.
        code: its exit code, or minus the number of the signal that ended it.
        at: seconds since the group was started.
    """

    task_type: str
    index: int
    code: int
    at: float

    @property
    def task(self) -> str:
        """`"worker 1"`."""
        return f"{self.task_type} {self.index}"


@dataclass(frozen=True)
class Restarted:
    """The whole group was started again; after a preemption it does not count as a failure."""

    after_preemption: bool = False


@dataclass(frozen=True)
class Replaced:
    """A task that had ended was started again, alone.

    Args:
        task_type: as in `Ended`.
        index: as in `Ended`.
        at: seconds since the group was started.
    """

    task_type: str
    index: int
    at: float = 0.0


@dataclass(frozen=True)
class LetGo:
    """The others go on without a task that has ended."""

    task_type: str
    index: int


@dataclass(frozen=True)
class ServiceLost:
    """The process that hosts the coordination service has ended.

    Args:
        code: its exit code, or minus the number of a signal.
        at: seconds since the group was started.
    """

    code: int
    at: float

    @property
    def task(self) -> str:
        """What it is called where tasks have their names."""
        return SERVICE


Event: TypeAlias = Ended | Restarted | Replaced | LetGo | ServiceLost


@dataclass(frozen=True)
class Limits:
    """What the user allows.

    Args:
        max_restarts: how often a group or a task may be started again after a failure.
        min_workers: with how many of its workers (the chief is one) training may go on; None
            where a loss always ends the group.
        wait_for_replacement: seconds that the survivors wait for the replacement of a lost
            worker; None where it is not replaced.
        task_restarts: with parameter servers, how often each worker and each server may be started
            again, alone; `max_restarts` is for the chief and the evaluator then.
    """

    max_restarts: int = 0
    min_workers: int | None = None
    wait_for_replacement: float | None = None
    task_restarts: int = 3


@dataclass(frozen=True)
class Decision:
    """What is done, and why, as a sentence for the user.

    Args:
        action: what.
        reason: why.
        seconds: from now; only AGAIN can be later, if the job still runs then.
    """

    action: Action
    reason: str
    seconds: float = 0.0


def decide(tasks: Sequence[tuple[str, int]], events: Sequence[Event], limits: Limits) -> Decision:
    """What to do after the last of some events. Pure: the same arguments, the same decision.

    For jobs without parameter servers; see `serving_policy` for those with some.

    Args:
        tasks: type and index of every task of the job.
        events: all that has happened to it so far, in order.
        limits: what the user allows.

    Rules, the first that applies:
        1. All that trains has ended with 0, or was let go: FINISH.
        2. The coordination service is lost: as 6, for nothing can regroup without it.
        3. Nobody has failed: WAIT.
        4. All that trains has left with 42, after saving: RESTART, if restarts are allowed at all;
           it counts against no limit. While only some have left, WAIT for the others.
        5. A task is lost that the others can do without for now. A worker, with `min_workers`:
           REPLACE it, or CONTINUE without it. The evaluator: REPLACE.
        6. Otherwise RESTART while `max_restarts` allows it, and then GIVE_UP.
    """
    now = _Now(tasks, events, limits)
    if now.finished():
        return Decision(Action.FINISH, "all tasks that train have ended with exit code 0")
    cause = first_failure(events)
    if cause is None:
        return now.after_leaving() if now.left else Decision(Action.WAIT, "no task has failed")
    last = events[-1]
    if isinstance(cause, Ended) and isinstance(last, Ended) and last.code and now.may_lose(last):
        return now.without(last)
    return now.restart(describe(cause))


def first_failure(events: Sequence[Event]) -> Ended | ServiceLost | None:
    """Who is to blame: the first that failed by itself, not because it lost another one.

    Tasks that were replaced or let go are forgiven, and so is all that was before a restart.
    """
    failed: list[Ended | ServiceLost] = []
    for event in events:
        if isinstance(event, Restarted):
            failed = []
        elif isinstance(event, (Replaced, LetGo)):
            name = f"{event.task_type} {event.index}"
            failed = [end for end in failed if end.task != name]
        elif event.code not in (0, PREEMPTED):
            failed.append(event)
    own = (end for end in failed if end.code != PEER_LOST)
    return next(own, failed[0] if failed else None)


def describe(end: Ended | ServiceLost) -> str:
    """`"worker 1, exit code 1, 2.5 s after start"`."""
    return f"{end.task}, {describe_code(end.code)}, {end.at:.1f} s after start"


def describe_code(code: int) -> str:
    """`"exit code 1"`, or the signal's name and what it often means."""
    if code >= 0:
        meaning = {PREEMPTED: ": preempted after saving", PEER_LOST: ": a peer was lost"}
        return f"exit code {code}{meaning.get(code, '')}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = f": {_HINTS[name]}" if name in _HINTS else ""
    return f"signal {-code} ({name}{hint})"


class _Now:
    """The state of a job that its events lead to."""

    def __init__(
        self, tasks: Sequence[tuple[str, int]], events: Sequence[Event], limits: Limits
    ) -> None:
        self._limits = limits
        self._tasks = tasks
        self._trainers = [task for task in tasks if task[0] in TRAINERS]
        self._used = 0  # Starts after a failure.
        self._codes: dict[tuple[str, int], int] = {}  # Of the tasks that have ended.
        self._let_go: set[tuple[str, int]] = set()
        for event in events:
            self._add(event)

    def _add(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._codes[event.task_type, event.index] = event.code
        elif isinstance(event, Replaced):
            self._used += 1
            self._codes.pop((event.task_type, event.index), None)
        elif isinstance(event, LetGo):
            self._let_go.add((event.task_type, event.index))
        elif isinstance(event, Restarted):
            self._used += not event.after_preemption
            self._codes, self._let_go = {}, set()

    @property
    def left(self) -> bool:
        return PREEMPTED in self._codes.values()

    def finished(self) -> bool:
        # A supervisor may see no task that trains, where a job spans several machines.
        decisive = self._trainers or self._tasks
        return all(self._codes.get(task) == 0 or task in self._let_go for task in decisive)

    def survivors(self) -> int:
        return sum(task not in self._codes for task in self._trainers)

    def may_lose(self, end: Ended) -> bool:
        """Whether the others can go on without a task that has just ended."""
        if end.task_type not in TRAINERS:
            return end.task_type == "evaluator" and self._restarts_left()
        if self._limits.min_workers is None or self.left:
            return False
        enough = self.survivors() >= self._limits.min_workers or self._can_replace()
        return self.survivors() > 0 and enough

    def without(self, end: Ended) -> Decision:
        if end.task_type not in TRAINERS:
            return Decision(Action.REPLACE, f"lost {describe(end)}; training goes on")
        left = f"{self.survivors()} left, at least {self._limits.min_workers} needed"
        if not self._can_replace():
            return Decision(Action.CONTINUE, f"lost {describe(end)}; {left}")
        wait = f"its replacement has {self._limits.wait_for_replacement:g} s to join"
        return Decision(Action.REPLACE, f"lost {describe(end)}; {left}; {wait}")

    def after_leaving(self) -> Decision:
        if self.survivors():
            return Decision(Action.WAIT, "a task was preempted; the others are saving too")
        if self._limits.max_restarts == 0:
            return Decision(Action.GIVE_UP, "preempted after saving, and no restarts are allowed")
        return Decision(Action.RESTART, "preempted after saving; this does not count as a failure")

    def restart(self, why: str) -> Decision:
        allowed = self._limits.max_restarts
        if self._restarts_left():
            return Decision(Action.RESTART, f"{why}; restart {self._used + 1} of {allowed}")
        used = f"all {allowed} restarts are used up" if allowed else "no restarts are allowed"
        return Decision(Action.GIVE_UP, f"{why}; {used}")

    def _restarts_left(self) -> bool:
        return self._used < self._limits.max_restarts

    def _can_replace(self) -> bool:
        return self._limits.wait_for_replacement is not None and self._restarts_left()
