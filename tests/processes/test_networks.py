"""Jobs over two hosts, played by two network namespaces with a cable between them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "programs")]

import networks
import waiting
from jobs import Job

pytestmark = pytest.mark.processes
SECONDS = 90.0


@pytest.fixture
def cable() -> Iterator[networks.Cable]:
    if why := networks.missing():
        pytest.skip(why)
    with networks.Cable() as made:
        yield made


def job(cable: networks.Cable, program: str, *arguments: str, absent: tuple[int, ...] = ()) -> Job:
    return Job(
        program, 2, 1, arguments, absent=absent, hosts=cable.hosts, before=cable.inside()
    )  # fmt: skip


def cut_in_the_middle(cable: networks.Cable, running: Job, folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not (folder / "acts").exists():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in running.processes.values())
        time.sleep(0.02)
    cable.cut()
    (folder / "go-on").touch()


def test_a_job_over_two_hosts_outlives_a_short_cut_and_gives_the_result_of_one(cable, tmp_path):
    with job(cable, "waiting", "cut", "1", "0", str(tmp_path)) as running:
        cut_in_the_middle(cable, running, tmp_path)
        time.sleep(3)  # how long the cut is, less than what counts as a loss
        cable.mend()
        ended = running.wait(SECONDS)
    assert [e.code for e in ended.values()] == [0, 0], ended
    expected = waiting.train(waiting.build())
    for worker in ended.values():
        for got, want in zip(worker.result["weights"], expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
    # Who listens beyond this machine without a key says so, once.
    assert ended[0].output.count("Listening at 10.213.7.1 without a key: every program that") == 1


def test_both_ends_of_a_cut_link_say_who_is_out_of_reach(cable, tmp_path):
    with job(cable, "waiting", "cut", "1", "0", str(tmp_path)) as running:
        cut_in_the_middle(cable, running, tmp_path)
        ended = running.wait(SECONDS)
    assert [e.code for e in ended.values()] == [43, 43], ended
    first, second = (e.output for e in ended.values())
    assert "worker 1 is lost: no sign of life for 10 s (it is stopped, or out of reach)" in first
    assert "no sign of life from the job's coordination service at 10.213.7.1 for" in second
    for index, output in enumerate((first, second)):
        assert f"(this is worker {index}, in step 3 since the last change, a train step" in output
        assert "of model 'small', for" in output


def test_a_host_that_is_not_there_is_named_after_the_deadline(cable):
    cable.cut()
    start = time.monotonic()
    with job(cable, "join", "3") as running:
        ended = running.wait(SECONDS)
    print(f"both ended {time.monotonic() - start:.1f} s after their start, with a deadline of 3 s")
    assert [e.code for e in ended.values()] == [1, 1], ended
    first, second = (e.output for e in ended.values())
    assert f"Missing: worker 1 at {running.addresses[1]}." in first
    assert f"Missing: worker 0 at {running.addresses[0]}." in second
    assert "The last try: " in second
    for output in (first, second):
        assert "Expected 2 tasks to start within 3 s." in output
