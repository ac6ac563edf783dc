"""Two processes for one contender: the one that run.py starts, and a partner that it starts.

The partner runs the same script. It takes a turn whenever the first one does.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

_RANK = "BENCH_RANK"
WORKERS = 2


@contextlib.contextmanager
def partner() -> Iterator[int]:
    """Starts the partner, and gives this process's rank; in both, TF_CONFIG is set then."""
    if _RANK in os.environ:
        yield int(os.environ[_RANK])
        return
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(WORKERS)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()

    def config(rank: int) -> str:
        task = {"type": "worker", "index": rank}
        return json.dumps({"cluster": {"worker": addresses}, "task": task})

    process = subprocess.Popen(
        [sys.executable, *sys.argv],
        env={**os.environ, "TF_CONFIG": config(1), _RANK: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    global _turns
    _turns = process.stdin
    os.environ["TF_CONFIG"] = config(0)
    try:
        yield 0
        process.wait(60)
    finally:
        process.kill()
        process.wait()


_turns = None


def pass_turn() -> None:
    """Lets the partner take the turn that this process has just been given."""
    if _turns is not None:
        _turns.write("\n")
        _turns.flush()


def addresses() -> list[str]:
    """Of both workers."""
    return json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
