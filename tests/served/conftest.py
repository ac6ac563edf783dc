"""A whole cluster in this process: servers and workers in threads, on loopback, as in a job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stratagem
from stratagem.cluster_resolver import ClusterSpec, SimpleClusterResolver
from stratagem.coordinator import serving
from stratagem.launcher.local import free_ports

KEY = "a key that only these tests know"


class Cluster:
    """Tasks in threads.

    Attributes:
        resolver: of the chief.
        programs: what runs, by (type, index).
    """

    def __init__(self, workers: int, servers: int):
        ports = free_ports(workers + servers + 1)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.spec = ClusterSpec(
            {"chief": addresses[-1:], "worker": addresses[:workers], "ps": addresses[workers:-1]}
        )
        self.resolver = SimpleClusterResolver(self.spec, task_type="chief", task_id=0)
        self.programs: dict[tuple[str, int], Any] = {}
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        for job, count in (("ps", servers), ("worker", workers)):
            for index in range(count):
                self.start(job, index)

    def start(self, job: str, index: int) -> None:
        """Starts a task, or starts it again after `stop`."""
        made = threading.Event()

        def run() -> None:
            program = serving.PROGRAMS[job](self.spec, index)
            self.programs[job, index] = program
            made.set()
            program.serve()

        thread = threading.Thread(target=run, name=f"{job} {index}")
        thread.start()
        self._threads[job, index] = thread
        assert made.wait(10.0)

    def add_worker(self) -> str:
        """Starts a further worker, and gives its address."""
        jobs = {job: list(self.spec.job_tasks(job)) for job in self.spec.jobs}
        address = f"127.0.0.1:{free_ports(1)[0]}"
        jobs["worker"].append(address)
        self.spec = ClusterSpec(jobs)
        self.start("worker", len(jobs["worker"]) - 1)
        return address

    def stop(self, job: str, index: int) -> None:
        """Ends a task; its port is free then."""
        self.programs.pop((job, index)).stop()
        thread = self._threads.pop((job, index))
        thread.join(10.0)
        assert not thread.is_alive(), thread.name

    def close(self) -> None:
        """Ends all tasks."""
        for task in list(self.programs):
            self.stop(*task)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", KEY)


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Makes clusters: `cluster(workers=2, servers=2)`."""
    with contextlib.ExitStack() as stack:

        def make(workers: int = 2, servers: int = 2) -> Cluster:
            made = Cluster(workers, servers)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def served(cluster: Any) -> Iterator[Callable[..., Any]]:
    """Makes strategies of new clusters: `served(workers=2, servers=2, **arguments)`."""
    with contextlib.ExitStack() as stack:

        def make(workers: int = 2, servers: int = 2, **arguments: Any) -> Any:
            made = cluster(workers, servers)
            strategy = stratagem.ParameterServerStrategy(made.resolver, **arguments)
            strategy.cluster = made
            stack.callback(strategy.close)
            return strategy

        yield make
