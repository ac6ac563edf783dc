"""Runs a job of real processes on loopback, for tests."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
RESULT = "RESULT "


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process of a job ended.

    Args:
        code: exit code; negative for a signal.
        result: what the program handed back with `report`, None when it did not come to that.
        output: what it printed, errors included.
    """

    code: int
    result: Any
    output: str


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens at now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


@functools.cache
def compilations() -> str:
    """A folder for what all jobs of this test run compile: many run the same programs."""
    made = tempfile.TemporaryDirectory(prefix="stratagem-compiled-")
    atexit.register(made.cleanup)
    return made.name


class Job:
    """Processes of a cluster that run one program; use it as a context manager.

    Args:
        program: name of a file in `programs`, without `.py`.
        workers: how many; worker 0 is chief.
        devices: virtual CPU devices of each.
        arguments: of the program.
        clusters: makes another cluster of the addresses, for some tasks, by index.
        absent: tasks that are not started.
        environment: more variables.
        hosts: of each task, instead of loopback.
        before: what stands before the command of some tasks, by index.
    """

    def __init__(
        self,
        program: str,
        workers: int,
        devices: int = 1,
        arguments: Sequence[str] = (),
        clusters: Mapping[int, Callable[[list[str]], list[str]]] | None = None,
        absent: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        hosts: Sequence[str] | None = None,
        before: Mapping[int, Sequence[str]] | None = None,
    ):
        hosts = hosts or ["127.0.0.1"] * workers
        ports = free_ports(workers)
        self.addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        self.processes: dict[int, subprocess.Popen[str]] = {}
        for index in range(workers):
            if index in absent:
                continue
            other = (clusters or {}).get(index, list)
            config = {
                "cluster": {"worker": other(self.addresses)},
                "task": {"type": "worker", "index": index},
            }
            env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "TF_CONFIG")}
            env |= {
                "TF_CONFIG": json.dumps(config),
                "STRATAGEM_REHEARSE": f"cpu:{devices}",
                "JAX_COMPILATION_CACHE_DIR": compilations(),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "PYTHONPATH": os.pathsep.join([str(PROGRAMS), env.get("PYTHONPATH", "")]),
                **(environment or {}),
            }
            self.processes[index] = subprocess.Popen(
                [
                    *(before or {}).get(index, ()),
                    sys.executable, "-u", str(PROGRAMS / f"{program}.py"), *arguments,
                ],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.communicate()

    def wait(self, seconds: float = 240) -> dict[int, Ended]:
        """Waits for all processes to end, and kills those that do not.

        Raises:
            AssertionError: some did not end in time; shows what all printed.
        """
        deadline = time.monotonic() + seconds
        ended, late = {}, []
        for index, process in self.processes.items():
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(index)
                process.kill()
                output, _ = process.communicate()
            ended[index] = Ended(process.returncode, _result(output), output)
        if late:
            logs = "\n".join(f"--- worker {i} ---\n{e.output[-3000:]}" for i, e in ended.items())
            raise AssertionError(f"workers {late} did not end within {seconds} s\n{logs}")
        return ended


def run_job(program: str, workers: int, devices: int = 1, *arguments: str) -> list[Any]:
    """The results of a job's processes, by rank; all of them must succeed."""
    with Job(program, workers, devices, arguments) as job:
        ended = job.wait()
    failed = {i: e for i, e in ended.items() if e.code or e.result is None}
    assert not failed, "\n".join(
        f"--- worker {i}, exit code {e.code} ---\n{e.output[-4000:]}" for i, e in failed.items()
    )
    return [ended[i].result for i in range(workers)]


def report(result: Any) -> None:
    """Hands a JSON-able result to the test; a program calls it last."""
    print(RESULT + json.dumps(result), flush=True)


def _result(output: str) -> Any:
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT)) if lines else None
