"""What is wrong with a task's cluster, as findings: pure functions of what was read elsewhere."""

from __future__ import annotations

import enum
import errno
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stratagem.cluster import keys, roles, tf_config
from stratagem.cluster.rollcall import split_address
from stratagem.cluster.spec import ClusterSpec, one_task

_EVALUATOR = "evaluator"
_AGAIN = "Correct it where this task is started, then run stratagem doctor again."


class Level(enum.Enum):
    """How much a finding matters."""

    FINE = "fine"
    LOOK = "look"
    """May be as it should be; look at it when something does not work."""
    FAULT = "fault"
    """Training cannot work so."""


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Args:
        level: how much it matters.
        what: what was checked.
        found: what is there.
        do: what to do about it; empty where it is fine.
    """

    level: Level
    what: str
    found: str
    do: str = ""


@dataclass(frozen=True)
class Seat:
    """The place of a task in its cluster.

    Args:
        task: as "worker 1".
        cluster: every task but the evaluator, and its address: chief, workers, servers.
    """

    task: str
    cluster: tuple[tuple[str, str], ...]

    @property
    def address(self) -> str:
        """Where this task listens."""
        return dict(self.cluster)[self.task]

    @property
    def served(self) -> bool:
        """Whether the cluster has parameter servers."""
        return any(task.startswith("ps ") for task, _ in self.cluster)

    @property
    def others(self) -> tuple[tuple[str, str], ...]:
        """All tasks but this one."""
        return tuple(entry for entry in self.cluster if entry[0] != self.task)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each task, each once."""
        return tuple(dict.fromkeys(split_address(address)[0] for _, address in self.cluster))


def seat_of(cluster: ClusterSpec, task_type: str, task_id: int) -> Seat:
    """The seat of a task of a cluster that `roles.validate` lets pass; an evaluator has none."""
    tasks = roles.task_addresses(roles.training_cluster(cluster))
    return Seat(f"{task_type} {task_id}", tuple(tasks.items()))


def check_tf_config(text: str | None) -> tuple[Seat | None, list[Finding]]:
    """The seat that TF_CONFIG gives this task, None where it gives none, and what is wrong."""
    what = "TF_CONFIG"
    if text is None or not text.strip():
        return None, [Finding(Level.FINE, what, "not set: this machine trains alone")]
    if faults := tf_config_faults(text):
        return None, [Finding(Level.FAULT, what, fault, _AGAIN) for fault in faults]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = tf_config.parse(text)
    cluster = read.cluster
    if not cluster:
        keys = ", ".join(map(repr, json.loads(text))) or "nothing"
        do = 'Put the addresses of all tasks under "cluster", or unset TF_CONFIG to train alone.'
        return None, [Finding(Level.LOOK, what, f"no tasks under 'cluster'. It has {keys}", do)]
    found = [Finding(Level.LOOK, what, str(one.message), _AGAIN) for one in caught]
    if read.task_type is None or read.task_id is None:
        if one_task(cluster):
            return None, [*found, Finding(Level.FINE, what, "one task: this machine trains alone")]
        do = f'Add "task": {{"type": "worker", "index": 0}} for the first worker. {_AGAIN}'
        text = "expected the type and the index of this task under 'task'. Got one of them or none"
        return None, [*found, Finding(Level.FAULT, what, text, do)]
    task = f"{read.task_type} {read.task_id}"
    if read.task_type == _EVALUATOR:
        text = f"{task}: takes no part in training, so nobody connects to it"
        return None, [*found, Finding(Level.FINE, what, text)]
    seat = seat_of(cluster, read.task_type, read.task_id)
    text = f"{task} at {seat.address}, one of {len(seat.cluster)} tasks that train together"
    return seat, [*found, Finding(Level.FINE, what, text)]


def tf_config_faults(text: str) -> list[str]:
    """All that `tf_config.parse` refuses: each part by itself, and then the whole.

    It ends at the first part that is malformed; whoever corrects one wants to know of the others.
    """
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    parts = fields.items() if isinstance(fields, dict) else ()
    faults: dict[str, None] = {}
    for part in (*(json.dumps({key: value}) for key, value in parts), text):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tf_config.parse(part)
            except ValueError as error:
                faults.update(dict.fromkeys(str(error).splitlines()))
    task = fields.get("task") if isinstance(fields, dict) else None
    kind = task.get("type") if isinstance(task, dict) else None
    if isinstance(kind, str) and kind not in roles.TASK_TYPES:  # Wrong in every cluster.
        named = roles.faults(ClusterSpec({}), kind, None, type_field='TF_CONFIG["task"]["type"]')
        faults.update(dict.fromkeys(named))
    return list(faults)


def check_names(seat: Seat, resolved: Mapping[str, Sequence[str] | str]) -> list[Finding]:
    """Whether every host of the cluster has an address, as this machine sees it.

    Args:
        seat: this task's.
        resolved: host -> its IP addresses, or why there are none.
    """
    what = "host names"
    found = []
    for host in seat.hosts:
        got = resolved[host]
        if isinstance(got, str):
            tasks = [task for task, a in seat.cluster if split_address(a)[0] == host]
            do = "Correct the name, or add it to the name service or /etc/hosts; or write its IP."
            text = f"{host} ({', '.join(tasks)}): {got}"
            found.append(Finding(Level.FAULT, what, text, do))
    own = split_address(seat.address)[0]
    addresses = resolved[own]
    elsewhere = any(
        not isinstance(resolved[h], str) and not _loopback(resolved[h]) for h in seat.hosts
    )
    # The first is where this task will listen.
    if not isinstance(addresses, str) and _loopback(addresses[:1]) and elsewhere:
        # As some systems write it into /etc/hosts when they are installed.
        text = f"{own}, this machine, is {', '.join(addresses)} here, where others cannot reach it"
        do = f"Take the line of {own} with 127.* out of /etc/hosts, or write this machine's IP."
        found.append(Finding(Level.FAULT, what, text, do))
    return found or [
        Finding(Level.FINE, what, f"{len(seat.hosts)} of {len(seat.hosts)} have an address")
    ]


def check_own_address(seat: Seat, error: OSError | None, holder: str | None) -> Finding:
    """Whether this task can listen at its address.

    Args:
        seat: this task's.
        error: what an attempt raised, None where it worked.
        holder: which process listens at the port, if that is known.
    """
    what, where = "own address", f"{seat.address} ({seat.task})"
    if error is None:
        return Finding(Level.FINE, what, f"{where} is this machine's, and the port is free")
    port = split_address(seat.address)[1]
    why, do = error.strerror or str(error), "Give this task an address where it can listen."
    if error.errno == errno.EADDRINUSE:
        why = f"the port is in use, by {holder or 'a program that cannot be seen from here'}"
        do = f"End it (an earlier run?), or give this task another port than {port}."
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "this machine has no such address"
        do = (
            "Correct the task's index, if this is another task; or give the name or IP that the "
            "other machines know this machine by and that it has itself (`ip address` shows them)."
        )
    elif error.errno == errno.EACCES:
        why, do = f"{why}: ports below 1024 are the system's", "Give this task a port above 1023."
    return Finding(Level.FAULT, what, f"{where}: {why}", do)


def check_key(
    environment: Mapping[str, str],
    resolved: Mapping[str, Sequence[str] | str],
    served: bool = False,
) -> list[Finding]:
    """Whether strangers are kept out of the job.

    Args:
        environment: the variables of this process.
        resolved: as in `check_names`.
        served: whether it has parameter servers, which insist on a key.
    """
    what = "key"
    try:
        key = keys.Key.of(environment)
    except ValueError as error:
        return [Finding(Level.FAULT, what, str(error), _AGAIN)]
    if key.secret:
        there = next(n for n in (keys.VARIABLE, keys.FILE_VARIABLE) if environment.get(n))
        return [Finding(Level.FINE, what, f"{there} is set")]
    if all(isinstance(got, str) or _loopback(got) for got in resolved.values()):
        return []
    if served:
        do = f"Set {keys.VARIABLE} to the same secret on all tasks (`openssl rand -hex 32`)."
        text = f"no {keys.VARIABLE}: workers and servers refuse to listen for other machines"
        return [Finding(Level.FAULT, what, text, do)]
    do = (
        f"Set {keys.VARIABLE} to the same secret on all tasks (`openssl rand -hex 32`), or see "
        "that only the job's machines reach each other."
    )
    text = f"no {keys.VARIABLE}: what reaches the ports of a task may take part in the job"
    return [Finding(Level.LOOK, what, text, do)]


def check_serving(seat: Seat) -> list[Finding]:
    """Whether a cluster with parameter servers has all that it needs; nothing for other ones."""
    if not seat.served:
        return []
    tasks = [task for task, _ in seat.cluster]
    kinds = [task.partition(" ")[0] for task in tasks]
    what = "parameter servers"
    if "worker" not in kinds:
        do = "Add the addresses of workers; servers only keep the variables."
        return [Finding(Level.FAULT, what, "no worker in the cluster", do)]
    counts = f"{_many(kinds.count('worker'), 'worker')} and {_many(kinds.count('ps'), 'server')}"
    if "chief" in kinds:
        return [Finding(Level.FINE, what, f"{counts}, which the chief coordinates")]
    if "worker 0" in tasks:
        text = f"{counts}; no chief, so the program of worker 0 coordinates them, and serves beside"
        return [Finding(Level.FINE, what, text)]
    do = "Add the address of a chief, which coordinates the others by your program, or of worker 0."
    return [Finding(Level.FAULT, what, f"{counts}, but neither a chief nor worker 0", do)]


def check_encryption(has_curve: bool, version: str) -> Finding:
    """Whether ZeroMQ, which carries what parameter servers say, can encrypt it.

    Args:
        has_curve: whether it was built with CURVE.
        version: of pyzmq.
    """
    what = "encryption"
    if has_curve:
        return Finding(Level.FINE, what, f"pyzmq {version} has CURVE, for parameter servers")
    do = "pip install --force-reinstall pyzmq: its wheels have it; or build libzmq with libsodium."
    text = f"pyzmq {version} is built without CURVE, which parameter servers need"
    return Finding(Level.LOOK, what, text, do)


def check_proxies(environment: Mapping[str, str], seat: Seat | None) -> list[Finding]:
    """Proxies that gRPC, which connects the tasks, may send them through."""
    proxies = sorted(
        name for name, value in environment.items() if name.lower().endswith("_proxy") and value
    )
    ways = [name for name in proxies if not name.lower().startswith("no_")]
    if not ways or seat is None:
        return []
    exempt = [
        part.strip().lstrip("*.")
        for name in proxies
        if name.lower().startswith("no_")
        for part in environment[name].split(",")
    ]
    through = [
        host
        for host in seat.hosts
        if not any(host == e or e and host.endswith(f".{e}") for e in exempt)
    ]
    what, names = "proxies", ", ".join(ways)
    if not through:
        return [Finding(Level.FINE, what, f"{names}, but not for the hosts of the cluster")]
    do = f"Unset them for training, or: export no_proxy={','.join(through)}"
    text = f"{names} may keep this task from {', '.join(through)}"
    return [Finding(Level.LOOK, what, text, do)]


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _loopback(addresses: Sequence[str]) -> bool:
    return all(address.startswith("127.") or address == "::1" for address in addresses)
