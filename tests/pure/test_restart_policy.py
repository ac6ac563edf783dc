"""What is done when a task is lost: a table of events, limits, and the decision."""

from __future__ import annotations

import re

import pytest

from stratagem.recovery.policy import (
    Action,
    Ended,
    LetGo,
    Limits,
    Replaced,
    Restarted,
    ServiceLost,
    decide,
    describe,
    describe_code,
    first_failure,
)

TWO = [("worker", 0), ("worker", 1)]
THREE = [("chief", 0), ("worker", 0), ("worker", 1)]
EVALUATED = [*TWO, ("evaluator", 0)]

NONE = Limits()
ONCE = Limits(max_restarts=1)
MEMORY = Limits(max_restarts=1, min_workers=1)
REPLACING = Limits(max_restarts=2, min_workers=2, wait_for_replacement=30)


def end(task: str, code: int, at: float = 2.5) -> Ended:
    kind, index = task.split()
    return Ended(kind, int(index), code, at)


W0, W1 = "worker 0", "worker 1"
TABLE = [
    # Nothing to do.
    (TWO, [], NONE, Action.WAIT, "no task has failed"),
    (TWO, [end(W0, 0)], NONE, Action.WAIT, "no task has failed"),
    (TWO, [end(W0, 0), end(W1, 0)], NONE, Action.FINISH, "exit code 0"),
    (EVALUATED, [end(W0, 0), end(W1, 0)], NONE, Action.FINISH, "exit code 0"),
    ([("ps", 0)], [end("ps 0", 1)], NONE, Action.GIVE_UP, "ps 0, exit code 1"),
    # Failures.
    (TWO, [end(W1, 1)], NONE, Action.GIVE_UP, "worker 1, exit code 1, 2.5 s after start; no res"),
    (TWO, [end(W1, 1)], ONCE, Action.RESTART, "worker 1, exit code 1, .*; restart 1 of 1"),
    (TWO, [end(W0, 43), end(W1, -9)], ONCE, Action.RESTART, r"worker 1, signal 9 \(SIGKILL: "),
    (TWO, [end(W0, 43)], ONCE, Action.RESTART, "worker 0, exit code 43: a peer was lost"),
    (TWO, [end(W0, 0), end(W1, 1)], ONCE, Action.RESTART, "restart 1 of 1"),
    (TWO, [end(W1, 1), Restarted()], ONCE, Action.WAIT, "no task has failed"),
    (TWO, [end(W1, 1), Restarted(), end(W0, 3)], ONCE, Action.GIVE_UP, "worker 0.* all 1 restarts"),
    # Preemption.
    (TWO, [end(W0, 42)], ONCE, Action.WAIT, "the others are saving too"),
    (TWO, [end(W0, 42), end(W1, 42)], NONE, Action.GIVE_UP, "no restarts are allowed"),
    (TWO, [end(W0, 42), end(W1, 42)], ONCE, Action.RESTART, "does not count as a failure"),
    (TWO, [end(W0, 42), end(W1, 43)], MEMORY, Action.RESTART, "worker 1, exit code 43"),
    (
        TWO,
        [end(W0, 42), end(W1, 42), Restarted(after_preemption=True), end(W0, 1)],
        ONCE,
        Action.RESTART,
        "restart 1 of 1",
    ),
    # The coordination service.
    (TWO, [ServiceLost(1, 0.5)], ONCE, Action.RESTART, "coordination service, exit code 1, 0.5 s"),
    (TWO, [ServiceLost(1, 0.5), end(W0, 43)], MEMORY, Action.RESTART, "coordination service"),
    (TWO, [end(W0, 0), end(W1, 0), ServiceLost(1, 9)], NONE, Action.FINISH, "exit code 0"),
    # From memory.
    (THREE, [end(W1, -9)], MEMORY, Action.CONTINUE, "lost worker 1.*; 2 left, at least 1 needed"),
    (THREE, [end(W1, -9), LetGo("worker", 1)], MEMORY, Action.WAIT, "no task has failed"),
    (
        THREE,
        [end(W1, -9), LetGo("worker", 1), end(W0, 0), end("chief 0", 0)],
        MEMORY,
        Action.FINISH,
        "exit code 0",
    ),
    (
        THREE,
        [end(W1, -9), LetGo("worker", 1), end(W0, 43), end("chief 0", 43)],
        MEMORY,
        Action.RESTART,
        "worker 0, exit code 43",
    ),
    (TWO, [end(W1, 1), end(W0, 43)], MEMORY, Action.RESTART, "worker 1, exit code 1"),
    (TWO, [end(W0, 0), end(W1, 1)], MEMORY, Action.RESTART, "worker 1, exit code 1"),
    # With replacements.
    (
        THREE,
        [end(W1, -9)],
        REPLACING,
        Action.REPLACE,
        "2 left, at least 2 needed; its replacement has 30 s to join",
    ),
    (TWO, [end(W1, -9)], REPLACING, Action.REPLACE, "1 left, at least 2 needed"),
    (TWO, [end(W1, -9), Replaced("worker", 1)], REPLACING, Action.WAIT, "no task has failed"),
    (
        THREE,
        [end(W1, 1), Replaced("worker", 1), end(W1, 1), Replaced("worker", 1), end(W1, 1)],
        REPLACING,
        Action.CONTINUE,
        "2 left, at least 2 needed$",
    ),
    (
        TWO,
        [end(W1, 1), Replaced("worker", 1), end(W1, 1), Replaced("worker", 1), end(W1, 1)],
        REPLACING,
        Action.GIVE_UP,
        "all 2 restarts are used up",
    ),
    (EVALUATED, [end("evaluator 0", 1)], ONCE, Action.REPLACE, "training goes on"),
    (EVALUATED, [end("evaluator 0", 1)], NONE, Action.GIVE_UP, "evaluator 0, exit code 1"),
]


@pytest.mark.parametrize(("tasks", "events", "limits", "action", "reason"), TABLE)
def test_decision(tasks, events, limits, action, reason):
    decision = decide(tasks, events, limits)
    assert decision.action is action, decision
    assert re.search(reason, decision.reason), decision


def test_a_task_that_lost_a_peer_is_not_to_blame():
    events = [end(W0, 43, 1), end(W1, -11, 2)]
    assert first_failure(events) == events[1]
    assert first_failure(events[:1]) == events[0]


def test_what_was_forgiven_is_not_to_blame():
    lost = [end(W1, -9, 1), LetGo("worker", 1), end(W0, 1, 5)]
    assert first_failure(lost) == lost[2]
    assert first_failure([end(W1, 1), Replaced("worker", 1)]) is None
    assert first_failure([end(W1, 1), Restarted()]) is None
    assert first_failure([end(W0, 0), end(W1, 42)]) is None


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exit code 3"),
        (42, "exit code 42: preempted after saving"),
        (43, "exit code 43: a peer was lost"),
        (-9, "signal 9 (SIGKILL: killed from outside, often for want of memory)"),
        (-15, "signal 15 (SIGTERM)"),
        (-99, "signal 99 (unknown)"),
    ],
)
def test_codes_are_described(code, text):
    assert describe_code(code) == text
    assert describe(end(W1, code)) == f"worker 1, {text}, 2.5 s after start"
