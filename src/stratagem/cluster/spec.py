"""The tasks of a cluster and their addresses, checked before anyone connects to one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

_ADDRESS = re.compile(r"(?P<host>\[[^\s\[\]/]+\]|[^\s:/\[\]]+):(?P<port>[0-9]+)")
_LAST_PORT = 65535
_SAME_HOST = {"127.0.0.1": "localhost"}  # Two names under which a port can be taken once only.

Tasks: TypeAlias = Sequence[str] | Mapping[int, str] | Mapping[str, str]


class ClusterSpec:
    """The tasks of a cluster: job name -> task index -> address. It cannot be changed.

    Args:
        cluster: `{"worker": ["host0:2222", "host1:2222"], "ps": {1: "host2:2222"}}`. A list
            counts its tasks from 0, a dict (whose keys may be digits, as in JSON) leaves some out.
            Another `ClusterSpec` does too. IPv6 hosts are written `"[::1]:2222"`.

    Raises:
        TypeError: something in it has another form; all of it is named.
        ValueError: malformed or repeated addresses, or bad indices; all of them are named.
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Tasks]) -> None:
        if isinstance(cluster, ClusterSpec):
            self._tasks: dict[str, dict[int, str]] = cluster._tasks
            return
        _check_types(cluster)
        self._tasks = {job: _by_index(job, tasks) for job, tasks in cluster.items()}
        _check_addresses(self._tasks)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order they were given in."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """How many tasks a job has; ValueError if there is no such job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of a job's tasks, ascending; ValueError if there is no such job."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Where a task listens, `"host:port"`; ValueError if there is no such task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}; its tasks are "
                f"{list(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job by index, None at an index that it leaves out.

        Raises:
            ValueError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Job name -> list of addresses, or index -> address where the job leaves indices out."""
        return {
            job: list(tasks.values())
            if tasks and list(tasks) == list(range(len(tasks)))
            else dict(tasks)
            for job, tasks in self._tasks.items()
        }

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        """Equal to a spec of the same tasks, and to a plain dict job -> index -> address."""
        if isinstance(other, ClusterSpec):
            return self._tasks == other._tasks
        return self._tasks == other if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, tuple(tasks.items())) for job, tasks in self._tasks.items()))

    def __repr__(self) -> str:
        jobs = ", ".join(f"{job!r}: {tasks!r}" for job, tasks in sorted(self.as_dict().items()))
        return f"ClusterSpec({{{jobs}}})"

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._tasks:
            raise ValueError(f"No such job in cluster: {name!r}; its jobs are {self.jobs}.")
        return self._tasks[name]


def one_task(cluster: ClusterSpec) -> bool:
    """Whether a cluster has at most one job with at most one task: nobody to connect to."""
    return not cluster or (len(cluster.jobs) == 1 and cluster.num_tasks(cluster.jobs[0]) <= 1)


def loopback_tasks(cluster: ClusterSpec) -> list[str]:
    """The tasks only reachable from their own machine, in a cluster that spans several.

    Returns:
        The like of `"worker 0 = 'localhost:2222'"`; nothing where all tasks are of that kind, as
        in a cluster on one machine, or none is.
    """
    tasks = [(job, i, a) for job, tasks in cluster._tasks.items() for i, a in tasks.items()]
    local = [f"{job} {i} = {a!r}" for job, i, a in tasks if _is_loopback(_split(a)[0])]
    return local if len(local) < len(tasks) else []


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "[::1]") or host.startswith("127.")


def _split(address: str) -> tuple[str, int]:
    """Host and port, so that two spellings of one address are equal."""
    host, _, port = address.rpartition(":")
    host = host.lower()
    return _SAME_HOST.get(host, host), int(port)


def _by_index(job: str, tasks: Tasks) -> dict[int, str]:
    if not isinstance(tasks, Mapping):
        return dict(enumerate(tasks))
    bad = [index for index in tasks if not _is_index(index)]
    indices = [int(index) for index in tasks if _is_index(index)]
    bad += sorted({index for index in indices if indices.count(index) > 1})
    if bad:
        raise ValueError(
            f"ClusterSpec: expected task indices 0, 1, ... in job {job!r}, each once. Got {bad}."
        )
    return dict(sorted((int(index), address) for index, address in tasks.items()))


def _is_index(index: Any) -> bool:
    if isinstance(index, str):
        return index.isascii() and index.isdecimal()
    return isinstance(index, int) and not isinstance(index, bool) and index >= 0


def _check_types(cluster: object) -> None:
    """The form of a cluster that may come straight out of JSON."""
    if not isinstance(cluster, Mapping):
        raise TypeError(
            "ClusterSpec: expected a dict from job names to their addresses, such as "
            f'{{"worker": ["host0:2222"]}}, or a ClusterSpec. Got {cluster!r}.'
        )
    faults = [f"the job name {job!r}" for job in cluster if not isinstance(job, str)]
    for job, tasks in cluster.items():
        if isinstance(tasks, Mapping):
            entries = list(tasks.items())
        elif isinstance(tasks, (list, tuple)):
            entries = list(enumerate(tasks))
        else:
            faults.append(f"{job} = {tasks!r}")
            continue
        faults += [f"{job} {i} = {a!r}" for i, a in entries if not isinstance(a, str)]
    if faults:
        raise TypeError(
            "ClusterSpec: expected every job to have a string for its name and, for its tasks, a "
            "list of addresses or a dict from index to address, each address a string "
            f'"host:port". Got {"; ".join(faults)}.'
        )


def _check_addresses(cluster: dict[str, dict[int, str]]) -> None:
    faults: list[str] = []
    users: dict[tuple[str, int], list[str]] = defaultdict(list)
    for job, tasks in cluster.items():
        for index, address in tasks.items():
            task = f"{job} {index} = {address!r}"
            match = _ADDRESS.fullmatch(address)
            if match is None:
                why = "leave out what is before '//'" if "://" in address else "not of that form"
                faults.append(f"{task} ({why})")
            elif not 1 <= int(match["port"]) <= _LAST_PORT:
                faults.append(f"{task} (port {int(match['port'])} is not in 1 to {_LAST_PORT})")
            else:
                users[_split(address)].append(task)
    faults += [
        f"{' and '.join(tasks)} (the same address)" for tasks in users.values() if len(tasks) > 1
    ]
    if faults:
        raise ValueError(
            'ClusterSpec: expected an address "host:port" for every task, and another one for '
            f"each. Got {'; '.join(faults)}. Give each task the name or IP of its machine, as the "
            "other machines know it, and a port that is free there."
        )
