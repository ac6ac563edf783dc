"""Who goes on together: the rules, without processes, clocks or sockets."""

from __future__ import annotations

import pytest

from stratagem.cluster.membership import (
    Announce,
    Await,
    Beat,
    Dismiss,
    End,
    Hold,
    Membership,
    Refuse,
    Terms,
    Warn,
)
from stratagem.cluster.regroup import Progress, progress

ALL = ("chief 0", "worker 0", "worker 1")


def start(**terms: float) -> Membership:
    members = Membership(len(ALL))
    effects = [members.hello(ALL[r], r, Terms(**terms), 0.0) for r in (2, 0, 1)]
    assert effects == [[], [], [Announce(ALL, "all tasks are there")]]
    return members


def test_without_permission_a_loss_ends_the_job():
    (end,) = start().gone("worker 0", "its connection closed", 5.0)
    assert isinstance(end, End)
    assert end.why.startswith("worker 0 is lost: its connection closed; the job may not go on")


def test_enough_survivors_go_on_in_the_order_of_their_ranks():
    members = start(min_workers=1)
    why = "chief 0 is lost: its connection closed"
    assert members.gone("chief 0", "its connection closed", 5.0) == [Announce(ALL[1:], why)]
    assert members.gone("worker 1", "x", 6.0) == [Announce(ALL[1:2], "worker 1 is lost: x")]
    assert members.gone("worker 0", "x", 7.0) == []


def test_a_replacement_waits_until_a_member_admits_it_and_gets_its_old_rank():
    members = start(min_workers=2)
    members.gone("chief 0", "x", 5.0)
    assert members.hello("chief 0", 0, Terms(), 9.0) == [Await(("chief 0",))]
    assert members.admit(10.0) == [Announce(ALL, "chief 0 joins")]
    assert members.admit(10.0) == [Await(())]


def test_a_replacement_that_is_lost_while_it_waits_is_not_admitted():
    members = start(min_workers=1)
    members.gone("chief 0", "x", 5.0)
    members.hello("chief 0", 0, Terms(), 9.0)
    assert members.gone("chief 0", "y", 9.5) == [Await(())]
    assert members.admit(10.0) == [Await(())]


def test_who_still_waits_is_told_to_the_members_after_a_loss():
    members = start(min_workers=1)
    members.gone("chief 0", "x", 5.0)
    members.hello("chief 0", 0, Terms(), 9.0)
    announced, awaited = members.gone("worker 0", "y", 9.5)
    assert announced == Announce(("worker 1",), "worker 0 is lost: y")
    assert awaited == Await(("chief 0",))
    (end,) = members.gone("worker 1", "z", 9.9)
    assert end == End("all others were lost before the replacement could join")


def test_a_replacement_is_not_needed_when_all_have_ended():
    members = start(min_workers=1)
    members.gone("chief 0", "x", 5.0)
    members.hello("chief 0", 0, Terms(), 9.0)
    assert members.left("worker 0") == []
    assert members.left("worker 1") == [Dismiss(("chief 0",), "training has ended")]


def test_a_task_that_comes_back_before_its_end_was_seen_was_lost():
    members = start(min_workers=2)
    why = "worker 1 is lost: it was started again"
    expected = [Announce(ALL[:2], why), Await(("worker 1",))]
    assert members.hello("worker 1", 2, Terms(), 9.0) == expected
    assert members.admit(9.5) == [Announce(ALL, "worker 1 joins")]


def test_too_few_survivors_end_or_wait_for_a_replacement():
    (end,) = start(min_workers=3).gone("worker 0", "x", 5.0)
    assert end == End("worker 0 is lost: x; 2 left, at least 3 needed")
    waiting = start(min_workers=3, wait_for_replacement=30)
    hold = Hold("worker 0 is lost: x; 2 left, at least 3 needed")
    assert waiting.gone("worker 0", "x", 5.0) == [hold]
    for task in ("chief 0", "worker 1"):
        waiting.heard(task, Beat(), 34.9)
    assert waiting.tick(34.9) == []
    assert waiting.tick(35.0) == [End("worker 0 is lost: x; no replacement came in 30 s")]


def test_a_replacement_in_time_ends_the_wait():
    members = start(min_workers=3, wait_for_replacement=30)
    members.gone("worker 0", "x", 5.0)
    # They go on to where it can begin.
    expected = [Announce(("chief 0", "worker 1"), "worker 0 is there"), Await(("worker 0",))]
    assert members.hello("worker 0", 1, Terms(), 20.0) == expected
    assert members.tick(29.0) == []
    assert members.admit(29.0) == [Announce(ALL, "worker 0 joins")]


def test_who_says_goodbye_is_not_lost():
    members = start(min_workers=1)
    members.left("worker 0")
    assert members.gone("worker 0", "its connection closed", 5.0) == []


def test_a_task_too_many_is_refused():
    (refusal,) = start().hello("worker 9", 9, Terms(), 5.0)
    assert isinstance(refusal, Refuse)
    assert "worker 9 comes to a job that has started" in refusal.why


def test_silence_is_a_loss():
    members = start(min_workers=1, silence_seconds=10)
    members.heard("chief 0", Beat(), 9.0)
    members.heard("worker 1", Beat(), 9.0)
    (announced,) = members.tick(10.0)
    assert isinstance(announced, Announce)
    assert announced.members == ("chief 0", "worker 1")
    assert "worker 0 is lost: no sign of life for 10 s" in announced.why


def beats(members: Membership, now: float, **steps: tuple[int, bool, float]) -> None:
    for name, (step, busy, seconds) in steps.items():
        beat = Beat(step, busy, seconds, f"training step {step}")
        members.heard(name.replace("_", " "), beat, now)


def test_a_late_step_names_who_has_not_come_to_it():
    members = start(stall_seconds=60)
    beats(members, 70.0, chief_0=(7, True, 59.0), worker_0=(7, True, 58.0), worker_1=(6, False, 5))
    assert members.tick(70.0) == []
    (end,) = members.tick(71.5)
    assert isinstance(end, End)
    assert end.dump == ("worker 1", "chief 0")  # who is late, and one of those that wait
    assert "Expected step 7 since the last change (training step 7) to finish within 60" in end.why
    assert "worker 1 (has been outside of any step after step 6" in end.why


def test_a_late_step_that_all_have_come_to_shows_them_all():
    members = start(stall_seconds=60)
    beats(members, 70.0, chief_0=(7, True, 61), worker_0=(7, True, 61), worker_1=(7, True, 61))
    (end,) = members.tick(70.0)
    assert isinstance(end, End)
    assert end.dump == ALL
    assert "All workers are in it and none goes on" in end.why


def test_a_step_of_a_minute_is_said_once_a_minute():
    members = start(stall_seconds=1800)
    for now in range(70, 191):
        since = now - 10
        beats(members, now, chief_0=(7, True, since), worker_0=(6, False, 5), worker_1=(7, True, 1))
        effects = members.tick(now)
        assert bool(effects) == (now in (70, 130, 190))
    (warning,) = effects
    assert isinstance(warning, Warn)
    assert warning.why.startswith(
        "chief 0 has been in step 7 since the last change (training step 7) for"
    )
    assert "; after 1800 s the job ends. Missing: worker 0 (has been outside of any" in warning.why
    assert "Every process must make the same calls in the same order" in warning.why


def test_who_has_ended_is_not_waited_for_until_the_deadline():
    members = start(stall_seconds=1800, silence_seconds=10)
    members.left("worker 1")
    beats(members, 12.0, chief_0=(7, True, 10.5), worker_0=(7, True, 9))
    (end,) = members.tick(12.0)
    assert isinstance(end, End)
    assert "to finish within 10 s" in end.why
    assert "Missing: worker 1 (its program has ended)" in end.why


def test_a_program_that_has_ended_is_named():
    members = start(stall_seconds=60)
    members.left("worker 1")
    members.gone("worker 1", "x", 1.0)
    beats(members, 70.0, chief_0=(7, True, 61), worker_0=(7, True, 61))
    (end,) = members.tick(70.0)
    assert isinstance(end, End)
    assert "Missing: worker 1 (its program has ended)" in end.why


def test_survivors_go_on_from_the_last_step_that_all_have_finished():
    assert progress([7, 7]) == Progress(7, 0, ())
    assert progress([None, 8, 7]) == Progress(7, 2, (0,))


def test_what_memory_cannot_save_is_said():
    with pytest.raises(RuntimeError, match="has the state of the training. Got only new ones"):
        progress([None, None])
    with pytest.raises(RuntimeError, match="differ by one step at most. Got finished steps .*9"):
        progress([7, 9])
