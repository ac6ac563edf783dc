"""No wait is silent: who is dead, stopped, asleep, gone or of another program is named by all."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]

from jobs import Ended, Job

pytestmark = pytest.mark.processes
SECONDS = 90.0
SAME_CALLS = "Every process must make the same calls in the same order"
IN_STEP_3 = "in step 3 since the last change, a train step of model 'small', for"


def waiting(folder: Path, what: str, who: int = 1, seconds: float = 0) -> Job:
    return Job("waiting", 2, 1, [what, str(who), str(seconds), str(folder)])


def until_it_acts(job: Job, folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not (folder / "acts").exists():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in job.processes.values())
        time.sleep(0.02)


def ends(job: Job) -> list[Ended]:
    ended = job.wait(SECONDS)
    assert not any("*** Check failure stack trace" in end.output for end in ended.values()), ended
    return list(ended.values())


def test_who_is_killed_is_named(tmp_path):
    with waiting(tmp_path, "kill") as job:
        first, killed = ends(job)
    assert (first.code, killed.code) == (43, -signal.SIGKILL), first
    assert "stratagem: worker 1 is lost: its connection closed; the job may not go" in first.output
    assert f"(this is worker 0, {IN_STEP_3}" in first.output
    assert f" s). worker 1 is at {job.addresses[1]}." in first.output
    assert "Traceback" not in first.output


def test_who_is_stopped_is_named_and_ends_once_it_goes_on(tmp_path):
    with waiting(tmp_path, "stop") as job:
        job.processes[0].wait(SECONDS)
        job.processes[1].send_signal(signal.SIGCONT)
        first, stopped = ends(job)
    assert first.code == 43, first
    # What it is told of is over by then. JAX's own thread may be first to see that, and aborts.
    assert stopped.code in (43, -signal.SIGABRT), stopped
    assert "worker 1 is lost: no sign of life for 10 s (it is stopped, or out of" in first.output
    assert f"(this is worker 0, {IN_STEP_3}" in first.output
    if stopped.code == 43:
        assert "stratagem: worker 1" in stopped.output  # is lost, or its service is gone


def test_who_sleeps_is_named_and_shows_where(tmp_path):
    with waiting(tmp_path, "sleep", seconds=4) as job:
        first, late = ends(job)
    assert (first.code, late.code) == (43, 43), (first, late)
    for end in (first, late):
        assert "Expected step 3 since the last change (a train step of model" in end.output
        assert "'small') to finish within 4 s. worker 0 has been in it for" in end.output
        assert "Missing: worker 1 (has been outside of any step after step 2" in end.output
        assert SAME_CALLS in end.output
    assert "in oversleep\n    time.sleep(1000)" in late.output
    assert "in oversleep" not in first.output


def test_who_fails_keeps_its_traceback_and_the_others_say_what_it_is(tmp_path):
    with waiting(tmp_path, "raise", who=0) as job:  # the one that hosts the service
        failed, other = ends(job)
    assert (failed.code, other.code) == (1, 43), (failed, other)
    assert failed.output.rstrip().endswith("ValueError: no such image: cat.png")
    why = "worker 0 is lost: it has failed with ValueError: no such image: cat.png; the job may"
    assert why in other.output
    assert "Traceback" not in other.output


def test_a_program_that_ends_early_is_named(tmp_path):
    with waiting(tmp_path, "leave") as job:
        first, left = ends(job)
    assert (first.code, left.code) == (43, 0), (first, left)
    assert "Expected " in first.output
    assert "a train step of model 'small'" in first.output
    # Gloo tells at once that its connection is closed; where it does not, the service does later.
    assert "worker 1: the program has ended." in first.output or (
        "Missing: worker 1 (its program has ended)" in first.output
    )
    assert SAME_CALLS in first.output
    assert "in train\n    model.fit(" in first.output


def test_a_metric_that_only_one_reads_is_named(tmp_path):
    with waiting(tmp_path, "read", who=0, seconds=4) as job:
        first, late = ends(job)
    assert (first.code, late.code) == (43, 43), (first, late)
    for end in (first, late):
        assert "(a gather, such as of a metric's result or of a variable that is summed on" in (
            end.output
        )
        assert f"{SAME_CALLS}, also those that only the chief needs" in end.output
    assert "in main\n    metric.result()" in first.output
    assert "in oversleep" in late.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits_in_a_step(tmp_path, number):
    with waiting(tmp_path, "sleep") as job:
        until_it_acts(job, tmp_path)
        job.processes[0].send_signal(number)
        first, other = ends(job)
    assert (first.code, other.code) == (-number, 43), (first, other)
    if number == signal.SIGINT:
        assert "worker 0 is lost: it has failed with KeyboardInterrupt" in other.output
    else:
        assert "worker 1: the job's coordination service at 127.0.0.1 is gone" in other.output


def test_a_task_of_another_cluster_is_named_by_all():
    def longer(addresses: list[str]) -> list[str]:
        return [*addresses, "127.0.0.1:9"]

    with Job("join", 2, arguments=["30"], clusters={1: longer}) as job:
        ended = ends(job)
    for end in ended:
        assert end.code == 1
        assert "JobMismatchError: Expected the same TF_CONFIG cluster" in end.output
        assert "worker 1: its cluster is [worker 0 at 127.0.0.1:" in end.output
        assert "worker 2 at 127.0.0.1:9], not [worker 0" in end.output
