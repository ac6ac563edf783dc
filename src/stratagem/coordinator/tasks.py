"""What the tasks of a parameter-server job run, and where the rooms below find it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from stratagem import config
from stratagem.cluster.keys import Key
from stratagem.cluster.spec import ClusterSpec
from stratagem.coordinator import serving
from stratagem.coordinator.beside import Beside
from stratagem.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.coordinator.record import Record
from stratagem.coordinator.worker import Worker
from stratagem.parameter_server.task import ServerTask
from stratagem.strategies import parameter_server


def install() -> None:
    """Says what a worker and a ps run, and how a strategy uses them. Importing the room does it."""
    serving.PROGRAMS.update({"worker": _worker, "ps": _server})
    parameter_server.serve_task[:] = [_serve_and_end]
    parameter_server.run_on_worker[:] = [_run_on_worker]
    parameter_server.begin[:] = [ClusterCoordinator]
    parameter_server.open_record[:] = [Record]
    parameter_server.start_beside[:] = [Beside]


def _worker(cluster: ClusterSpec, index: int) -> Worker:
    address = cluster.task_address("worker", index)
    return Worker(address, f"worker {index}", Key.always(config.environment()))


def _server(cluster: ClusterSpec, index: int) -> ServerTask:
    address = cluster.task_address("ps", index)
    environment = config.environment()
    directory = environment.get(parameter_server.STATE_DIR)
    return ServerTask(address, index, Key.always(environment), directory)


def _serve_and_end(cluster: ClusterSpec, task_type: str, index: int) -> NoReturn:
    """The strategy was made in a task that has no program of its own."""
    serving.address_of(cluster, task_type, index)
    sys.exit(serving.serve_here(cluster, task_type, index))


def _run_on_worker(strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return ClusterCoordinator(strategy).schedule(fn, args, kwargs).get()
