"""Schedule, join, done and errors as TensorFlow has them, and what is said when time runs out."""

from __future__ import annotations

import pytest

from stratagem.coordinator.consistency import Bounded, Synchronous
from stratagem.coordinator.instructions import (
    Cancel,
    Commit,
    Counted,
    Dispatch,
    Forget,
    Go,
    Install,
    NotDone,
    Pause,
    Raise,
    Released,
    Resolve,
    Restore,
    Resume,
    Snapshot,
    Wait,
    Wake,
    Warn,
)
from stratagem.coordinator.state import State, Terms
from stratagem.errors import JobMismatchError, PeerTimeoutError


def start(workers: int = 2, **terms) -> State:
    state = State(Terms(**terms))
    for index in range(workers):
        state.add_worker(f"worker {index}", f"host:{index}", 0.0)
        state.worker_up(f"worker {index}", 1, 0.0)
    state.add_server("ps 0", "host:9", 0.0)
    state.server_up("ps 0", 1, True, 0.0)
    return state


def finish(state: State, worker: int, closure: int, outcome="ok", now=0.0, **fields):
    return state.finished(f"worker {worker}", 1, closure, outcome, now, **fields)


def kinds(instructions) -> list[type]:
    return [type(each) for each in instructions]


def texts(instructions) -> str:
    return "\n".join(each.text for each in instructions if isinstance(each, Warn))


def raised(state: State, now: float) -> str:
    answer, _ = state.ask("join", now)
    assert isinstance(answer, Raise)
    assert isinstance(answer.error, PeerTimeoutError | JobMismatchError)
    return str(answer.error)


def test_the_first_error_is_raised_once_after_all_in_flight_was_cancelled_and_waited_for():
    state = start(depth=1)
    for _ in range(4):
        state.schedule(0.0)
    assert isinstance(state.ask("join", 0.0)[0], Wait)
    error = ValueError("bad")
    out = finish(state, 0, 0, "error", result=error)
    assert out[0] == Resolve(0, "error", error)
    assert Wake() in out
    answer, out = state.ask("join", 0.0)
    assert isinstance(answer, Wait)
    assert Resolve(3, "cancelled") in out, "queued ones are dropped"
    assert Cancel("worker 1", 1) in out
    assert Dispatch not in kinds(out)
    finish(state, 1, 1, "aborted")
    out = finish(state, 0, 2, "error", result=ValueError("second"))
    assert Wake() in out
    answer, _ = state.ask("join", 0.0)
    assert answer == Raise(error)
    assert isinstance(state.ask("join", 0.0)[0], Go)
    assert isinstance(state.ask("done", 0.0)[0], Go)
    assert kinds(state.schedule(0.0)[1]) == [Dispatch]
    assert isinstance(state.ask("done", 0.0)[0], NotDone)


def test_a_full_queue_makes_schedule_wait_until_a_worker_takes_one():
    state = start(1, depth=1, queue_limit=1)
    state.schedule(0.0)
    state.schedule(0.0)
    assert isinstance(state.ask("schedule", 0.0)[0], Wait)
    with pytest.raises(RuntimeError, match="Expected the state to be asked before"):
        state.schedule(0.0)
    assert Wake() in finish(state, 0, 0)
    assert isinstance(state.ask("schedule", 0.0)[0], Go)


def test_a_closure_of_a_lost_worker_runs_elsewhere_first_and_its_first_answer_counts():
    state = start(depth=1)
    for _ in range(3):
        state.schedule(0.0)
    assert state.worker_down("worker 0", "silent", 1.0) == []
    (again, *_) = [each for each in finish(state, 1, 1) if isinstance(each, Dispatch)]
    assert (again.worker, again.closure) == ("worker 1", 0)
    late = finish(state, 0, 0, result="late")
    assert late[:3] == [Cancel("worker 1", 0), Resolve(0, "ok", "late"), Counted(0, None, False)]
    assert finish(state, 1, 0)[0].closure == 2
    assert state.counts.finished == 2


def test_without_workers_a_deadline_names_them():
    state = start(2, worker_seconds=100)
    state.schedule(0.0)
    state.worker_down("worker 0", "silent for 5 s", 1.0)
    state.worker_down("worker 1", "connection closed", 1.0)
    state.tick(2.0)
    assert "1 closures have waited for a worker for 60 s" in texts(state.tick(62.0))
    state.tick(102.0)
    text = raised(state, 102.0)
    assert "Expected a worker for 1 closures within 100 s" in text
    assert "worker 0 at host:0: silent for 5 s; worker 1 at host:1: connection closed" in text


def test_a_lost_server_pauses_and_what_is_lost_is_said():
    state = start(1)
    state.schedule(0.0)
    finish(state, 0, 0)
    (pause,) = state.server_down("ps 0", "connection closed", 1.0)
    assert isinstance(pause, Pause)
    assert "ps 0 at host:9 is lost: connection closed" in pause.why
    assert state.schedule(1.0)[1] == []
    assert state.server_up("ps 0", 2, False, 2.0) == [Restore("ps 0")]
    out = state.restored("ps 0", 3.0)
    assert "ps 0 at host:9 is restored; at most 1 pushes to it are lost" in texts(out)
    assert kinds(out) == [Warn, Resume, Dispatch]
    assert state.lost_pushes == 1


def test_a_server_that_stays_away_is_an_error_that_says_what_to_do():
    state = start(1, server_seconds=30)
    state.server_down("ps 0", "killed", 1.0)
    assert state.tick(30.9) == []
    state.tick(31.0)
    text = raised(state, 31.0)
    assert "Expected ps 0 at host:9 to serve again within 30 s" in text
    assert "out of reach (killed). Start it again at that address" in text


def test_snapshots_are_asked_for_and_bound_what_can_be_lost():
    state = start(1, snapshot_closures=2)
    for number in range(3):
        state.schedule(0.0)
        finish(state, 0, number)
    assert state.tick(1.0) == [Snapshot(1)]
    assert state.tick(2.0) == []
    assert "Expected snapshot 1" in texts(state.snapshot_failed(1, "disk full", 2.0))
    state.schedule(3.0)
    finish(state, 0, 3)
    state.schedule(3.0)
    finish(state, 0, 4)
    assert state.tick(4.0) == [Snapshot(2)]
    state.snapshot_written(2, 5.0)
    state.schedule(5.0)
    finish(state, 0, 5)
    state.server_up("ps 0", 2, False, 6.0)
    assert "at most 1 pushes" in texts(state.restored("ps 0", 7.0))


def test_what_changes_no_variables_is_counted_as_such():
    state = start(1)
    state.schedule(0.0, pushes=False)
    assert Counted(0, None, False, pushes=False) in finish(state, 0, 0)
    assert kinds(state.tick(1e9)) == []  # nothing for a snapshot


def test_the_last_incomplete_round_ends_with_join():
    state = start(2, consistency=Synchronous())
    for _ in range(3):
        state.schedule(0.0)
    finish(state, 0, 0, rows=3)
    out = finish(state, 1, 1, rows=1)
    assert out[-1] == Commit(0, (0, 1), (0.75, 0.25))
    assert kinds(state.committed(0, 0.0)) == [Counted, Counted, Dispatch]
    finish(state, 0, 2)
    answer, out = state.ask("join", 0.0)
    assert isinstance(answer, Wait)
    assert out == [Commit(1, (2,), (1.0,))]
    assert Wake() in state.committed(1, 0.0)


def test_a_round_that_a_server_could_not_apply_is_computed_again():
    state = start(2, consistency=Synchronous())
    state.schedule(0.0)
    state.schedule(0.0)
    finish(state, 0, 0, rows=1)
    assert Commit(0, (0, 1), (0.5, 0.5)) in finish(state, 1, 1, rows=1)
    assert state.lacks(7, 0.0) == []  # a round of before
    again = state.lacks(0, 0.0)
    assert [(each.closure, each.round) for each in again] == [(0, 0), (1, 0)]
    finish(state, 0, 0, rows=1)
    assert Commit(0, (0, 1), (0.5, 0.5)) in finish(state, 1, 1, rows=1)
    assert Counted in kinds(state.committed(0, 0.0))
    assert state.counts.finished == 2


def test_workers_have_more_in_hand_where_closures_are_short():
    state = start(1, short_depth=8, ahead=0.02)
    for _ in range(200):
        state.schedule(0.0)
    (worker,) = state._workers
    now, sizes = 0.0, {}
    for seconds in (0.001, 1.0):
        for _ in range(80):
            now += seconds
            finish(state, 0, next(iter(worker.held)), now=now)
        sizes[seconds] = len(worker.held)
    assert sizes == {0.001: 8, 1.0: 2}


def test_a_late_gradient_is_dropped_and_its_rows_are_counted():
    state = start(3, consistency=Synchronous(backup=1))
    for _ in range(3):
        state.schedule(0.0)
    finish(state, 0, 0)
    assert finish(state, 1, 1)[-1] == Commit(0, (0, 1), (0.5, 0.5))
    state.committed(0, 0.0)
    assert Counted(2, None, True) in finish(state, 2, 2, rows=8)
    assert (state.counts.dropped, state.counts.dropped_rows) == (1, 8)


def test_accounted_datasets_have_names():
    state = start(1)
    state.add_dataset("epoch", 0.0)
    state.add_dataset("other", 0.0)
    with pytest.raises(ValueError, match="Got 'third'; there are: 'epoch', 'other'"):
        state.schedule(0.0, dataset="third")
    with pytest.raises(ValueError, match="Expected a new key"):
        state.add_dataset("other", 0.0)


def test_closures_of_a_dataset_that_is_released_end():
    state = start(1, depth=1)
    state.add_dataset("epoch", 0.0)
    assert kinds(state.schedule(0.0, dataset="epoch")[1]) == [Dispatch]
    assert state.schedule(0.0, dataset="epoch")[1] == []
    assert state.release_dataset("epoch", 0.0) == [Resolve(1, "ended")]


def test_a_worker_that_keeps_no_program_is_an_error():
    state = start(1)
    state.schedule(0.0)
    for _ in range(3):
        assert kinds(finish(state, 0, 0, "needs-program")) == [Install, Dispatch]
    finish(state, 0, 0, "needs-program")
    assert "Expected worker 0 at host:0 to execute closure 0" in raised(state, 0.0)


def test_a_closure_that_never_comes_through_is_an_error():
    state = start(1, server_seconds=2, retry_seconds=1.0)
    state.schedule(0.0)
    assert finish(state, 0, 0, "aborted", 0.0, result="ps 0 silent") == []
    assert kinds(state.tick(1.0)) == [Dispatch]
    finish(state, 0, 0, "aborted", 2.5, result="ps 0 silent")
    text = raised(state, 2.5)
    assert "Got it back from workers 2 times" in text
    assert "the last time: ps 0 silent" in text


def test_a_cancelled_closure_without_an_answer_is_not_waited_for_for_ever():
    state = start(2, depth=1, cancel_seconds=5)
    state.schedule(0.0)
    state.schedule(0.0)
    finish(state, 1, 1, "error", 1.0, result=KeyError("x"))
    assert Cancel("worker 0", 0) in state.ask("join", 1.0)[1]
    assert state.tick(5.9) == []
    out = state.tick(6.0)
    assert "Expected cancelled closure 0 to be answered within 5 s" in texts(out)
    assert Resolve(0, "cancelled") in out


def test_an_idle_worker_executes_what_waits_on_a_busy_one():
    state = start(1)
    state.schedule(0.0)
    state.schedule(0.0)
    assert state.worker_up("worker 1", 1, 0.05) == []
    out = state.tick(1.0)
    assert out[0] == Cancel("worker 0", 1)
    assert (out[1].worker, out[1].closure) == ("worker 1", 1)
    assert finish(state, 1, 1)[0] == Cancel("worker 0", 1) or state.counts.finished == 1


def test_a_removed_worker_leaves_when_it_has_answered():
    state = start(2, depth=1)
    state.schedule(0.0)
    assert state.remove_worker("worker 0", 0.0) == []
    assert Released("worker 0") in finish(state, 0, 0)
    assert state.schedule(0.0)[1][0].worker == "worker 1"


def test_a_worker_that_was_removed_before_it_came_gets_nothing():
    state = start(1)
    state.add_worker("worker 1", "host:1", 0.0)
    assert state.remove_worker("worker 1", 0.0) == [Released("worker 1")]
    assert state.worker_up("worker 1", 1, 0.0) == []
    for _ in range(2):
        assert {each.worker for each in state.schedule(0.0)[1]} == {"worker 0"}
    state.add_worker("worker 1", "host:1", 0.0)
    state.worker_up("worker 1", 1, 0.0)
    assert state.schedule(0.0)[1][0].worker == "worker 1"


def test_a_slow_closure_is_said():
    state = start(1)
    state.schedule(0.0, what="step (train.py:7)")
    assert texts(state.tick(59.0)) == ""
    said = "worker 0 at host:0 has had step (train.py:7) in hand for 61 s. Nothing ends a step but "
    assert said + "itself; it may be that it computes so long: look" in texts(state.tick(61.0))
    assert texts(state.tick(120.0)) == ""
    assert "for 122 s" in texts(state.tick(122.0))


def test_a_dataset_that_gives_nothing_more_is_said():
    state = start(2)
    for _ in range(2):
        state.schedule(0.0, iterators=("i",), what="step (train.py:7)")
    said = "for 61 s, and 1 other workers are as slow. Nothing ends a step but itself; it may be "
    assert said + "that it waits for its iterator, whose dataset gives no" in texts(
        state.tick(61.0)
    )


def test_the_end_of_iterators_on_lost_workers_is_said():
    state = start(2, depth=1)
    state.schedule(0.0, iterators=("i",))
    state.schedule(0.0, iterators=("i",))
    finish(state, 1, 1, "data-ended", iterator="i")
    out = state.worker_down("worker 0", "x", 0.0)
    assert "Closure 0 was on a worker that is lost" in texts(out)
    assert [each.outcome for each in out if isinstance(each, Resolve)] == ["ended", "ended"]


def test_an_iterator_is_forgotten_when_no_closure_needs_it():
    """Not before, though the worker that reads it is lost and another one begins anew."""
    state = start(2, depth=1)
    assert state.release_iterator("other", 0.0) == [Forget("other")]
    state.schedule(0.0, iterators=("i",))
    state.schedule(0.0, iterators=("i",))
    state.schedule(0.0, iterators=("i",))
    assert state.release_iterator("i", 0.0) == []
    assert Forget("i") not in state.worker_down("worker 0", "killed", 1.0)
    assert kinds(finish(state, 1, 1)) == [Resolve, Counted, Dispatch]
    assert kinds(finish(state, 1, 0)) == [Resolve, Counted, Dispatch]
    assert Forget("i") in finish(state, 1, 2)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Bounded(-1), "Expected max_staleness of at least 0. Got -1"),
        (lambda: Synchronous(backup=-1), "Expected backup of at least 0 workers. Got -1"),
        (lambda: Terms(depth=0), "Expected depth of at least 1. Got 0"),
        (lambda: start().schedule(0.0, dataset="x"), "Got 'x'; there are: none"),
        (lambda: finish_wrong(), "Expected an outcome .* Got 'odd'"),
    ],
)
def test_misuse_is_said(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def finish_wrong():
    state = start()
    state.schedule(0.0)
    finish(state, 0, 0, "odd")
