"""A job of two workers is killed, or told to end, and the next one goes on bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]

from jobs import Job, run_job

pytestmark = pytest.mark.processes

WORKERS, SECONDS = 2, 120.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    results = run_job("backing", WORKERS, 1, str(folder), "nothing", "0", "0")
    assert results[0]["digest"] == results[1]["digest"]
    return results[0]


def killed(folder: Path, event: str, who: int, when: int) -> None:
    """Runs a job until one worker is killed, then kills the other, as a supervisor does."""
    with Job("backing", WORKERS, 1, (str(folder), event, str(who), str(when))) as job:
        deadline = time.monotonic() + SECONDS
        while job.processes[who].poll() is None:
            assert time.monotonic() < deadline, "the worker was not killed"
            time.sleep(0.02)
        code = job.processes[who].returncode
        assert code == -signal.SIGKILL, job.processes[who].stdout.read()[-3000:]


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """What a job leaves whose worker 1 is killed after step 9."""
    folder = tmp_path_factory.mktemp("killed")
    killed(folder, "kill", 1, 9)
    return folder


@pytest.mark.parametrize("event", ["kill", "kill-saving"])
def test_a_killed_job_goes_on_bit_for_bit(tmp_path, undisturbed, left_behind, event):
    if event == "kill":
        shutil.copytree(left_behind, tmp_path, dirs_exist_ok=True)
    else:
        killed(tmp_path, event, 0, 12)
    left = sorted(p.name for p in (tmp_path / "0").iterdir())
    if event == "kill-saving":
        assert any("tmp" in name for name in left), left
    assert not (tmp_path / "1").exists()  # only the chief writes; the other gets its values from it
    results = run_job("backing", WORKERS, 1, str(tmp_path), "nothing", "0", "0")
    for result in results:
        assert result["digest"] == undisturbed["digest"]
        first = result["epochs"][0]
        assert first == 1
        assert result["logs"]["loss"] == undisturbed["logs"]["loss"][first:]
    assert not (tmp_path / "0").exists()


def test_sigterm_to_one_worker_saves_on_all_and_all_leave_with_42(tmp_path, undisturbed):
    with Job("backing", WORKERS, 1, (str(tmp_path), "terminate", "1", "5")) as job:
        ended = job.wait(SECONDS)
    assert [ended[i].code for i in range(WORKERS)] == [42, 42], ended
    results = run_job("backing", WORKERS, 1, str(tmp_path), "nothing", "0", "0")
    assert [r["digest"] for r in results] == [undisturbed["digest"]] * WORKERS


def test_a_backup_of_two_workers_goes_on_in_one_process(tmp_path, left_behind):
    shutil.copytree(left_behind, tmp_path, dirs_exist_ok=True)
    (result,) = run_job("backing", 1, 2, str(tmp_path), "nothing", "0", "0")
    assert result["epochs"] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_anywhere(tmp_path, undisturbed, seed):
    """Any worker, any of the 18 steps, every third time while a backup is written."""
    rng = random.Random(seed)
    event = "kill-saving" if seed % 3 == 0 else "kill"
    who = 0 if event == "kill-saving" else rng.randrange(WORKERS)  # the chief writes
    killed(tmp_path, event, who, rng.randint(1, 15 if event == "kill-saving" else 18))
    results = run_job("backing", WORKERS, 1, str(tmp_path), "nothing", "0", "0")
    assert [r["digest"] for r in results] == [undisturbed["digest"]] * WORKERS
