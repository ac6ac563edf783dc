"""Starting and leaving a job: this process becomes one of several that compute together."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Mapping
from importlib.metadata import version

import jax

from stratagem import _jax, config
from stratagem.cluster import regroup, roles, rollcall
from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.channel import Channel, Store
from stratagem.cluster.member import Member
from stratagem.cluster.membership import Terms
from stratagem.cluster.service import Service
from stratagem.errors import JobMismatchError

COORDINATION = "STRATAGEM_COORDINATION"
ATTEMPT = "STRATAGEM_ATTEMPT"
JOINING = "STRATAGEM_JOIN"
MIN_WORKERS = "STRATAGEM_MIN_WORKERS"
WAIT = "STRATAGEM_WAIT_FOR_REPLACEMENT"

START_SECONDS = 300.0
_LOOK_SECONDS = 0.2


class Job:
    """The processes that train together now, and which of them this is.

    Args:
        addresses: of each task that the job started with, by name ("worker 1").
        member: this process's connection to the job's service.
        seconds: deadline of what the processes agree on.
        attempt: how often the job was restarted.

    Attributes:
        tasks: name and address of each process, by rank.
        rank: this process.
        channel: agrees with the other processes.
    """

    def __init__(self, addresses: dict[str, str], member: Member, seconds: float, attempt: int):
        self.addresses = addresses
        self.member = member
        self.seconds = seconds
        self.attempt = attempt
        self.meet()

    def meet(self) -> None:
        """Joins the latest generation of members, at the start and after `GroupChangedError`.

        Raises:
            PeerTimeoutError: the others did not come in time.
        """
        self.generation, store = regroup.join(self.member, self.seconds)
        self.tasks = tuple((name, self.addresses[name]) for name in self.generation.members)
        self.rank = self.generation.members.index(self.member.task)
        names = [f"{name} at {where}" for name, where in self.tasks]
        scope = f"stratagem/{self.attempt}"
        self.channel = Channel(_Watched(store, self.member), self.rank, names, self.seconds, scope)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.tasks)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the job."""
        return self.rank == 0

    @property
    def may_change(self) -> bool:
        """Whether training goes on when a process is lost."""
        return self.member.terms.min_workers is not None


class _Watched:
    """A job's key-value store that is not waited for in vain: for keys of processes that are lost.

    Args:
        store: the store.
        member: knows of changes.
    """

    def __init__(self, store: Store, member: Member):
        self._store = store
        self._member = member

    def set(self, key: str, value: bytes) -> None:
        """As `Store`."""
        self._store.set(key, value)

    def get(self, key: str, seconds: float) -> bytes | None:
        """As `Store`; GroupChangedError once the processes of the job change."""
        deadline = time.monotonic() + seconds
        while True:
            self._member.raise_if_changed()
            left = deadline - time.monotonic()
            value = self._store.get(key, min(_LOOK_SECONDS, max(0.001, left)))
            if value is not None or left <= _LOOK_SECONDS:
                return value

    def delete(self, key: str) -> None:
        """As `Store`."""
        self._store.delete(key)


_current: Job | None = None
_service: Service | None = None


def current() -> Job | None:
    """The job of this process, None where it computes alone."""
    return _current


def join(
    resolver: ClusterResolver, seconds: float = START_SECONDS, stall_seconds: float = math.inf
) -> Job | None:
    """Meets the other tasks of the cluster, and joins their job. Every task calls it.

    JAX's devices are then those of all processes. A second call gives the same job.

    Args:
        resolver: knows the cluster and this task.
        seconds: deadline for all tasks to be there.
        stall_seconds: how long a step may take before the job ends with an error.

    Returns:
        The job; None where the cluster has one task or none.

    Raises:
        RuntimeError: JAX has started already, with the devices of this process alone; or this
            process is in another job.
        PeerTimeoutError, JobMismatchError, ValueError: see `rollcall.call`; ValueError also for a
            cluster that is wrong (`roles.validate`).
    """
    global _current
    cluster = roles.training_cluster(resolver.cluster_spec())
    task_type, task_id = resolver.task_type, resolver.task_id
    roles.validate(cluster, task_type, task_id)
    addresses = {
        f"{job} {index}": cluster.task_address(job, index)
        for job in ("chief", "worker")
        if job in cluster.jobs
        for index in cluster.task_indices(job)
    }
    if len(addresses) < 2 or task_type == "evaluator":
        return None
    if task_type is None or task_id is None:
        raise ValueError(
            f"Expected to know which task of the cluster this process is. Got {len(addresses)} "
            "tasks and no task type or index. Say it in TF_CONFIG's task, or set the resolver's "
            "task_type and task_id."
        )
    if _current is not None:
        if _current.addresses != addresses:
            raise RuntimeError(
                f"Expected one cluster a program. Got {addresses} after {_current.addresses}. "
                "Create all strategies from the same cluster."
            )
        return _current
    if started := _jax.started_backends():
        raise RuntimeError(
            "Expected the strategy of several processes to be created before anything uses JAX: "
            f"its backend has started ({', '.join(started)}) with the devices of this process "
            "alone. Create the strategy (with TF_CONFIG set) at the start of the program, before "
            "any model, array, random seed or other strategy."
        )
    task, rank = f"{task_type} {task_id}", roles.id_in_cluster(cluster, task_type, task_id)
    _current = _join(addresses, task, rank, seconds, stall_seconds)
    atexit.register(leave)
    return _current


def _join(
    addresses: dict[str, str], task: str, rank: int, seconds: float, stall_seconds: float
) -> Job:
    env = config.environment()
    attempt = int(env.get(ATTEMPT, "0"))
    deadline = time.monotonic() + seconds

    def service() -> str:
        """Of the launcher, or in this process, which the others then depend on."""
        global _service
        if address := env.get(COORDINATION):
            return address
        host = addresses[task].rpartition(":")[0]
        _service = Service(f"{host}:0", len(addresses))
        _service.start()
        return _service.address

    if env.get(JOINING):  # in the place of a lost one: the others are busy
        address = env[COORDINATION]
    else:
        tasks = tuple(addresses.items())
        card = rollcall.Card(task, tasks, _versions(), attempt, time.time())
        address = rollcall.call(card, rank, seconds, service)
    left = max(1.0, deadline - time.monotonic())
    terms = _terms(env, stall_seconds)
    return Job(addresses, Member.connect(address, task, rank, terms, left), seconds, attempt)


def _terms(env: Mapping[str, str], stall_seconds: float) -> Terms:
    """What the launcher was told about losses, in the environment."""
    least, wait = env.get(MIN_WORKERS), env.get(WAIT)
    return Terms(
        min_workers=int(least) if least else None,
        wait_for_replacement=float(wait) if wait else None,
        stall_seconds=stall_seconds,
    )


def check_devices(job: Job) -> None:
    """Refuses a job whose processes have different numbers of devices. Starts the backend.

    Raises:
        JobMismatchError: lists the devices of every process.
    """
    own = len(jax.local_devices())
    payload = f"{own} {jax.default_backend()}".encode()
    found = job.channel.stream("devices").all_gather(payload, "their devices")
    if len(set(found)) > 1:
        lines = [
            f"  {name}: {text.decode()} devices"
            for name, text in zip(job.channel.names, found, strict=True)
        ]
        raise JobMismatchError(
            "Expected the same number and kind of devices on every process. Got:\n"
            + "\n".join(lines)
            + "\nGive every task as many devices (CUDA_VISIBLE_DEVICES, STRATAGEM_REHEARSE)."
        )


def leave() -> None:
    """Leaves the job in good order. Called at exit; harmless when there is none."""
    global _current, _service
    if _current is None:
        return
    job, _current = _current, None
    _jax.leave_job()
    job.member.close()
    service, _service = _service, None
    if service is not None:
        service.close()


def _versions() -> str:
    return f"stratagem {version('stratagem')}, jax {jax.__version__}"
