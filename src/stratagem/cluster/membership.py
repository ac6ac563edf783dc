"""Who trains together, and what follows when one is lost, joins, is silent or is late.

Pure: no clocks, no sockets, no JAX. `cluster/hosting.py` feeds it and carries out what it says.

A task that comes in the place of a lost one waits until a member admits it: only a member knows
when it is at a place of its program where another process can begin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

PEER_LOST = 43
"""Exit code of a task that waited for another one in vain. It is never the cause itself."""


@dataclass(frozen=True)
class Terms:
    """What the user allows; every task of a job says the same.

    Args:
        min_workers: with how many tasks training may go on; None where a loss ends the job.
        wait_for_replacement: seconds to wait where fewer are left; None where nobody is replaced.
        stall_seconds: how long a step may take; infinity where that is not watched.
        warn_seconds: after how long in a step the user is told, and how often then.
        silence_seconds: after how long without a beat a task is lost: it is stopped, or its link
            is cut. Beats come once a second, unless native code keeps Python's lock.
    """

    min_workers: int | None = None
    wait_for_replacement: float | None = None
    stall_seconds: float = math.inf
    warn_seconds: float = 60.0
    silence_seconds: float = 10.0


@dataclass(frozen=True)
class Beat:
    """What a process says of itself, every second and when it changes.

    Args:
        step: number of the step that it is in, or was in last, counted from the last change.
        busy: whether it is inside that step.
        seconds: since when that is so.
        doing: the step, in words.
    """

    step: int = 0
    busy: bool = False
    seconds: float = 0.0
    doing: str = ""


@dataclass(frozen=True)
class Announce:
    """These tasks go on together, in the order of their ranks."""

    members: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class End:
    """All processes end; those in `dump` show where they are."""

    why: str
    dump: tuple[str, ...] = ()


@dataclass(frozen=True)
class Warn:
    """Nobody ends yet; the user is told."""

    why: str


@dataclass(frozen=True)
class Refuse:
    """The task that has just said hello may not take part."""

    why: str


@dataclass(frozen=True)
class Await:
    """Tasks wait to be admitted; the members are told."""

    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Hold:
    """Too few members are left; they wait for a replacement."""

    why: str


@dataclass(frozen=True)
class Dismiss:
    """Tasks that wait are not needed any more: the others have come to their end."""

    tasks: tuple[str, ...]
    why: str


Effect: TypeAlias = Announce | End | Warn | Refuse | Await | Hold | Dismiss


@dataclass
class _Seen:
    beat: Beat
    at: float


@dataclass
class Membership:
    """The tasks of one attempt of a job.

    Args:
        size: how many tasks it starts with.
    """

    size: int
    terms: Terms = Terms()
    members: tuple[str, ...] = ()
    _ranks: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _left: set[str] = field(default_factory=set)
    _waiting: set[str] = field(default_factory=set)
    _started: bool = False
    _lost: str = ""
    _deadline: float = math.inf
    _warned: float = -math.inf

    def hello(self, task: str, rank: int, terms: Terms, now: float) -> list[Effect]:
        """A task is ready to train: at the start, or in the place of a lost one."""
        if self._started and self.terms.min_workers is None:
            return [Refuse(f"{task} comes to a job that has started, and may not change its tasks")]
        self._ranks[task] = rank
        self._seen[task] = _Seen(Beat(), now)
        self._left.discard(task)
        if not self._started:
            self.terms = terms
            if len(self._seen) < self.size:
                return []
            self._started = True
            return self._announce(self._seen, "all tasks are there", now)
        # Its end may not have been seen yet.
        lost = self.gone(task, "it was started again", now) if task in self.members else []
        self._seen[task] = _Seen(Beat(), now)
        self._waiting.add(task)
        here = set(self.members)
        if self._deadline < math.inf and len(here | self._waiting) >= (self.terms.min_workers or 0):
            lost += self._announce(here, f"{self._names(self._waiting)} is there", now)
        return [*lost, *self._await()]

    def admit(self, now: float) -> list[Effect]:
        """A member is where the tasks that wait can begin."""
        if not self._waiting or not self.members:
            return [Await(())]
        joining, self._waiting = self._waiting, set()
        return self._go_on({*self.members, *joining}, f"{self._names(joining)} joins", now)

    def _await(self) -> list[Effect]:
        if not self._waiting:
            return []
        waiting = self._in_order(self._waiting)
        if not self.members:
            return [End("all others were lost before the replacement could join")]
        if self._left.issuperset(self.members):
            self._waiting = set()
            return [Dismiss(waiting, "training has ended")]
        return [Await(waiting)]

    def _names(self, tasks: set[str]) -> str:
        return " and ".join(self._in_order(tasks))

    def heard(self, task: str, beat: Beat, now: float) -> None:
        """A process has said what it does."""
        if task in self._seen:
            self._seen[task] = _Seen(beat, now)

    def left(self, task: str) -> list[Effect]:
        """A process has come to the end of its program."""
        self._left.add(task)
        return self._await() if self._left.issuperset(self.members) else []

    def gone(self, task: str, why: str, now: float) -> list[Effect]:
        """A process is lost, or has ended after `left`."""
        self._seen.pop(task, None)
        if task in self._waiting:
            self._waiting.discard(task)
            return [Await(self._in_order(self._waiting))]
        if task in self._left or task not in self.members:
            return []
        self._lost = f"{task} is lost: {why}"
        effects = self._go_on(set(self.members) - {task}, self._lost, now)
        return [*effects, *self._await()]

    def tick(self, now: float) -> list[Effect]:
        """What the time that has passed leads to; call it about once a second."""
        if now >= self._deadline:
            return [End(f"{self._lost}; no replacement came in {self._wait:g} s")]
        for task in self.members:
            seen = self._seen.get(task)
            if seen and task not in self._left and now - seen.at >= self.terms.silence_seconds:
                why = f"no sign of life for {now - seen.at:.0f} s (it is stopped, or out of reach)"
                return self.gone(task, why, now)
        return self._stalled(now) if self._deadline == math.inf else []

    @property
    def _wait(self) -> float:
        return self.terms.wait_for_replacement or 0.0

    def _go_on(self, tasks: set[str], why: str, now: float) -> list[Effect]:
        least = self.terms.min_workers
        if not tasks:
            self.members = ()
            return []
        if least is None:
            return [End(f"{why}; the job may not go on without it")]
        if len(tasks) >= least:
            return self._announce(tasks, why, now)
        self.members = self._in_order(tasks)
        if self.terms.wait_for_replacement is None:
            return [End(f"{why}; {len(tasks)} left, at least {least} needed")]
        self._deadline = min(self._deadline, now + self._wait)
        return [Hold(f"{why}; {len(tasks)} left, at least {least} needed")]

    def _announce(self, tasks: set[str] | dict[str, _Seen], why: str, now: float) -> list[Effect]:
        self.members = self._in_order(tasks)
        self._deadline = math.inf
        for task in self.members:  # Steps are counted anew.
            self._seen[task] = _Seen(Beat(), now)
        return [Announce(self.members, why)]

    def _in_order(self, tasks: set[str] | dict[str, _Seen]) -> tuple[str, ...]:
        return tuple(sorted(tasks, key=lambda task: self._ranks[task]))

    def _stalled(self, now: float) -> list[Effect]:
        """A step that takes too long, and who is to blame: those who have not come to it."""
        beats = {task: self._seen[task].beat for task in self.members if task in self._seen}
        since = {task: b.seconds + now - self._seen[task].at for task, b in beats.items()}
        busy = [task for task, beat in beats.items() if beat.busy]
        if not busy:
            return []
        first = max(busy, key=lambda task: since[task])
        limit = self.terms.stall_seconds
        if any(task in self._left for task in self.members):  # It does not come any more.
            limit = min(limit, self.terms.silence_seconds)
        warn = self.terms.warn_seconds
        if since[first] < limit and (since[first] < warn or now - self._warned < warn):
            return []
        step = beats[first].step
        absent = [
            task
            for task in self.members
            if task not in beats or beats[task].step < step or not beats[task].busy
        ]
        who = (
            f"Missing: {', '.join(self._state(task, beats.get(task), since) for task in absent)}. "
            "Every process must make the same calls in the same order, also those that only the "
            "chief needs"
            if absent
            else "All workers are in it and none goes on"
        )
        where = f"step {step} since the last change ({beats[first].doing})"
        if since[first] >= limit:
            text = (
                f"Expected {where} to finish within {limit:g} s. {first} has been in it for "
                f"{since[first]:.0f} s. {who}"
            )
            return [End(text, tuple(dict.fromkeys((*absent, first))) if absent else self.members)]
        self._warned = now
        ends = "" if limit == math.inf else f"; after {limit:g} s the job ends"
        return [Warn(f"{first} has been in {where} for {since[first]:.0f} s{ends}. {who}")]

    def _state(self, task: str, beat: Beat | None, since: dict[str, float]) -> str:
        if task in self._left or beat is None:
            return f"{task} (its program has ended)"
        where = "is in" if beat.busy else "has been outside of any step after"
        doing = f", {beat.doing}" if beat.doing else ""
        return f"{task} ({where} step {beat.step}{doing}, for {since[task]:.0f} s)"
