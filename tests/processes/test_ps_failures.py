"""What is lost, and what is not, when tasks of a job with parameter servers are killed."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]

import networks
from ps_jobs import PsJob, Tasks

from stratagem.coordinator.journal import resume

pytestmark = pytest.mark.processes
ROWS, BATCH = 640, 16


def counted_once(found, epochs):
    assert found["hits"] == [float(epochs)] * ROWS
    assert found["seen"] == epochs * ROWS
    assert found["iterations"] == epochs * ROWS // BATCH
    assert found["lost"] == 0


def test_with_replicas_nothing_is_lost_whoever_is_killed(tmp_path):
    """Workers, servers, the coordinator: each row counts once, on the servers bit by bit.

    Closures of a lost worker run elsewhere. A server comes back with what its replica has. The
    coordinator goes on from its journal: what was finished is not trained again.
    """
    told = {"epochs": 4, "pause": 0.05, "strategy": {"replication": 2}}
    with PsJob(tmp_path, "ps_counting", told, "--max-restarts", "1") as job:
        job.reaches(0, 10)
        job.kill("worker", 0)
        job.reaches(1, 10)
        job.kill("ps", 0)
        job.until(lambda: "is restored" in job.so_far(), "the first server to be restored")
        job.reaches(2, 10)
        job.kill("chief", 0)
        job.reaches(3, 10)
        job.kill("ps", 1)
        found = job.result()
    counted_once(found, 4)
    assert (tmp_path / "starts").read_text() == "xx"
    assert "worker 0 at 127.0.0.1" in job.output
    assert job.output.count("; 0 pushes to it are lost") == 2
    goes_on = "goes on from its journal: fit 0 (counted from 0) begins with epoch 2 of 4"
    assert goes_on in job.output
    assert found["rows"][2] < ROWS  # metrics have what was trained since
    assert [found["rows"][i] for i in (0, 1, 3)] == [ROWS] * 3


def test_what_comes_back_from_snapshots(tmp_path):
    """A server is killed, then all: what is lost is what was pushed since, and said as a number."""
    told = {"epochs": 2, "pause": 0.05, "strategy": {"snapshot_seconds": 1.0}}
    state = tmp_path / "state"
    options = ("--state-dir", str(state))
    with PsJob(tmp_path, "ps_counting", told, *options, workers=1) as job:
        job.reaches(0, 20)
        job.kill("ps", 0)
        job.until(lambda: "is restored; at most" in job.so_far(), "the server to be restored")
        job.reaches(1, 20)
    with PsJob(tmp_path, "ps_counting", told, *options, workers=1, servers=1) as job:
        found = job.result()  # with another number of servers
    assert 0 < found["lost"] < 200
    for missing in (2 * ROWS - sum(found["hits"]), 2 * ROWS - found["seen"]):
        assert 0 <= missing <= found["lost"] * BATCH
    assert max(found["hits"]) == 2
    assert resume(state / "journal").ended  # the job is done: the next one begins anew


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_orderly_end_loses_nothing(tmp_path, number):
    """The chief is left by sys.exit(3), then the launcher is asked to end: each row counts once.

    No snapshot is due in between. sys.exit(0) is the end: the next job begins anew.
    """
    told = {"epochs": 4, "pause": 0.02, "leave": 3}
    state = tmp_path / "state"
    options = ("--state-dir", str(state), "--max-restarts", "1")
    with PsJob(tmp_path, "ps_counting", told, *options) as job:
        job.reaches(2, 10)
        job.process.send_signal(number)
        job.result(128 + number)
        assert "chief 0, exit code 3" in job.output
    assert resume(state / "journal").since == 0
    with PsJob(tmp_path, "ps_counting", told, *options) as job:
        found = job.result()
    counted_once(found, 4)
    assert (tmp_path / "starts").read_text() == "xxx"
    assert resume(state / "journal").ended


def test_a_server_is_killed_and_nothing_was_kept(tmp_path):
    """An error at once, with who and what to do; never the initial values."""
    told = {"epochs": 50, "pause": 0.08, "strategy": {"state_dir": ""}}
    with PsJob(tmp_path, "ps_counting", told, workers=1, servers=1) as job:
        job.reaches(0, 20)
        began = time.monotonic()
        job.kill("ps", 0)
        assert job.result(code=1) is None
        assert time.monotonic() - began < 60
    assert "Expected ps 0 at 127.0.0.1:" in job.output
    assert "Got neither a state directory with snapshots nor a replica" in job.output


def test_the_network_is_cut_and_comes_back(tmp_path):
    """Between all of the coordinator, workers and servers; at the end all tasks leave."""
    if why := networks.missing():
        pytest.skip(why)
    told = {"epochs": 2, "pause": 0.05}
    with networks.Cable() as cable:
        first, second = cable.hosts
        where = {"chief": [first], "worker": [first, second], "ps": [first, second]}
        inside = {host: cable.inside()[i] for i, host in enumerate(cable.hosts)}
        with Tasks(tmp_path, "ps_counting", told, where, inside) as tasks:
            tasks.reaches(0, 20)
            cable.cut()
            time.sleep(3.0)
            cable.mend()
            found = tasks.result()
    counted_once(found, 2)
    assert found["rows"] == [ROWS] * 2


def test_one_script_for_all_tasks_and_no_chief(tmp_path):
    """Worker 0 coordinates, and serves beside that; all tasks end with the program."""
    told = {"epochs": 1, "pause": 0.0}
    here = "127.0.0.1"
    with Tasks(tmp_path, "ps_counting", told, {"worker": [here] * 2, "ps": [here]}) as tasks:
        found = tasks.result()
    counted_once(found, 1)
    assert (tmp_path / "starts").read_text() == "xxx"
