"""Jobs with parameter servers under `stratagem run`, whose tasks are killed, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from jobs import free_ports

PROGRAMS = Path(__file__).parent / "programs"
RESULT = "RESULT "
SECONDS = 90.0


def environment() -> dict[str, str]:
    """What tasks inherit."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("STRATAGEM_", "TF_CONFIG"))}
    return env | {
        "KERAS_BACKEND": "jax", "JAX_COMPILATION_CACHE_DIR": "", "PYTHONUNBUFFERED": "1"
    }  # fmt: skip


def started(
    command: Sequence[str], env: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """A process that writes to a file."""
    with output.open("w") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


class Watched:
    """Tasks that run a program which says how far it is."""

    directory: Path

    def so_far(self) -> str:
        """What all tasks have printed."""
        raise NotImplementedError

    def ended(self) -> bool:
        """Whether it is over too early."""
        raise NotImplementedError

    def until(self, look: Callable[[], Any], what: str) -> Any:
        """Waits for something to be so."""
        end = time.monotonic() + SECONDS
        while not (found := look()):
            if self.ended() or time.monotonic() > end:
                raise AssertionError(f"waited in vain for {what}:\n{self.so_far()[-6000:]}")
            time.sleep(0.02)
        return found

    def reaches(self, epoch: int, batch: int) -> None:
        """Waits until the program has scheduled a batch of an epoch."""

        def there() -> bool:
            try:
                at = (self.directory / "progress").read_text().split()
            except FileNotFoundError:
                return False
            return len(at) == 2 and (int(at[0]), int(at[1])) >= (epoch, batch)

        self.until(there, f"batch {batch} of epoch {epoch}")


class PsJob(Watched):
    """`stratagem run` with a program; use it as a context manager.

    Args:
        directory: what the program writes to.
        program: name of a file in `programs`.
        told: its second argument.
        options: of `stratagem run`.
    """

    def __init__(
        self, directory: Path, program: str, told: Any, *options: str,
        workers: int = 2, servers: int = 2,
    ):  # fmt: skip
        self.directory = directory
        self.process = started(
            [
                sys.executable, "-m", "stratagem.cli", "run",
                "--workers", str(workers), "--ps", str(servers), *options,
                str(PROGRAMS / f"{program}.py"), str(directory), json.dumps(told),
            ],
            environment(), directory / "output",
        )  # fmt: skip
        self.output = ""

    def __enter__(self) -> PsJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for task in psutil.Process(self.process.pid).children(recursive=True):
                task.kill()
            self.process.kill()
        self.process.wait()

    def ended(self) -> bool:
        """Whether it is over too early."""
        return self.process.poll() is not None

    def so_far(self) -> str:
        """What all tasks have printed."""
        return (self.directory / "output").read_text()

    def task(self, job: str, index: int) -> psutil.Process:
        """The process of a task that runs now."""

        def found() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                try:
                    told = json.loads(child.environ().get("TF_CONFIG", "{}")).get("task")
                except (psutil.Error, OSError):
                    continue
                if told == {"type": job, "index": index}:
                    return child
            return None

        return self.until(found, f"{job} {index}")

    def kill(self, job: str, index: int, number: int = signal.SIGKILL) -> psutil.Process:
        """Sends a signal to a task."""
        process = self.task(job, index)
        process.send_signal(number)
        return process

    def result(self, code: int = 0) -> Any:
        """Waits for the end; what the program has handed back."""
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.so_far()[-8000:]}") from None
        self.output = self.so_far()
        assert self.process.returncode == code, self.output[-8000:]
        return result_in(self.output)


class Tasks(Watched):
    """Tasks of one cluster without a launcher; use it as a context manager.

    With a chief, workers and servers run `stratagem serve`; without one, all run the program.

    Args:
        directory: what the program writes to.
        program: name of a file in `programs`.
        told: its second argument.
        where: the host of each task, by type.
        inside: what stands before a command so that it runs on a host.
    """

    def __init__(
        self, directory: Path, program: str, told: Any, where: Mapping[str, Sequence[str]],
        inside: Mapping[str, Sequence[str]] | None = None,
    ):  # fmt: skip
        self.directory = directory
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        ports = iter(free_ports(sum(map(len, where.values()))))
        cluster = {job: [f"{host}:{next(ports)}" for host in where[job]] for job in where}
        script = [str(PROGRAMS / f"{program}.py"), str(directory), json.dumps(told)]
        for job in where:
            for index, host in enumerate(where[job]):
                serves = "chief" in where and job != "chief"
                task = {"type": job, "index": index}
                env = {
                    **environment(), "STRATAGEM_CLUSTER_KEY": "a key of these tests",
                    "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
                }  # fmt: skip
                self.processes[job, index] = started(
                    [
                        *(inside or {}).get(host, ()), sys.executable,
                        *(["-m", "stratagem.cli", "serve"] if serves else script),
                    ],
                    env, self.path(job, index),
                )  # fmt: skip

    def __enter__(self) -> Tasks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()

    def path(self, job: str, index: int) -> Path:
        """Where a task's output goes."""
        return self.directory / f"output-{job}-{index}"

    def so_far(self) -> str:
        """What all tasks have printed."""
        return "\n".join(self.path(*task).read_text() for task in self.processes)

    def ended(self) -> bool:
        """Whether any task has ended that should not have."""
        return any(process.poll() for process in self.processes.values())

    def result(self) -> Any:
        """Waits for all tasks to end, with 0; what the program has handed back."""
        end = time.monotonic() + SECONDS
        for process in self.processes.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it does not end:\n{self.so_far()[-8000:]}") from None
        codes = {task: process.returncode for task, process in self.processes.items()}
        assert not any(codes.values()), f"{codes}\n{self.so_far()[-8000:]}"
        return result_in(self.so_far())


def result_in(output: str) -> Any:
    """What a program has handed back in its output."""
    lines = [line for line in output.splitlines() if RESULT in line]
    return json.loads(lines[-1].partition(RESULT)[2]) if lines else None
