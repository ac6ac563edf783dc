"""What all launchers share: the job, its tasks, and what a task is told through its environment.

The contract with a task:

- `TF_CONFIG`: the cluster, and which task of it this is, as in TensorFlow.
- `STRATAGEM_COORDINATION=host:port`: the coordination service of JAX. The launcher hosts it, in a
  process of its own, so that no task's death takes it away. Set where several tasks train together
  and there are no parameter servers.
- `STRATAGEM_ATTEMPT=0`, `1`, ...: how often the group was started before; with parameter servers,
  where each task is started again alone, how often this task was.
- `STRATAGEM_JOIN=1`: this task replaces a lost one, and joins a group that is running.
- `STRATAGEM_MIN_WORKERS`, `STRATAGEM_WAIT_FOR_REPLACEMENT` (seconds): as the user gave them.
- With parameter servers, `STRATAGEM_CLUSTER_KEY`: who knows it may connect. And
  `STRATAGEM_STATE_DIR`: a directory for snapshots of the servers and the coordinator's journal.
- `STRATAGEM_REHEARSE=cpu:K`: with `--devices-per-worker K`, unless the user has set it.
- SIGTERM or SIGINT to the task's own process (not to its children): leave now.
- Exit code 42: preempted, after saving. 43: a peer was lost or stalled.
"""

from __future__ import annotations

import abc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stratagem.cluster.roles import SERVING, TRAINERS
from stratagem.cluster.runtime import ATTEMPT as ATTEMPT
from stratagem.cluster.runtime import COORDINATION as COORDINATION
from stratagem.cluster.runtime import JOIN as JOIN
from stratagem.cluster.runtime import MIN_WORKERS as MIN_WORKERS
from stratagem.cluster.runtime import WAIT_FOR_REPLACEMENT as WAIT_FOR_REPLACEMENT
from stratagem.recovery.policy import Limits

TF_CONFIG = "TF_CONFIG"
REHEARSE = "STRATAGEM_REHEARSE"
UNBUFFERED = "PYTHONUNBUFFERED"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

STATE_DIR = "STRATAGEM_STATE_DIR"

SERVICE_MODULE = "stratagem.cluster.service"
SERVE = ("-m", "stratagem.cli", "serve")
"""The arguments of Python for workers and servers of a job with parameter servers."""


@dataclass(frozen=True, order=True)
class Task:
    """One process of a job.

    Args:
        type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        index: its place among the tasks of that type.
    """

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"

    @property
    def trains(self) -> bool:
        """Whether it runs the training step."""
        return self.type in TRAINERS


@dataclass(frozen=True)
class Job:
    """What the user wants to run.

    Args:
        program: the arguments of Python: `("train.py", "--epochs", "3")`, or `("-m", "train")`.
        workers: how many workers, at least 1.
        servers: how many parameter servers.
        chief: whether a chief is started beside the workers; else worker 0 is the chief.
        evaluator: whether an evaluator is started.
        devices_per_worker: virtual CPU devices of every task; None to leave the choice alone.
        gpus_per_worker: GPUs that each task that trains gets for itself; None to leave all to all.
        limits: what is allowed when a task is lost.
        grace_seconds: how long tasks may save after SIGTERM, before they are killed.
        serve: what workers and servers run where there are parameter servers, as `program`.
    """

    program: tuple[str, ...]
    workers: int = 1
    servers: int = 0
    chief: bool = False
    evaluator: bool = False
    devices_per_worker: int | None = None
    gpus_per_worker: int | None = None
    limits: Limits = field(default_factory=Limits)
    grace_seconds: float = 30.0
    serve: tuple[str, ...] = SERVE

    def program_of(self, task_type: str) -> tuple[str, ...]:
        """What tasks of a type run: with parameter servers, only chief and evaluator `program`."""
        return self.serve if self.servers and task_type in SERVING else self.program

    def computes(self, task_type: str) -> bool:
        """Whether tasks of a type do the heavy work, for which they need the GPUs.

        With parameter servers the chief only hands it out.
        """
        return task_type == "worker" or (task_type == "chief" and not self.servers)

    def counts(self) -> dict[str, int]:
        """Type -> number of tasks; those that a job has none of are left out."""
        counts = {
            "chief": int(self.chief),
            "worker": self.workers,
            "ps": self.servers,
            "evaluator": int(self.evaluator),
        }
        return {task_type: count for task_type, count in counts.items() if count}

    def tasks(self) -> list[Task]:
        """All tasks: chief, workers, servers, evaluator."""
        return [Task(kind, index) for kind, n in self.counts().items() for index in range(n)]

    @property
    def trainers(self) -> int:
        """How many tasks run the training step."""
        return sum(task.trains for task in self.tasks())

    @property
    def coordinated(self) -> bool:
        """Whether its tasks meet at a coordination service."""
        return self.trainers > 1 and not self.servers


class Launcher(abc.ABC):
    """Runs a job, or writes down how an engine runs it."""

    @abc.abstractmethod
    def launch(self, job: Job) -> int:
        """Runs a job to its end, in the main thread.

        Returns:
            The exit code for the command: 0, that of the first failure, or 128 + a signal.

        Raises:
            LaunchError: it cannot be started.
        """


class LaunchError(Exception):
    """A job that cannot be started, and what to do about it, for the user to read."""


def cluster_of(addresses: Mapping[Task, str]) -> dict[str, list[str]]:
    """The `"cluster"` of TF_CONFIG, with the tasks of each type in order."""
    cluster: dict[str, list[str]] = {}
    for task in sorted(addresses):
        cluster.setdefault(task.type, []).append(addresses[task])
    return cluster


def tf_config(cluster: Mapping[str, Sequence[str]], task: Task) -> str:
    """TF_CONFIG of one task, as JSON."""
    return tf_config_text(cluster, task.type, str(task.index))


def tf_config_text(cluster: Mapping[str, Sequence[str]], task_type: str, index: str) -> str:
    """The same, where the index may be a variable of an engine that puts in its value."""
    text = json.dumps({"cluster": dict(cluster), "task": {"type": task_type, "index": None}})
    return text.removesuffix("null}}") + index + "}}"


def limits_environment(limits: Limits) -> dict[str, str]:
    """The variables that tell a task what the user allows; empty where nothing may be lost."""
    told = {MIN_WORKERS: limits.min_workers, WAIT_FOR_REPLACEMENT: limits.wait_for_replacement}
    return {name: f"{value:g}" for name, value in told.items() if value is not None}


def task_environment(
    job: Job,
    task: Task,
    addresses: Mapping[Task, str],
    *,
    coordination: str | None,
    attempt: int = 0,
    join: bool = False,
) -> dict[str, str]:
    """The variables that a task gets on top of those of the launcher; see this module's contract.

    `STRATAGEM_REHEARSE` and `PYTHONUNBUFFERED` in it are defaults: a value of the user's is kept.
    """
    told = {
        TF_CONFIG: tf_config(cluster_of(addresses), task),
        ATTEMPT: str(attempt),
        UNBUFFERED: "1",
        **limits_environment(job.limits),
    }
    if coordination is not None and task.trains:
        told[COORDINATION] = coordination
    if join:
        told[JOIN] = "1"
    if job.devices_per_worker is not None:
        told[REHEARSE] = f"cpu:{job.devices_per_worker}"
    return told


def merged(environment: Mapping[str, str], told: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a task. Nothing of an outer job's contract is passed on."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in (TF_CONFIG, COORDINATION, ATTEMPT, JOIN, MIN_WORKERS, WAIT_FOR_REPLACEMENT)
    }
    defaults = {name: told[name] for name in (REHEARSE, UNBUFFERED) if name in told}
    return {**told, **defaults, **kept, **{k: v for k, v in told.items() if k not in defaults}}


def gpus_of(job: Job, task: Task, first: int = 0) -> str:
    """The GPUs of its machine that a task may see, with `gpus_per_worker`; none if not training.

    Args:
        job: the job.
        task: one of its tasks.
        first: how many of the job's tasks that compute are on machines before this one.
    """
    if not job.computes(task.type) or job.gpus_per_worker is None:
        return ""
    place = task.index + (job.chief and job.computes("chief") and task.type == "worker") - first
    start = place * job.gpus_per_worker
    return ",".join(str(gpu) for gpu in range(start, start + job.gpus_per_worker))


def python_command(job: Job, task: Task) -> list[str]:
    """The command of a task, with this Python."""
    return [sys.executable, *job.program_of(task.type)]


def service_command(address: str, tasks: int) -> list[str]:
    """The command that hosts JAX's coordination service for a number of tasks."""
    return [sys.executable, "-m", SERVICE_MODULE, address, str(tasks)]


def write_text(text: str, path: Path | None) -> None:
    """Writes what an engine is given to a file, or to standard output."""
    if path is None:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise LaunchError(
            f"--output: expected a file that can be written. Got {path}: {error.strerror}."
        ) from error
