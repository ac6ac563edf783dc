"""A worker or a parameter server: the generic programs that serve the coordinator of a job."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from stratagem.cluster import own_host, roles
from stratagem.cluster.rollcall import listen
from stratagem.cluster.spec import ClusterSpec, Tasks

_log = logging.getLogger("stratagem")


class Program(Protocol):
    """What a task runs. It is made, and serves, in one thread."""

    def serve(self) -> None:
        """Serves until the coordinator says that the job is done, or `stop` is called."""

    def stop(self) -> None:
        """Ends `serve` within a second. In any thread, and in signal handlers."""


PROGRAMS: dict[str, Callable[[ClusterSpec, int], Program]] = {}
"""Task type -> makes the program of such a task, of the cluster and its index; then it listens."""


class Leave:
    """Asks a program to leave; also one that is only being made."""

    def __init__(self) -> None:
        self._asked = False
        self._stop: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Asks; in any thread, and in signal handlers."""
        self._asked = True
        if self._stop is not None:
            self._stop()

    def passes_to(self, program: Program) -> None:
        """From now on it stops that program: at once, where it was asked before."""
        self._stop = program.stop
        if self._asked:
            program.stop()


def serve(
    cluster_spec: ClusterSpec | Mapping[str, Tasks],
    task_type: str,
    index: int,
    leave: Leave | None = None,
) -> int:
    """Serves the coordinator of a job until that, or somebody else, says that it is done.

    Args:
        cluster_spec: all tasks of the job.
        task_type: `"worker"` or `"ps"`.
        index: which of them this process is; `address_of` says whether it can be.
        leave: makes it leave when called.

    Returns:
        The exit code for the process: 0. Whatever goes wrong raises.
    """
    program = PROGRAMS[task_type](ClusterSpec(cluster_spec), index)
    (leave or Leave()).passes_to(program)
    program.serve()
    return 0


def serve_here(cluster: ClusterSpec, task_type: str, index: int) -> int:
    """Serves in the main thread of this process, which is there for nothing else.

    Args:
        cluster: all tasks of the job.
        task_type: `"worker"` or `"ps"`.
        index: which of them this process is; `address_of` says whether it can be.

    Returns:
        The exit code for the process: 0 when the coordinator or SIGTERM has ended it, 130 after
        Ctrl-C.
    """
    leave = Leave()
    with called_by_signals(leave, (signal.SIGTERM, signal.SIGINT)) as came:
        _log.info("%s %d serves at %s.", task_type, index, cluster.task_address(task_type, index))
        code = serve(cluster, task_type, index, leave)
    return 128 + signal.SIGINT if signal.SIGINT in came else code


def address_of(cluster: ClusterSpec, task_type: str, index: int) -> str:
    """Where a task listens, looked at before anybody waits for it.

    Raises:
        ValueError: the cluster has no such task; it is no worker or server; its address is another
            machine's; or its port is in use.
    """
    if task_type in ("chief", "evaluator"):
        runs = "coordinates the others" if task_type == "chief" else "evaluates checkpoints"
        raise ValueError(
            f"task_type: expected worker or ps, whose program is the same for all jobs. Got "
            f"{task_type!r}, which {runs} by your own program. Start that: python train.py."
        )
    roles.validate(cluster, task_type, index)
    if missing := [job for job in roles.SERVING if job not in cluster.jobs]:
        raise ValueError(
            f"cluster_spec: expected workers and parameter servers (ps), and a chief that "
            f"coordinates them. Got {', '.join(cluster.jobs)}. Add the addresses of "
            f"{' and '.join(missing)}; or run your own program, where all workers train together."
        )
    address = cluster.task_address(task_type, index)
    task = f"{task_type} {index}"
    own_host.find(task, roles.task_addresses(roles.training_cluster(cluster)))
    try:
        listen(address).close()
    except OSError as error:
        raise ValueError(
            f"cluster.{task_type}[{index}]: expected a port that is free, since this process is "
            f"{task}. Got {address}: {error.strerror or error}. End what listens there (an earlier "
            "run? `stratagem doctor` says who does), or give the task another port."
        ) from None
    return address


@contextmanager
def called_by_signals(leave: Leave, signals: Sequence[int]) -> Iterator[list[int]]:
    """Has signals ask to leave; gives the list of those that came.

    The second of a kind does what it did before: who asks twice does not want to wait. In another
    thread than the main one, where Python allows no handlers, nothing changes.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.getsignal(number) for number in signals}

    def asked(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, before[number])
        leave()

    try:
        for number in signals:
            signal.signal(number, asked)
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
