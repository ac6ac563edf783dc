"""The ps and worker tasks of a contender's cluster: real processes on loopback.

A task runs `ps_task_tensorflow.py` or `ps_task_stratagem.py` and lives as long as its standard
input is open, so that it cannot outlive who started it, however that one ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
LONGEST_START = 120.0  # seconds


class Task:
    """One ps or worker process.

    Args:
        script: in this folder.
        cluster: addresses by kind of task.
        kind: "ps" or "worker".
        index: of this task among those of its kind.
    """

    def __init__(self, script: str, cluster: dict[str, list[str]], kind: str, index: int):
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        self.kind, self.index = kind, index
        self._command = [sys.executable, str(HERE / script)]
        self._environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Starts the process, again after `end`."""
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait_until_ready(self) -> None:
        """Returns when the task says that it serves.

        Raises:
            RuntimeError: it ended, or was not ready in time.
        """
        timer = threading.Timer(LONGEST_START, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline() if self._process.stdout else b""
        finally:
            timer.cancel()
        if line != b"ready\n":
            raise RuntimeError(
                f"Expected {self.kind} {self.index} to be ready within {LONGEST_START:.0f} s. Got "
                f"{line!r} and exit status {self._process.poll()} from {' '.join(self._command)}. "
                "See its error output above."
            )

    def end(self) -> None:
        """Kills the process, as a machine that fails does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def free_addresses(count: int) -> list[str]:
    """Loopback addresses that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses


@contextlib.contextmanager
def running(
    script: str, ps: int, workers: int
) -> Iterator[tuple[dict[str, list[str]], list[Task]]]:
    """Starts all tasks of a cluster, gives its addresses by kind, and ends them."""
    addresses = free_addresses(ps + workers)
    cluster = {"ps": addresses[:ps], "worker": addresses[ps:]}
    with contextlib.ExitStack() as stack:
        tasks = []
        for kind, listed in cluster.items():
            for index in range(len(listed)):
                tasks.append(Task(script, cluster, kind, index))
                stack.callback(tasks[-1].end)
        for task in tasks:
            task.wait_until_ready()
        yield cluster, tasks


def end_with_parent() -> None:
    """For a task: says that it is ready, and returns when its parent has ended or wants it to."""
    print("ready", flush=True)
    sys.stdin.buffer.read()
