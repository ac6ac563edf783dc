"""The actor that runs one task of a job on Ray. (A class of its own file: Ray pickles it.)"""

from __future__ import annotations

import os
import queue
import sys
import threading

from stratagem import config
from stratagem.launcher.abstract import Task, merged
from stratagem.launcher.local import free_ports
from stratagem.launcher.process import Process
from stratagem.launcher.supervisor import Message, Wrote

_POLL_SECONDS = 1.0
_UNFETCHED = 256  # Pieces of output that are kept here; then the task has to wait.


class RayTask:
    """Runs one program as a process of the actor's machine.

    Args:
        task: which one it is.
        directory: where the program is run, if the machine has it; else where Ray starts actors.
    """

    def __init__(self, task: Task, directory: str) -> None:
        self._task = task
        self._directory = directory if os.path.isdir(directory) else None
        self._posted: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._unfetched = threading.Semaphore(_UNFETCHED)
        self._process: Process | None = None

    def address(self) -> str:
        """Where the task can listen: this machine, and a port that is free now."""
        # In the actor Ray is there: it is what has imported this class.
        import ray

        host: str = ray.util.get_node_ip_address()
        return f"{host}:{free_ports(1, '')[0]}"

    def start(self, program: tuple[str, ...], told: dict[str, str]) -> None:
        """Starts the program, with variables on top of the actor's own."""
        self._process = Process(
            self._task,
            [sys.executable, *program],
            merged(config.environment(), told),
            self._post,
            self._directory,
        )

    def poll(self) -> list[Message]:
        """What was posted since; waits up to a second for the first of it."""
        found: list[Message] = []
        try:
            found.append(self._posted.get(timeout=_POLL_SECONDS))
            while True:
                found.append(self._posted.get_nowait())
        except queue.Empty:
            pass
        for message in found:
            if isinstance(message, Wrote):
                self._unfetched.release()
        return found

    def signal(self, signum: int) -> None:
        """Sends the task a signal."""
        if self._process is not None:
            self._process.signal(signum)

    def kill(self) -> None:
        """Ends the task and all that it has started."""
        if self._process is not None:
            self._process.kill()

    def _post(self, message: Message) -> None:
        if isinstance(message, Wrote):
            self._unfetched.acquire()
        self._posted.put(message)
