"""Processes that are killed, stopped or asleep, and others that go on in the same processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "programs")]

import regrouping
from jobs import PROGRAMS, _result

pytestmark = pytest.mark.processes
SECONDS = 100.0
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k != "NPROC"},
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
}


class Workers:
    """A service, and workers that run `regrouping.py`."""

    def __init__(self, folder: Path, count: int):
        self.folder = folder
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.service = subprocess.Popen(
            [sys.executable, "-m", "stratagem.cluster.service", "127.0.0.1:0", str(count)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip
        ready, _, self.address = self.service.stdout.readline().partition(" ")
        assert ready == "ready"

    def start(self, index: int, how: str) -> None:
        name, program = f"{index} {how}", str(PROGRAMS / "regrouping.py")
        arguments = [self.address.strip(), str(index), str(self.folder), how]
        with self.log(name).open("w") as log:
            self.workers[name] = subprocess.Popen(
                [sys.executable, "-u", program, *arguments],
                stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT,
            )  # fmt: skip

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_for(self, name: str) -> None:
        self.until(lambda: (self.folder / name).exists(), name)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            ended = [n for n, p in self.workers.items() if p.poll() not in (None, 0, -9)]
            assert not ended, (what, {n: self.log(n).read_text() for n in ended})
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def end(self, name: str) -> tuple[int, str]:
        return self.workers[name].wait(SECONDS), self.log(name).read_text()


@contextlib.contextmanager
def workers(folder: Path, count: int) -> Iterator[Workers]:
    made = Workers(folder, count)
    try:
        yield made
        made.service.stdin.close()
        assert made.service.wait(SECONDS) == 0
    finally:
        for process in (*made.workers.values(), made.service):
            process.kill()
            process.wait()
        made.service.stdout.close()


def test_survivors_of_a_kill_go_on_and_a_replacement_gets_the_state(tmp_path):
    with workers(tmp_path, 3) as job:
        for index, how in enumerate(["go", "hang", "go"]):
            job.start(index, how)
        job.wait_for("1.hang")
        job.workers["1 hang"].send_signal(signal.SIGKILL)
        job.wait_for("0.generation1")
        job.start(1, "join")
        ends = {name: job.end(name) for name in ("0 go", "1 join", "2 go")}
    assert {name: code for name, (code, _) in ends.items()} == dict.fromkeys(ends, 0), ends
    results = {name: _result(output) for name, (_, output) in ends.items()}
    assert [results[name]["members"] for name in ends] == [[3, 2, 3], [3], [3, 2, 3]]
    (steps,) = {result["steps"] for result in results.values()}
    assert steps >= regrouping.BEFORE + regrouping.AFTER
    for result in results.values():
        np.testing.assert_allclose(result["w"], regrouping.alone(steps), rtol=1e-4, atol=1e-5)
        assert result["w"] == results["0 go"]["w"]


def test_who_is_stopped_is_done_without_and_who_sleeps_ends_all(tmp_path):
    with workers(tmp_path, 3) as job:
        for index, how in enumerate(["go", "stop", "oversleep"]):
            job.start(index, how)
        job.wait_for("0.generation1")  # Nothing raises in the others; they go on without it.
        job.workers["1 stop"].send_signal(signal.SIGCONT)
        ends = {name: job.end(name) for name in job.workers}
    assert {code for code, _ in ends.values()} == {43}, ends
    first, stopped, sleeper = (output for _, output in ends.values())
    assert "worker 1: the others go on without it: worker 1 is lost: no sign of life" in stopped
    assert "in oversleep" in sleeper  # its Python stack
    assert "Missing: worker 2 (has been outside of any step after step" in first
    assert "in oversleep" not in first
