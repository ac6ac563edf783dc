"""`stratagem run` on this machine: what comes out, who is blamed, and that nothing is left."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from stratagem.launcher import supervisor
from stratagem.launcher.abstract import Job
from stratagem.launcher.hosts import Host, HostsLauncher
from stratagem.launcher.local import LocalLauncher, free_ports
from stratagem.launcher.output import Output, renderer
from stratagem.recovery.policy import Limits

pytestmark = pytest.mark.processes

# Longer than anything here takes on a busy machine; nothing waits for so long if all is well.
DEADLINE = 60.0

# What every task begins with.
HEAD = """
import json, os, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
name, index = f"{task['type']} {task['index']}", task["index"]
attempt = os.environ["STRATAGEM_ATTEMPT"]
def here(what):
    return os.path.join(os.path.dirname(__file__), what)
def touch(what):
    with open(here(what + ".new"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(here(what + ".new"), here(what))
def wait_for(what):
    while not os.path.exists(here(what)):
        time.sleep(0.01)
"""
# Stands for the coordination service: writes down where it is, and stays or not.
SERVICE = """
import sys, time
with open(sys.argv[1], "w") as file:
    file.write(" ".join(sys.argv[3:]) + "\\n")
time.sleep(float(sys.argv[2]))
"""


class Runs:
    """Runs a script as a job in this process, and keeps what it wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.out, self.err = io.BytesIO(), io.BytesIO()

    def script(self, body: str) -> str:
        path = self.directory / "task.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return str(path)

    def service(self, address: str, tasks: int, stays: int = 1000) -> list[str]:
        path = str(self.directory / "service")
        return [sys.executable, "-S", "-c", SERVICE, path, str(stays), address, str(tasks)]

    def __call__(self, body: str, *, service: Callable | None = None, **job: object) -> int:
        program = (self.script(body),)
        found = Job(program, **{"workers": 2, "serve": program, **job})
        launcher = LocalLauncher(os.environ, self.output(found), service or self.service)
        return launcher.launch(found)

    def output(self, job: Job) -> Output:
        plain = renderer(io.StringIO())
        return Output(job.tasks(), self.out, self.err, (plain, plain))

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.getvalue().decode().splitlines())

    @property
    def errors(self) -> list[str]:
        return self.err.getvalue().decode().splitlines()

    def has_two(self, pattern: str) -> bool:
        return len(list(self.directory.glob(pattern))) == 2

    def pids(self) -> list[int]:
        """Those that tasks wrote down with `touch`."""
        return [int(path.read_text()) for path in self.directory.iterdir() if path.suffix == ".pid"]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE} s: {what}"
        time.sleep(0.01)


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_tasks_are_told_who_they_are_and_what_they_write_comes_out_whole(runs):
    code = runs(
        """
        print("this is", name, attempt, os.environ["STRATAGEM_REHEARSE"])
        print("x" * 100_000)
        print("to stderr", file=sys.stderr)
        print("no newline", end="")
        wait_for("service")
        """,
        chief=True,
        devices_per_worker=3,
    )
    assert code == 0
    tasks = ["chief 0", "worker 0", "worker 1"]
    padded = {task: f"[{task}]".ljust(10) for task in tasks}
    expected = [
        f"{padded[task]} {text}"
        for task in tasks
        for text in (f"this is {task} 0 cpu:3", "x" * 100_000, "no newline")
    ]
    assert runs.lines == sorted(expected)
    service = (runs.directory / "service").read_text()
    assert re.fullmatch(r"127\.0\.0\.1:\d+ 3\n", service)
    assert sorted(runs.errors) == [f"{padded[task]} to stderr" for task in tasks]


def test_the_first_failure_comes_last_and_gives_the_exit_code(runs):
    code = runs(
        """
        if index == 1:
            touch("raising")
            raise ValueError("boom")
        wait_for("raising")
        print("I lost a peer", file=sys.stderr)
        sys.exit(43)
        """
    )
    assert code == 1
    assert runs.errors[-1] == "| ValueError: boom"
    first = next(i for i, line in enumerate(runs.errors) if "first failure: " in line)
    assert runs.errors[first].startswith("[stratagem] first failure: worker 1, exit code 1, ")
    assert runs.errors[first].endswith(" s after start")
    assert runs.errors[first + 1] == "| Traceback (most recent call last):"
    assert "[worker 0] I lost a peer" in runs.errors[:first]


def test_a_peer_that_noticed_first_is_not_blamed(runs):
    code = runs(
        """
        if index == 0:
            touch("noticed")
            sys.exit(43)
        wait_for("noticed")
        os.kill(os.getpid(), signal.SIGSEGV)
        """
    )
    assert code == 128 + signal.SIGSEGV
    assert any("first failure: worker 1, signal 11 (SIGSEGV: a fault" in e for e in runs.errors)
    also = "[stratagem] also ended: worker 0, exit code 43: a peer was lost"
    assert also in runs.errors


def test_a_peer_that_is_stuck_is_ended(runs, monkeypatch):
    """Nobody says more than that a peer was lost, so that is what is told."""
    monkeypatch.setattr(supervisor, "_CULPRIT_SECONDS", 0.2)
    monkeypatch.setattr(supervisor, "_FAILURE_GRACE_SECONDS", 0.2)
    code = runs(
        """
        touch(f"{index}.pid")
        if index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for("1.pid")
        print("worker 1 does not answer", file=sys.stderr)
        sys.exit(43)
        """
    )
    assert code == 43
    assert any("first failure: worker 0, exit code 43: a peer was lost" in e for e in runs.errors)
    assert runs.errors[-1] == "| worker 1 does not answer"
    assert all(map(_gone, runs.pids()))


def test_the_others_are_ended_when_one_fails_also_if_they_ignore_it(runs, monkeypatch):
    monkeypatch.setattr(supervisor, "_PEERS_SECONDS", 0.2)
    monkeypatch.setattr(supervisor, "_FAILURE_GRACE_SECONDS", 0.2)
    code = runs(
        """
        touch(f"{index}.pid")
        if index == 1:
            wait_for("0.pid")
            sys.exit(7)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"],
                                 start_new_session=True)
        with open(here("child.pid"), "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)
        """
    )
    assert code == 7
    assert all(map(_gone, runs.pids()))


def test_what_a_task_leaves_behind_is_killed(runs):
    code = runs(
        """
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True
        )
        with open(here("child.pid"), "w") as file:
            file.write(str(child.pid))
        """,
        workers=1,
    )
    assert code == 0
    (pid,) = runs.pids()
    assert _gone(pid)


def test_restarts_tell_the_attempt_and_end(runs):
    code = runs(
        """
        print("attempt", attempt, os.environ["STRATAGEM_COORDINATION"])
        touch(f"{attempt}-{index}")
        wait_for(f"{attempt}-{1 - index}")
        if index == 1 and attempt != "2":
            sys.exit(5)
        if attempt != "2":
            time.sleep(1000)
        """,
        limits=Limits(max_restarts=2),
    )
    assert code == 0
    said = [line for line in runs.errors if line.startswith("[stratagem] restart the group: ")]
    assert len(said) == 2
    assert said[1].endswith("restart 2 of 2")
    services = {line.split()[-1] for line in runs.lines if " attempt " in line}
    assert len(services) == 3  # A fresh one for each attempt.


def test_restarts_are_used_up(runs):
    code = runs("sys.exit(5 + int(attempt))", limits=Limits(max_restarts=1), workers=1)
    assert code == 6
    assert any(line.endswith("all 1 restarts are used up") for line in runs.errors)
    assert any("first failure: worker 0, exit code 6, " in line for line in runs.errors)


def test_preempted_after_saving(runs):
    body = "sys.exit(42 if attempt == '0' else 0)"
    assert runs(body) == 42
    assert any(line.endswith("no restarts are allowed") for line in runs.errors)
    assert runs(body, limits=Limits(max_restarts=1)) == 0
    assert any(line.endswith("does not count as a failure") for line in runs.errors)


def test_survivors_go_on_and_a_replacement_joins(runs):
    code = runs(
        """
        joined = os.environ.get("STRATAGEM_JOIN")
        print(name, "joins" if joined else "starts", os.environ["STRATAGEM_WAIT_FOR_REPLACEMENT"])
        if joined:
            touch("joined")
        elif index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("joined")
        """,
        limits=Limits(max_restarts=1, min_workers=1, wait_for_replacement=9),
    )
    assert code == 0
    assert "[worker 1] worker 1 joins 9" in runs.lines
    assert len([line for line in runs.lines if "starts" in line]) == 2
    assert any(
        "[stratagem] replace the lost worker: lost worker 1, signal 9" in e for e in runs.errors
    )


def test_servers_and_evaluator_are_ended_when_training_is_done(runs):
    code = runs(
        """
        if task["type"] == "chief":
            wait_for("ps.pid")
            sys.exit(0)
        touch("ps.pid" if task["type"] == "ps" else name)
        time.sleep(1000)
        """,
        chief=True,
        servers=1,
        evaluator=True,
    )
    assert code == 0, runs.errors
    assert all(map(_gone, runs.pids()))


def test_the_coordination_service_is_lost(runs):
    def dies(address: str, tasks: int) -> list[str]:
        return [sys.executable, "-S", "-c", "raise OSError('port taken')"]

    code = runs("time.sleep(1000)", service=dies)
    assert code == 1
    assert any("first failure: coordination service, exit code 1, " in e for e in runs.errors)
    assert runs.errors[-1] == "| OSError: port taken"


def test_a_module_and_its_arguments(runs, monkeypatch):
    (runs.directory / "module.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.chdir(runs.directory)
    job = Job(("-m", "module", "--workers", "3"))
    assert LocalLauncher(os.environ, runs.output(job)).launch(job) == 0
    assert runs.lines == ["[worker 0] ['--workers', '3']"]


def test_two_machines_are_one_cluster(runs):
    """Both are this one, under two names; each supervisor starts its share."""
    job = Job(
        (
            runs.script(
                """
                print(os.environ["TF_CONFIG"], os.environ["STRATAGEM_COORDINATION"])
                wait_for("service")
                """
            ),
        ),
        workers=3,
    )
    first, second = free_ports(2)
    machines = [Host("127.0.0.1", first), Host("127.0.0.2", second)]
    for index in (0, 1):
        # It ends by itself when no task needs it any more.
        service = partial(runs.service, stays=0)
        launcher = HostsLauncher(machines, index, os.environ, runs.output(job), service)
        assert launcher.launch(job) == 0
    tasks = [line for line in runs.lines if line.startswith("[worker")]
    assert [line[:10] for line in tasks] == ["[worker 0]", "[worker 1]", "[worker 2]"]
    assert len({line.partition("}")[0].partition("{")[2] for line in tasks}) == 1
    assert {line.split()[-1] for line in tasks} == {f"127.0.0.1:{first}"}
    assert (runs.directory / "service").read_text() == f"0.0.0.0:{first} 3\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_tasks(runs, signum):
    body = """
    touch(f"{index}.pid")
    try:
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted")
    """

    def interrupt() -> None:
        _until(partial(runs.has_two, "*.pid"), "both tasks run")
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = runs(body)
    thread.join()
    assert code == 128 + signum
    assert all(map(_gone, runs.pids()))
    interrupted = [line for line in runs.lines if line.endswith("interrupted")]
    assert len(interrupted) == (2 if signum == signal.SIGINT else 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_after_sigterm_all_may_save_and_leave(runs):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
    touch(f"{index}.pid")
    time.sleep(1000)
    """

    def preempt() -> None:
        _until(partial(runs.has_two, "*.pid"), "both tasks run")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=preempt)
    thread.start()
    assert runs(body) == 42
    thread.join()


def test_a_second_signal_kills(runs):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: touch(f"{index}.asked"))
    touch(f"{index}.pid")
    while True:
        time.sleep(1000)
    """

    def press() -> None:
        for pattern in ("*.pid", "*.asked"):
            _until(partial(runs.has_two, pattern), f"two files {pattern}")
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=press)
    thread.start()
    assert runs(body, grace_seconds=DEADLINE) == 128 + signal.SIGTERM
    thread.join()
    assert all(map(_gone, runs.pids()))


def test_nobody_reads_any_more(runs):
    class Closed(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError

    runs.out = Closed()
    body = """
    touch("0.pid")
    print("unheard", flush=True)
    time.sleep(1000)
    """
    assert runs(body, workers=1) == 128 + signal.SIGPIPE
    _until(lambda: all(map(_gone, runs.pids())), "the task is gone")


LEAVES_A_CHILD = """
child = subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True
)
with open(here("child.pid"), "w") as file:
    file.write(str(child.pid))
touch("task.pid")
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
@pytest.mark.parametrize("victim", ["guard", "task"])
def test_kill_9_of_a_process_leaves_nothing(runs, victim):
    """The task is stopped, and has a child in a session of its own."""
    pids: list[int] = []

    def kill() -> None:
        _until((runs.directory / "task.pid").exists, "the task runs")
        task = psutil.Process(int((runs.directory / "task.pid").read_text()))
        pids.extend([task.ppid(), *runs.pids()])
        os.kill(task.pid if victim == "task" else task.ppid(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert runs(LEAVES_A_CHILD, workers=1) == 128 + signal.SIGKILL
    thread.join()
    assert len(set(pids)) == 3
    _until(lambda: all(map(_gone, pids)), "all processes are gone")


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
def test_kill_9_of_the_command_leaves_nothing(runs):
    command = [sys.executable, "-m", "stratagem.cli", "run", runs.script(LEAVES_A_CHILD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as started:
        try:
            _until((runs.directory / "task.pid").exists, "the task runs")
            guard = psutil.Process(int((runs.directory / "task.pid").read_text())).ppid()
            assert psutil.Process(guard).ppid() == started.pid
        finally:
            started.kill()
    pids = [guard, *runs.pids()]
    assert len(set(pids)) == 3
    _until(lambda: all(map(_gone, pids)), "all processes are gone")


def test_the_command_runs_a_strategy_on_several_processes(runs):
    """With the real coordination service: nothing here is a stand-in."""
    script = runs.script(
        """
        import stratagem
        strategy = stratagem.MultiWorkerMirroredStrategy()
        def count():
            return stratagem.get_replica_context().all_reduce("sum", 1.0)
        total, _ = strategy.experimental_local_results(strategy.run(count))
        print("replicas", strategy.num_replicas_in_sync, "total", float(total))
        """
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "stratagem.cli", "run"),
            *("--workers", "2", "--devices-per-worker", "2", script),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "replicas" in line]
    assert sorted(said) == [f"[worker {i}] replicas 4 total 4.0" for i in (0, 1)]
