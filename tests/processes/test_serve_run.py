"""`stratagem run --ps`: who runs what, who is started again alone, and that nothing is left."""

from __future__ import annotations

import argparse
import io
import os
import signal
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from stratagem.cli import run
from stratagem.launcher.abstract import Job
from stratagem.launcher.local import LocalLauncher
from stratagem.launcher.output import Output, renderer
from stratagem.recovery import serving_policy
from stratagem.recovery.policy import Limits

pytestmark = pytest.mark.processes

# Longer than anything here takes on a busy machine; nothing waits for so long if all is well.
DEADLINE = 60.0

# What the program and the stand-in for `stratagem serve` begin with.
HEAD = """
import json, os, signal, sys, time
told = json.loads(os.environ["TF_CONFIG"])
task = told["task"]
kind, index, attempt = task["type"], task["index"], os.environ["STRATAGEM_ATTEMPT"]
address = told["cluster"][kind][index]
def path(what):
    return os.path.join(os.path.dirname(__file__), what)
def write(what, text):
    with open(path(what + ".new"), "w") as file:
        file.write(str(text))
    os.rename(path(what + ".new"), path(what))
def read(what):
    while not os.path.exists(path(what)):
        time.sleep(0.01)
    return open(path(what)).read()
"""
# Writes down that it runs, where, and that it was asked to leave.
SERVE = """
assert "STRATAGEM_JOIN" not in os.environ
def leave(*_):
    print("leaves", kind, index)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
write(f"{kind}-{index}-{attempt}", f"{os.getpid()} {address}")
time.sleep(1000)
"""
# Waits for all of them.
WAIT = """
tasks = [(k, i) for k in ("worker", "ps") for i in range(len(told["cluster"][k]))]
pids = {(k, i): int(read(f"{k}-{i}-0").split()[0]) for k, i in tasks}
"""


class Runs:
    """Runs a program, and a stand-in for `stratagem serve`, as a job in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.out, self.err = io.BytesIO(), io.BytesIO()

    def script(self, name: str, body: str) -> str:
        path = self.directory / f"{name}.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return str(path)

    def __call__(self, chief: str, serve: str = SERVE, **job: object) -> int:
        found = Job(
            (self.script("train", WAIT + textwrap.dedent(chief)),),
            serve=(self.script("serve", serve),),
            **{"workers": 2, "servers": 2, "chief": True, **job},
        )
        plain = renderer(io.StringIO())
        output = Output(found.tasks(), self.out, self.err, (plain, plain))
        return LocalLauncher(os.environ, output).launch(found)

    @property
    def lines(self) -> list[str]:
        return sorted(line[11:].strip() for line in self.out.getvalue().decode().splitlines())

    @property
    def said(self) -> list[str]:
        lines = self.err.getvalue().decode().splitlines()
        return [line[12:] for line in lines if line.startswith("[stratagem]")]

    @property
    def started(self) -> dict[str, tuple[int, str]]:
        """Of each start of a serving task: its process and address."""
        found = {}
        for path in self.directory.glob("*-?-?"):
            pid, address = path.read_text().split()
            found[path.name] = int(pid), address
        return found

    def nothing_is_left(self) -> bool:
        return all(map(_gone, (pid for pid, _ in self.started.values())))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_lost_task_is_started_again_alone_where_it_was(runs):
    code = runs(
        """
        for victim in [("ps", 1), ("worker", 0)]:
            os.kill(pids[victim], signal.SIGKILL)
            read("%s-%d-1" % victim)
        os.kill(int(read("ps-1-1").split()[0]), signal.SIGKILL)
        read("ps-1-2")
        for other in [("ps", 0), ("worker", 1)]:
            os.kill(pids[other], 0)  # They still run.
        """
    )
    assert code == 0, runs.err.getvalue()
    started = runs.started
    assert set(started) == {
        *("worker-0-0", "worker-1-0", "ps-0-0", "ps-1-0"),
        *("ps-1-1", "worker-0-1", "ps-1-2"),
    }
    assert started["ps-1-0"][1] == started["ps-1-1"][1] == started["ps-1-2"][1]
    assert started["worker-0-0"][1] == started["worker-0-1"][1]
    assert len({address for _, address in started.values()}) == 4
    again = [text for text in runs.said if text.startswith("start the task again, alone: ")]
    assert [text.rpartition("; ")[2] for text in again] == [
        "restart 1 of 3",
        "restart 1 of 3",
        "restart 2 of 3",
    ]
    # Asked to leave when the chief was done.
    assert runs.lines == ["leaves ps 0", "leaves ps 1", "leaves worker 0", "leaves worker 1"]
    assert runs.nothing_is_left()


def test_a_task_that_was_told_to_leave_is_started_again(runs, monkeypatch):
    monkeypatch.setattr(serving_policy, "LEFT_SECONDS", 0.3)
    code = runs(
        """
        os.kill(pids["worker", 1], signal.SIGTERM)
        read("worker-1-1")
        """,
        limits=Limits(task_restarts=0),
    )
    assert code == 0, runs.err.getvalue()
    (again,) = [text for text in runs.said if text.startswith("start the task again, alone: ")]
    assert again.endswith("worker 1 has left, and the chief goes on; this does not count")
    assert runs.nothing_is_left()


def test_the_chief_is_started_again_if_that_is_allowed(runs):
    chief = """
    if attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    for pid in pids.values():
        os.kill(pid, 0)  # They have gone on.
    assert "STRATAGEM_JOIN" not in os.environ
    """
    assert runs(chief, limits=Limits(max_restarts=1)) == 0, runs.err.getvalue()
    assert len(runs.started) == 4
    (again,) = [text for text in runs.said if text.startswith("start the task again, alone: ")]
    assert again.endswith("it goes on from its journal; restart 1 of 1")

    assert runs(chief) == 128 + signal.SIGKILL
    assert any(text.startswith("first failure: chief 0, signal 9 (SIGKILL") for text in runs.said)
    assert runs.nothing_is_left()


def test_a_task_that_fails_at_once_each_time_ends_the_job(runs):
    serve = """
    if (kind, index) == ("ps", 1):
        sys.exit("stratagem serve: error: the port is in use")
    """
    code = runs(
        "time.sleep(1000)", textwrap.dedent(serve) + SERVE, limits=Limits(task_restarts=100)
    )
    assert code == 1
    assert len(runs.started) == 3
    assert any("it has failed 3 times in a row within 10 s of its start" in t for t in runs.said)
    assert runs.err.getvalue().endswith(b"| stratagem serve: error: the port is in use\n")
    assert runs.nothing_is_left()


def test_a_signal_ends_all(runs):
    def press() -> None:
        deadline = time.monotonic() + DEADLINE
        while not (runs.directory / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    code = runs("write('ready', '')\ntime.sleep(1000)")
    thread.join()
    assert code == 130
    assert len(runs.started) == 4
    assert runs.nothing_is_left()


@pytest.mark.parametrize("code", [0, 3])
def test_the_command_gives_tasks_a_key_and_a_directory(runs, code, monkeypatch, capfd):
    for variable in ("KEY", "KEY_FILE"):
        monkeypatch.delenv(f"STRATAGEM_CLUSTER_{variable}", raising=False)
    monkeypatch.delenv("STRATAGEM_STATE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(runs.directory))
    note = """
    key, state = os.environ["STRATAGEM_CLUSTER_KEY"], os.environ["STRATAGEM_STATE_DIR"]
    for line in open("/proc/self/cmdline"), open(f"/proc/{os.getppid()}/cmdline"):
        assert key not in line.read()
    open(os.path.join(state, f"{kind}-{index}"), "w").write(key)
    """
    chief = f"{textwrap.dedent(note)}print(sorted(os.listdir(state)))\nsys.exit({code})"
    script = runs.script("train", WAIT + chief)
    serve = runs.script("serve", textwrap.dedent(note) + SERVE)
    job_of = run.job_of
    monkeypatch.setattr(run, "job_of", lambda options: replace(job_of(options), serve=(serve,)))
    parser = argparse.ArgumentParser()
    run.add_to(parser.add_subparsers())
    options = parser.parse_args(["run", "--workers", "2", "--ps", "1", script])
    assert run.run(options) == code
    out, err = capfd.readouterr()
    assert "['chief-0', 'ps-0', 'worker-0', 'worker-1']" in out
    left = list(runs.directory.glob("stratagem-*"))
    if code == 0:
        assert left == []
    else:
        (directory,) = left
        assert err.endswith(f"go on from it with --state-dir {directory}\n")
        keys = {path.read_text() for path in directory.iterdir()}
        assert len(keys) == 1
    assert runs.nothing_is_left()
