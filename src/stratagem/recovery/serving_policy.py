"""What to do when a task of a job with parameter servers is lost: pure, as `policy.decide`.

The tasks of such a job do not wait for each other in collectives. Workers and servers are generic
programs that can be started again alone, at their old addresses; the coordinator (the chief) notes
in its journal what is finished, and goes on from there. So no loss ends the others, and there is
no restart of the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.cluster.roles import SERVING
from stratagem.recovery.policy import (
    PREEMPTED,
    Action,
    Decision,
    Ended,
    Event,
    Limits,
    Replaced,
    describe,
)

AT_ONCE_SECONDS = 10.0
"""An error exit so soon after its start is no loss of something that had worked."""

LEFT_SECONDS = 5.0
"""So long after a worker or server has left with 0, the chief should have ended too."""

AT_ONCE_TIMES = 3
"""So many of these in a row, of one task, and it will not be otherwise the next time."""


def decide(tasks: Sequence[tuple[str, int]], events: Sequence[Event], limits: Limits) -> Decision:
    """What to do after the last of some events. Pure: the same arguments, the same decision.

    Args:
        tasks: type and index of every task that the supervisor has started.
        events: all that has happened to them so far, in order.
        limits: what the user allows: `task_restarts` for each worker and server, `max_restarts`
            for the chief and the evaluator, which are the user's program.

    Rules, the first that applies:
        1. The chief has ended with 0; or, on a machine without it, all workers and servers have,
           because the chief has told them to: FINISH.
        2. The last event is the end of a task with another code than 0.
           a. With 42, asked to leave and saved: AGAIN, which counts against no limit; but the
              user's program only where `max_restarts` allows restarts at all.
           b. It is the third in a row of this task that is an error exit within 10 s of its start:
              GIVE_UP, for it fails at once each time.
           c. AGAIN while its limit allows it, and then GIVE_UP.
        3. The last event is the end of a worker or server with 0, beside a chief that runs: AGAIN,
           but only after 5 s. Either the chief has told it to leave, and ends by itself soon; or
           somebody else has, and it is missed. It counts against no limit.
        4. WAIT.
    """
    if _finished(tasks, events):
        return Decision(Action.FINISH, "the chief has ended with exit code 0")
    last = events[-1] if events else None
    if isinstance(last, Ended) and last.code:
        return _after_loss(last, events, limits)
    if isinstance(last, Ended) and last.task_type in SERVING and ("chief", 0) in tasks:
        reason = f"{last.task} has left, and the chief goes on; this does not count"
        return Decision(Action.AGAIN, reason, LEFT_SECONDS)
    return Decision(Action.WAIT, "no task has failed")


def starts(events: Sequence[Event], task_type: str, index: int) -> int:
    """How often a task was started again: its `STRATAGEM_ATTEMPT`."""
    return sum(
        isinstance(event, Replaced) and (event.task_type, event.index) == (task_type, index)
        for event in events
    )


def _finished(tasks: Sequence[tuple[str, int]], events: Sequence[Event]) -> bool:
    chiefs = [task for task in tasks if task[0] == "chief"]
    # A supervisor may not have the chief, where a job spans several machines.
    decisive = chiefs or [task for task in tasks if task[0] in SERVING]
    last: dict[tuple[str, int], int] = {}
    for event in events:
        if isinstance(event, Ended):
            last[event.task_type, event.index] = event.code
        elif isinstance(event, Replaced):
            last.pop((event.task_type, event.index), None)
    return bool(decisive) and all(last.get(task) == 0 for task in decisive)


def _after_loss(lost: Ended, events: Sequence[Event], limits: Limits) -> Decision:
    serves = lost.task_type in SERVING
    allowed = limits.task_restarts if serves else limits.max_restarts
    if lost.code == PREEMPTED:
        if serves or allowed:
            return Decision(Action.AGAIN, f"{lost.task} has saved and left; this does not count")
        return Decision(Action.GIVE_UP, "preempted after saving, and no restarts are allowed")
    if _at_once(lost, events) >= AT_ONCE_TIMES:
        return Decision(
            Action.GIVE_UP,
            f"{describe(lost)}; it has failed {AT_ONCE_TIMES} times in a row within "
            f"{AT_ONCE_SECONDS:g} s of its start",
        )
    failed = sum(end.code not in (0, PREEMPTED) for end in _ends(lost, events))
    if failed <= allowed:
        then = "it goes on from its journal" if lost.task_type == "chief" else "the others go on"
        return Decision(Action.AGAIN, f"{describe(lost)}; {then}; restart {failed} of {allowed}")
    used = f"all {allowed} restarts of it are used up" if allowed else "no restarts are allowed"
    return Decision(Action.GIVE_UP, f"{describe(lost)}; {used}")


def _at_once(lost: Ended, events: Sequence[Event]) -> int:
    """How many of a task's last ends, without a break, were error exits soon after its start."""
    count, started = 0, 0.0
    for event in events:
        if not isinstance(event, (Ended, Replaced)):
            continue
        if (event.task_type, event.index) != (lost.task_type, lost.index):
            continue
        if isinstance(event, Replaced):
            started = event.at
        elif event.code <= 0 or event.code == PREEMPTED or event.at - started >= AT_ONCE_SECONDS:
            count = 0  # A signal comes from outside.
        else:
            count += 1
    return count


def _ends(lost: Ended, events: Sequence[Event]) -> list[Ended]:
    return [event for event in events if isinstance(event, Ended) and event.task == lost.task]
