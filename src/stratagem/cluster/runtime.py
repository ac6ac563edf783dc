"""Starting and leaving a job: this process becomes one of several that compute together."""

from __future__ import annotations

import atexit
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TypeVar

import jax

from stratagem import _jax, config
from stratagem.cluster import compilations, keys, own_host, regroup, roles, rollcall
from stratagem.cluster.abstract import ClusterResolver
from stratagem.cluster.channel import Channel, LocalStore, Store
from stratagem.cluster.hosting import Service
from stratagem.cluster.lockstep import Lockstep
from stratagem.cluster.member import Generation, Member, end_process
from stratagem.cluster.membership import Terms
from stratagem.errors import JobMismatchError

COORDINATION = "STRATAGEM_COORDINATION"
ATTEMPT = "STRATAGEM_ATTEMPT"
JOIN = "STRATAGEM_JOIN"
MIN_WORKERS = "STRATAGEM_MIN_WORKERS"
WAIT_FOR_REPLACEMENT = "STRATAGEM_WAIT_FOR_REPLACEMENT"

START_SECONDS = 300.0
_LOOK_SECONDS = 0.2
_LAST_SECONDS = 2.0  # by which who hosts the service ends after the others

T = TypeVar("T")

_log = logging.getLogger("stratagem")


class Job:
    """The processes that train together now, and which of them this is.

    A process that replaces a lost one computes alone until it joins: it makes its model as the
    others did, who must not wait for it.

    Args:
        addresses: of each task that the job started with, by name ("worker 1").
        connect: says hello to the job's service.
        task: this process.
        rank: its place among the tasks that the job started with.
        terms: what the user allows.
        seconds: deadline of what the processes agree on.
        attempt: how often the job was restarted.
        joining: whether it replaces a lost one.

    Attributes:
        tasks: name and address of each process, by rank.
        rank: this process.
        is_chief: whether this process writes the files of the job.
        channel: agrees with the other processes.
        generation: how often the processes have changed, and why; None while this one is alone.
        lockstep: counts what all do in the same order; the strategy's.
    """

    def __init__(
        self, addresses: dict[str, str], connect: Callable[[], Member], task: str, rank: int,
        terms: Terms, seconds: float, attempt: int, joining: bool = False,
    ):  # fmt: skip
        self.addresses = addresses
        self.terms = terms
        self.seconds = seconds
        self.attempt = attempt
        self.lockstep: Lockstep | None = None
        self.generation: Generation | None = None
        self._connect = connect
        self._member: Member | None = None
        if joining:
            self.tasks: tuple[tuple[str, str], ...] = ((task, addresses[task]),)
            self.rank, self.is_chief = 0, rank == 0
            self.channel = Channel(LocalStore(), 0, [task], seconds)
        else:
            self.meet()

    def meet(self) -> None:
        """Joins the latest generation of members, at the start and after `GroupChangedError`.

        Raises:
            PeerTimeoutError: the others did not come in time.
        """
        compilations.finish()
        waits = self._member is None and hasattr(self, "channel")
        if self._member is None:
            self._member = self._connect()
        member = self._member
        if waits or member.is_held:  # for others; the service says when in vain
            member.await_change(threading.TIMEOUT_MAX)
        self.generation, store = regroup.join(member, self.seconds)
        self.tasks = tuple((name, self.addresses[name]) for name in self.generation.members)
        self.rank = self.generation.members.index(member.task)
        self.is_chief = self.rank == 0
        names = [f"{name} at {where}" for name, where in self.tasks]
        scope = f"stratagem/{self.attempt}"
        self.channel = Channel(_Watched(store, member), self.rank, names, self.seconds, scope)

    @property
    def member(self) -> Member:
        """This process's connection to the job's service.

        Raises:
            RuntimeError: it has not joined yet.
        """
        if self._member is None:
            raise RuntimeError("Expected a process that has joined its job. Got one that has not.")
        return self._member

    @property
    def is_waiting(self) -> bool:
        """Whether this process replaces a lost one, and has not joined the others yet."""
        return self.generation is None

    @property
    def has_changed(self) -> bool:
        """Whether the processes are others than at the start, in whatever way."""
        return self.generation is None or self.generation.number > 0

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.tasks)

    @property
    def may_change(self) -> bool:
        """Whether training goes on when a process is lost."""
        return self.terms.min_workers is not None

    @property
    def may_shrink(self) -> bool:
        """Whether it goes on with one process less than there are now."""
        return self.terms.min_workers is not None and self.size > max(1, self.terms.min_workers)

    @property
    def is_first_here(self) -> bool:
        """Whether no process before this one has the same host."""
        hosts = [where.rpartition(":")[0] for _, where in self.tasks]
        return hosts.index(hosts[self.rank]) == self.rank

    def run(self, step: Callable[[], T], doing: str) -> T:
        """`Member.run`, once this process has joined."""
        return step() if self._member is None else self._member.run(step, doing)

    def together(
        self,
        work: Callable[[], T],
        again: Callable[[T], object] | None = None,
        give: Callable[[], bytes] | None = None,
    ) -> T:
        """Does what every process does in the same order; see `Lockstep.unit`.

        Args:
            work: may be done several times.
            again: what to do where others have to do it once more; None does `work`.
            give: what a process that joins before it needs.
        """
        if self.lockstep is None:
            return work()
        return self.lockstep.unit(work, again or (lambda _: work()), give)

    def close(self, error: str | None = None) -> None:
        """Says goodbye; the error that ends this program, if one does."""
        if self._member is not None:
            self._member.close(error)


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
            cluster or key that is wrong (`roles.validate`, `own_host.find`, `keys.Key`).
    """
    global _current
    cluster = roles.training_cluster(resolver.cluster_spec())
    task_type, task_id = resolver.task_type, resolver.task_id
    roles.validate(cluster, task_type, task_id)
    addresses = roles.task_addresses(cluster, roles.TRAINERS)
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
    roles.id_in_cluster(cluster, task_type, task_id)  # refuses a ps
    task = f"{task_type} {task_id}"
    rank = list(addresses).index(task)  # indices may be left out in a cluster
    _current = _join(addresses, task, rank, seconds, stall_seconds)
    if _current.may_change:
        keep_compilations()
    atexit.register(leave)
    return _current


def keep_compilations() -> None:
    """Keeps what this job compiles on disk, for processes that come after it. Any number of times.

    A job calls it whose processes may change, and who writes or reads a backup. Does nothing in a
    process that is alone.
    """
    job = _current
    if job is not None:
        compilations.keep()
        _jax.share_compilations(lambda: job.is_first_here)


def _join(
    addresses: dict[str, str], task: str, rank: int, seconds: float, stall_seconds: float
) -> Job:
    env = config.environment()
    attempt = int(env.get(ATTEMPT, "0"))
    deadline = time.monotonic() + seconds
    key = keys.Key.of(env)
    host = own_host.find(task, addresses)
    _jax.listen_at(host)
    if rank == 0 and not key.secret and not own_host.is_loopback(host):
        _log.warning(keys.open_to_all(host))

    def service() -> str:
        """Of the launcher, or in this process, which the others then depend on."""
        global _service
        if address := env.get(COORDINATION):
            return address
        bind = addresses[task].rpartition(":")[0]
        _service = Service(f"{bind}:0", len(addresses), key=key)
        _service.start()
        return _service.address

    joining = bool(env.get(JOIN))
    if joining:
        address = env[COORDINATION]
    else:
        tasks = tuple(addresses.items())
        card = rollcall.Card(task, tasks, _versions(), attempt, time.time())
        address = rollcall.call(card, rank, seconds, service, key)
    terms = _terms(env, stall_seconds)

    def end(why: str, dump: bool) -> None:
        if _service is not None:
            _service.outlive(task, _LAST_SECONDS)
        end_process(f"{why}{_where(why, addresses, task)}", dump)

    def connect() -> Member:
        left = max(1.0, deadline - time.monotonic())
        return Member.connect(address, task, rank, terms, left, end, key)

    return Job(addresses, connect, task, rank, terms, seconds, attempt, joining)


def _where(why: str, addresses: Mapping[str, str], task: str) -> str:
    """The addresses of the other tasks that a text names, as a sentence after it."""
    named = [
        f"{other} is at {address}"
        for other, address in addresses.items()
        if other != task and re.search(rf"\b{other}\b", why)
    ]
    return f" {', '.join(named)}." if named else ""


def _terms(env: Mapping[str, str], stall_seconds: float) -> Terms:
    """What the launcher was told about losses, in the environment."""
    least, wait = env.get(MIN_WORKERS), env.get(WAIT_FOR_REPLACEMENT)
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
    job.close(_failure())
    compilations.finish()
    service, _service = _service, None
    if service is not None:
        service.close(job.seconds)


def _failure() -> str | None:
    """The error that ends this program, None where it comes to its end by itself."""
    error = getattr(sys, "last_value", None)  # what Python has printed before it calls `leave`
    return None if error is None else f"it has failed with {type(error).__name__}: {error}"


def _versions() -> str:
    return f"stratagem {version('stratagem')}, jax {jax.__version__}"
