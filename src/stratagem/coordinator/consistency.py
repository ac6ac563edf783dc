"""When a closure may start: asynchronous, of bounded staleness, or in rounds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from stratagem.coordinator.instructions import Commit


@dataclass(frozen=True)
class Asynchronous:
    """Any free worker takes the next closure at once (Hogwild-style; what TF does)."""


@dataclass(frozen=True)
class Bounded:
    """No push is computed from variables that more than so many other pushes have changed since.

    Stale synchronous parallel (Ho et al. 2013, "More Effective Distributed ML via a Stale
    Synchronous Parallel Parameter Server"; Li et al. 2014, "Scaling Distributed Machine Learning
    with the Parameter Server", section 3.4), counted in pushes instead of clocks of workers.

    What a lost worker pushes for a closure that was cancelled, or failed elsewhere, is outside of
    the bound until servers have heard of its end.

    Args:
        max_staleness: how many pushes may come between a closure's pull and its own push. 0 is
            one closure at a time; all of W workers have work from about 2 (W - 1) on.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(
                f"Expected max_staleness of at least 0. Got {self.max_staleness}. 0 is one "
                "closure at a time; leave the bound away for free asynchrony"
            )


@dataclass(frozen=True)
class Synchronous:
    """Rounds of one closure for each worker, applied as one step.

    Chen et al. 2016, "Revisiting Distributed Synchronous SGD", section 3.

    Args:
        backup: how many closures of a round need not be waited for: their gradients are dropped.
            At least one is always waited for.
        hybrid: rows of tables are applied as they come, and only the rest in rounds.
    """

    backup: int = 0
    hybrid: bool = False

    def __post_init__(self) -> None:
        if self.backup < 0:
            raise ValueError(
                f"Expected backup of at least 0 workers. Got {self.backup}. 0 drops nothing"
            )


Consistency: TypeAlias = Asynchronous | Bounded | Synchronous


def rule(mode: str, max_staleness: int | None = None, backup_workers: int = 0) -> Consistency:
    """The rule of a strategy; the arguments are those of its `Consistency`."""
    if mode != "asynchronous":
        return Synchronous(backup_workers, hybrid=mode == "hybrid")
    return Asynchronous() if max_staleness is None else Bounded(max_staleness)


class Window:
    """In flight under a bound: O(1) for each start and end.

    A closure counts as in flight from its first start until it cannot push any more, over all
    its repetitions. Of closure m, `others[m]` are in flight when it starts as number `s[m]`, and
    `S` have started by now. What can be pushed between its pull and its push is at most
    `others[m] + S - s[m]`. A start adds one to `s`, and at most one to `others`: of all that are
    in flight, the bound is tightest for the one that started first.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._started = 0
        self._slack: OrderedDict[int, int] = OrderedDict()  # others[m] - s[m], by age

    def may_start(self) -> bool:
        """Whether one more can start without exceeding the bound of any."""
        if not self._slack:
            return True
        oldest = next(iter(self._slack.values()))
        return oldest + self._started + 1 <= self._bound

    def start(self, closure: int) -> None:
        """A closure starts for the first time."""
        self._started += 1
        self._slack[closure] = len(self._slack) - self._started

    def leave(self, closure: int) -> None:
        """A closure cannot push any more: it has, or it never will."""
        self._slack.pop(closure, None)


@dataclass(slots=True)
class _Staged:
    closure: int
    token: int
    rows: int


class Rounds:
    """The round of synchronous training that is on.

    Args:
        backup: how many of a round need not be waited for.
        first: number of the first round; rounds of a restarted coordinator get new numbers.

    Attributes:
        size: how many closures the present round has when it is full.
    """

    def __init__(self, backup: int, first: int) -> None:
        self.number = first
        self.late: dict[int, int] = {}  # Closures that were not waited for, and their rounds.
        self._backup = backup
        self.size = 1
        self._running: dict[int, int] = {}  # Closure to token.
        self._staged: dict[int, _Staged] = {}
        self._committing = False
        self._again = False  # A commit was sent once; a lost server has to get it, too.

    def __contains__(self, closure: int) -> bool:
        return closure in self._running or closure in self._staged

    def may_start(self, size: int) -> bool:
        """Whether a closure can be a member of the round: of one of this size, if it is empty."""
        if self._committing or self._again:
            return False
        members = len(self._running) + len(self._staged)
        if not members:
            self.size = max(1, size)
        return members < self.size

    def start(self, closure: int, token: int) -> None:
        """A closure is a member of the round; it stages its gradients under `token`."""
        self._running[closure] = token

    def stage(self, closure: int, rows: int) -> None:
        """The gradients of a member are staged on all servers."""
        self._staged[closure] = _Staged(closure, self._running.pop(closure), rows)

    def leave(self, closure: int) -> None:
        """A closure ends without gradients; what it may have staged, no commit asks for."""
        self.late.pop(closure, None)
        self._running.pop(closure, None)
        if self._again and not self._running and not self._staged:
            self.number += 1  # Some servers have applied it.
            self._again = False

    def commit(self, flush: bool) -> Commit | None:
        """The commit that is due, once.

        Args:
            flush: no more closures will come for now: what is there is enough.
        """
        if self._committing or not self._staged:
            return None
        enough = len(self._staged) >= max(1, self.size - self._backup) and not self._again
        if not enough and (self._running or not (flush or self._again)):
            return None
        self._committing = True
        self.late.update(dict.fromkeys(self._running, self.number))
        self._running.clear()
        staged = self._staged.values()
        rows = sum(each.rows for each in staged)
        known = all(each.rows for each in staged)
        weights = tuple(each.rows / rows if known else 1 / len(staged) for each in staged)
        tokens = tuple(each.token for each in staged)
        return Commit(self.number, tokens, weights)

    def committed(self, number: int) -> list[tuple[int, int]]:
        """All servers have applied a round; its closures and their rows."""
        if not self._committing or number != self.number:
            return []
        members = [(each.closure, each.rows) for each in self._staged.values()]
        self.number += 1
        self._staged = {}
        self._committing = self._again = False
        return members

    def unstage(self) -> list[int]:
        """A server has lost what was staged: the members whose gradients must come again."""
        again = list(self._staged)
        for each in self._staged.values():
            self._running[each.closure] = each.token
        self._staged.clear()
        self._again, self._committing = self._again or self._committing, False
        return again
