"""What is done when a task of a job with parameter servers is lost, as a table."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.recovery.policy import Action, Ended, Event, Limits, Replaced, first_failure
from stratagem.recovery.serving_policy import AT_ONCE_TIMES, decide, starts

SERVED = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
EVALUATED = [*SERVED, ("evaluator", 0)]
SHARE = [("worker", 2), ("ps", 2)]  # of a job over several machines

NONE = Limits(max_restarts=0, task_restarts=0)
DEFAULT = Limits()
TWICE = Limits(max_restarts=2, task_restarts=2)


def end(task: str, code: int, at: float = 60.0) -> Ended:
    kind, index = task.split()
    return Ended(kind, int(index), code, at)


def again(task: str, at: float = 60.0) -> Replaced:
    kind, index = task.split()
    return Replaced(kind, int(index), at)


def times(n: int, task: str, code: int, ran: float = 60.0) -> list[Event]:
    """A task that has ended n times, each some seconds after its start; the last is not answered"""
    events: list[Event] = []
    for i in range(n):
        events += [end(task, code, 100 * i + ran), again(task, 100 * (i + 1))]
    return events[:-1]


TABLE = [
    # Nothing to do.
    (SERVED, [], DEFAULT, Action.WAIT, "no task has failed"),
    (EVALUATED, [end("evaluator 0", 0)], DEFAULT, Action.WAIT, "no task has failed"),
    (SERVED, [end("chief 0", 0)], DEFAULT, Action.FINISH, "the chief has ended"),
    (EVALUATED, [end("chief 0", 0)], DEFAULT, Action.FINISH, "the chief has ended"),
    (SERVED, [end("ps 0", -9), again("ps 0")], DEFAULT, Action.WAIT, "no task has failed"),
    # Workers and servers.
    (
        SERVED,
        [end("ps 1", -9)],
        DEFAULT,
        Action.AGAIN,
        r"ps 1, signal 9 .*; the others go on; restart 1 of 3$",
    ),
    (SERVED, times(3, "worker 1", -9), DEFAULT, Action.AGAIN, "restart 3 of 3"),
    (SERVED, times(4, "worker 1", -9), DEFAULT, Action.GIVE_UP, "all 3 restarts of it are used"),
    (SERVED, [end("worker 0", 1)], NONE, Action.GIVE_UP, "worker 0, exit code 1, .* no restarts"),
    (
        SERVED,
        [*times(3, "worker 1", -9), again("worker 1"), end("worker 0", -9)],
        DEFAULT,
        Action.AGAIN,
        "worker 0.*restart 1 of 3",
    ),
    (SERVED, times(9, "ps 0", 42), DEFAULT, Action.AGAIN, "saved and left; this does not count"),
    (SERVED, [end("worker 0", 0)], NONE, Action.AGAIN, "has left, and the chief goes on; this"),
    (SERVED, [end("ps 0", 0), end("chief 0", 0)], NONE, Action.FINISH, "the chief has ended"),
    # One that fails at once each time.
    (SERVED, times(2, "ps 0", 2, ran=3), DEFAULT, Action.AGAIN, "restart 2 of 3"),
    (
        SERVED,
        times(3, "ps 0", 2, ran=3),
        Limits(task_restarts=100),
        Action.GIVE_UP,
        "ps 0, exit code 2.*has failed 3 times in a row within 10 s of its start",
    ),
    (
        SERVED,
        [*times(2, "ps 0", 2, ran=3), again("ps 0", 200), *times(1, "ps 0", 42, ran=201)],
        TWICE,
        Action.AGAIN,
        "does not count",
    ),
    (SERVED, times(9, "ps 0", -9, ran=3), Limits(task_restarts=100), Action.AGAIN, "9 of 100"),
    (SERVED, times(9, "ps 0", 1, ran=20), Limits(task_restarts=100), Action.AGAIN, "9 of 100"),
    # The user's program.
    (SERVED, [end("chief 0", -9)], DEFAULT, Action.GIVE_UP, "chief 0, signal 9.*no restarts are"),
    (SERVED, [end("chief 0", 1)], DEFAULT, Action.GIVE_UP, "chief 0, exit code 1"),
    (
        SERVED,
        [end("chief 0", -9)],
        TWICE,
        Action.AGAIN,
        "it goes on from its journal; restart 1 of 2",
    ),
    (SERVED, times(3, "chief 0", 1), TWICE, Action.GIVE_UP, "all 2 restarts of it are used up"),
    (SERVED, [end("chief 0", 42)], DEFAULT, Action.GIVE_UP, "preempted after saving"),
    (SERVED, [end("chief 0", 42)], TWICE, Action.AGAIN, "does not count"),
    (
        SERVED,
        [end("chief 0", -9), again("chief 0"), end("chief 0", 0)],
        TWICE,
        Action.FINISH,
        "the chief has ended",
    ),
    (EVALUATED, [end("evaluator 0", 1)], DEFAULT, Action.GIVE_UP, "evaluator 0, exit code 1"),
    (EVALUATED, [end("evaluator 0", 1)], TWICE, Action.AGAIN, "the others go on"),
    # A machine that has not the chief.
    (SHARE, [end("worker 2", 0)], DEFAULT, Action.WAIT, "no task has failed"),
    (SHARE, [end("worker 2", 0), end("ps 2", 0)], DEFAULT, Action.FINISH, "exit code 0"),
    (SHARE, [end("worker 2", -9)], DEFAULT, Action.AGAIN, "restart 1 of 3"),
]


@pytest.mark.parametrize(("tasks", "events", "limits", "action", "reason"), TABLE)
def test_decision(tasks, events, limits, action, reason):
    decision = decide(tasks, events, limits)
    assert decision.action is action, decision
    assert re.search(reason, decision.reason), decision


def test_one_that_has_left_is_started_again_only_if_the_chief_goes_on():
    assert decide(SERVED, [end("ps 0", 0)], DEFAULT).seconds == 5
    assert decide(SERVED, [end("ps 0", -9)], DEFAULT).seconds == 0


def test_a_task_counts_its_own_starts():
    events = [end("ps 0", -9), again("ps 0"), end("ps 1", -9), again("ps 1"), *times(1, "ps 0", -9)]
    assert [starts(events, *task) for task in SERVED] == [0, 0, 0, 1, 1]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(EVALUATED),
            st.sampled_from([-9, -11, 0, 1, 2, 42]),
            st.floats(0.0, 30.0),
        ),
        max_size=40,
    ),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_any_job_ends_or_goes_on_with_all_its_tasks(ends, max_restarts, task_restarts):
    """Plays a job: each task that ends is started again or not, as decided."""
    limits = Limits(max_restarts, task_restarts=task_restarts)
    running, events, now = set(EVALUATED), [], 0.0
    failed = dict.fromkeys(EVALUATED, 0)
    for task, code, ran in ends:
        if task not in running:
            continue
        now += ran
        running.discard(task)
        events.append(Ended(*task, code, now))
        decision = decide(EVALUATED, events, limits)
        if decision.action is Action.FINISH:
            assert task == ("chief", 0)
            assert code == 0
            return
        if decision.action is Action.GIVE_UP:
            assert code == 42 or first_failure(events) == events[-1]
            assert failed[task] >= min(
                task_restarts if task[0] in ("worker", "ps") else max_restarts, AT_ONCE_TIMES - 1
            )
            return
        if code == 0 and task[0] == "evaluator":
            assert decision.action is Action.WAIT
            continue
        assert decision.action is Action.AGAIN
        failed[task] += code not in (0, 42)
        events.append(Replaced(*task, now))
        running.add(task)
        assert failed[task] == sum(
            isinstance(e, Ended) and (e.task_type, e.index) == task and e.code not in (0, 42)
            for e in events
        )
