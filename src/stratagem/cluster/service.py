"""The command that hosts the service of a job, `cluster/hosting.py`, in a process of its own.

    python -m stratagem.cluster.service HOST:PORT TASKS

It prints `ready HOST:PORT` once it listens (port 0 picks one), and ends with its parent, or when
its standard input, if that is a pipe, closes. No task's death takes it away: JAX ends every process
whose coordination service is gone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence

from stratagem import config
from stratagem.cluster.hosting import Service
from stratagem.cluster.keys import Key, open_to_all
from stratagem.cluster.own_host import is_loopback


def _parent_lives() -> Callable[[], bool]:
    """Says whether the parent is there, and has not closed the pipe that is our input."""
    parent, closed = os.getppid(), threading.Event()

    def read() -> None:
        while os.read(0, 1 << 12):
            pass
        closed.set()

    with contextlib.suppress(OSError):  # There may be no standard input.
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            threading.Thread(target=read, daemon=True).start()
    return lambda: os.getppid() == parent and not closed.is_set()


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code."""
    if len(arguments) != 2 or not arguments[1].isdecimal() or int(arguments[1]) < 1:
        print(
            f"expected HOST:PORT TASKS, such as 127.0.0.1:0 2. Got {' '.join(arguments)!r}.",
            file=sys.stderr,
        )
        return 2
    try:
        key = Key.of(config.environment())
        service = Service(arguments[0], int(arguments[1]), key=key)
    except (OSError, ValueError) as error:
        print(
            f"cannot listen at {arguments[0]}: {error}. Expected a free address of this machine.",
            file=sys.stderr,
        )
        return 1
    host = service.address.rpartition(":")[0]
    if not key.secret and not is_loopback(host):
        print(f"stratagem: {open_to_all(host)}", file=sys.stderr)
    print(f"ready {service.address}", flush=True)
    service.serve(_parent_lives())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
