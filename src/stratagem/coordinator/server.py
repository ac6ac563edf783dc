"""`distribute.Server`: a worker or a parameter server within a program."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stratagem.cluster.abstract import format_master_url
from stratagem.cluster.rollcall import listen
from stratagem.cluster.spec import ClusterSpec, Tasks
from stratagem.coordinator import serving

_LOOK_SECONDS = 0.2
_LEAVE_SECONDS = 10.0

_log = logging.getLogger("stratagem")

_serving: set[Server] = set()  # those that are to stop at the end of the program


@dataclass(frozen=True)
class ServerDef:
    """Which task of which cluster a server is, as TensorFlow's message of that name."""

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str


class Server:
    """A worker or parameter server in a thread of this process, as `tf.distribute.Server`.

    Args:
        server_or_cluster_def: the cluster, whole; or the `server_def` of another server.
        job_name: `"worker"` or `"ps"`; may be left out where `server_or_cluster_def` says it.
        task_index: which of them; may be left out where that says it, or the job has one task.
        protocol: what stands in front of `target`; the wire format is Stratagem's own anyway.
        config: for TensorFlow; anything but None is ignored with a warning.
        start: whether it starts at once.

    Raises:
        ValueError: it is not said which task, there is no such task, or this process cannot listen
            at its address; see `serving.address_of`.
    """

    def __init__(
        self,
        server_or_cluster_def: ServerDef | ClusterSpec | Mapping[str, Tasks],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        if config is not None:
            warnings.warn(
                "Server: expected no config, for TensorFlow's sessions do not exist here. Got "
                f"{type(config).__name__}, which is ignored. Leave it out; the threads of XLA "
                "follow the cores of this process (taskset, or NPROC in its environment).",
                stacklevel=2,
            )
        self._def = _server_def(server_or_cluster_def, job_name, task_index, protocol)
        told = self._def
        self._address = serving.address_of(told.cluster, told.job_name, told.task_index)
        self._leave = serving.Leave()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if start:
            self.start()

    @classmethod
    def create_local_server(cls, config: Any = None, start: bool = True) -> Server:
        """A worker at a free port of this machine's loopback, whom no cluster names yet.

        A job that runs on this machine takes it in by
        `ClusterCoordinator.add_worker(server.target)`. (TensorFlow's is a cluster of one task, for
        a session to connect to.)

        Args:
            config: for TensorFlow; anything but None is ignored with a warning.
            start: whether it starts at once.
        """
        with listen("127.0.0.1:0") as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        return cls({"worker": [address], "ps": []}, "worker", 0, None, config, start)

    @property
    def server_def(self) -> ServerDef:
        """Which task it is."""
        return self._def

    @property
    def target(self) -> str:
        """Its address, the protocol in front: `"grpc://host:2222"` by default, as in TensorFlow."""
        return format_master_url(self._address, self._def.protocol)

    def start(self) -> None:
        """Starts to serve, in a thread; without effect where that was done."""
        if self._thread is not None:
            return
        name = f"stratagem-{self._def.job_name}-{self._def.task_index}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        _serving.add(self)

    def join(self) -> None:
        """Serves until the coordinator says that the job is done, or SIGTERM asks to leave.

        In TensorFlow it never returns: a script may go on behind it only with what a worker or
        server shall do at the end.

        Raises:
            RuntimeError: it was not started.
            Exception: what serving has failed with.
        """
        if self._thread is None:
            raise RuntimeError(
                "Server.join: expected a server that was started. Got one made with start=False. "
                "Call start() first."
            )
        with serving.called_by_signals(self._leave, (signal.SIGTERM,)):
            while self._thread.is_alive():  # Python runs signal handlers between two looks.
                self._thread.join(_LOOK_SECONDS)
        _serving.discard(self)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends serving, and waits some seconds for it. (TensorFlow has no such method.)"""
        _serving.discard(self)
        self._leave()
        if self._thread is None:
            return
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            _log.warning(
                "Server.stop: expected %s %d to leave within %g s. It is still at work; the thread "
                "ends with this process.",
                self._def.job_name,
                self._def.task_index,
                _LEAVE_SECONDS,
            )

    def _serve(self) -> None:
        told = self._def
        try:
            serving.serve(told.cluster, told.job_name, told.task_index, self._leave)
        except Exception as error:
            self._error = error
            _log.exception("%s %d has failed.", told.job_name, told.task_index)


@atexit.register
def _stop_all() -> None:
    """Exit functions run last in, first out: this one, which was there before any strategy, after
    those have ended their jobs, whose workers these may be."""
    for server in list(_serving):
        server.stop()


def _server_def(
    given: ServerDef | ClusterSpec | Mapping[str, Tasks],
    job_name: str | None,
    task_index: int | None,
    protocol: str | None,
) -> ServerDef:
    if isinstance(given, ServerDef):
        cluster = given.cluster
        job_name = given.job_name if job_name is None else job_name
        task_index = given.task_index if task_index is None else task_index
        protocol = protocol or given.protocol
    else:
        cluster = ClusterSpec(given)
    if job_name is None:
        raise ValueError(
            "job_name: expected worker or ps, since the cluster has several jobs "
            f"({', '.join(cluster.jobs)}). Got None. Say which one this process belongs to."
        )
    if task_index is None:
        count = cluster.num_tasks(job_name)
        if count != 1:
            raise ValueError(
                f"task_index: expected one out of {cluster.task_indices(job_name)}, since the "
                f"cluster has {count} tasks {job_name!r}. Got None. Say which one this process is."
            )
        task_index = cluster.task_indices(job_name)[0]
    return ServerDef(cluster, job_name, task_index, protocol or "grpc")
