"""A job on several machines, without an engine: the same command is run once on each of them.

Every machine works out the same cluster from the same command, and starts its own share. The first
one hosts the coordination service. Machines notice a loss on another one by their own tasks, which
leave with exit code 43, and each restarts its share. Attempt k uses a port of its own for the
service, so that tasks of different attempts cannot meet.

With base port p, r restarts and t tasks on a machine, these ports are used there: p to p + r for
the service, and p + r + 1 to p + r + t for the tasks.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stratagem.launcher.abstract import Job, Launcher, LaunchError, Task, service_command
from stratagem.launcher.local import LocalExecutor, ServiceCommand
from stratagem.launcher.output import Output
from stratagem.launcher.supervisor import Plan, Supervisor

DEFAULT_PORT = 2222
_LAST_PORT = 65535
_HOST = re.compile(r"(?P<host>\[[^\s\[\]/]+\]|[^\s:/\[\],]+)(:(?P<port>[0-9]+))?")


@dataclass(frozen=True)
class Host:
    """A machine, and the first of the ports that the job uses there."""

    name: str
    port: int


def parse_hosts(text: str) -> list[Host]:
    """`"a:2222,b"` -> hosts; the port is `DEFAULT_PORT` where none is given.

    Raises:
        LaunchError: malformed or repeated hosts; all of them are named.
    """
    hosts: list[Host] = []
    faults: list[str] = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        port = int(match["port"] or DEFAULT_PORT) if match else 0
        if match is None:
            faults.append(f"{part!r} (not of that form)")
        elif not 1 <= port <= _LAST_PORT:
            faults.append(f"{part!r} (port {port} is not in 1 to {_LAST_PORT})")
        elif match["host"].lower() in [host.name.lower() for host in hosts]:
            faults.append(f"{part!r} (named twice: one share of the tasks for each machine)")
        else:
            hosts.append(Host(match["host"], port))
    local = [host.name for host in hosts if _is_loopback(host.name)]
    if len(local) < len(hosts):
        faults += [f"{name!r} (which only that machine itself can reach)" for name in local]
    if faults:
        raise LaunchError(
            "--hosts: expected the names or IPs of the machines, as the other machines know them, "
            f"with commas between, such as a:2222,b:2222. Got {'; '.join(faults)}."
        )
    return hosts


def shares(job: Job, hosts: int) -> list[list[Task]]:
    """The tasks of each machine: workers and servers in even, consecutive shares.

    The first machines have one more where it does not divide. Chief and evaluator are on the first.
    """
    share: list[list[Task]] = [[] for _ in range(hosts)]
    for kind, count in job.counts().items():
        spread = 1 if kind in ("chief", "evaluator") else hosts
        each, more = divmod(count, spread)
        start = 0
        for host in range(spread):
            stop = start + each + (host < more)
            share[host] += [Task(kind, index) for index in range(start, stop)]
            start = stop
    return share


class HostsExecutor(LocalExecutor):
    """This machine's share of the tasks, as processes.

    Args:
        hosts: all machines, in the same order on each.
        index: which of them this is.
        environment: the variables that tasks inherit.
        service: address and number of tasks -> the command of the coordination service.
    """

    _serves_others = True

    def __init__(
        self,
        hosts: Sequence[Host],
        index: int,
        environment: Mapping[str, str],
        service: ServiceCommand = service_command,
    ) -> None:
        super().__init__(environment, service)
        self._hosts, self._index = hosts, index

    def plan(self, job: Job, attempt: int) -> Plan:
        """Raises LaunchError where ports of this machine are taken or too high."""
        restarts = job.limits.max_restarts
        addresses = {
            task: f"{host.name}:{host.port + restarts + 1 + place}"
            for host, share in zip(self._hosts, shares(job, len(self._hosts)), strict=True)
            for place, task in enumerate(share)
        }
        first = self._hosts[0]
        service = f"{first.name}:{first.port + attempt % (restarts + 1)}"
        own = tuple(shares(job, len(self._hosts))[self._index])
        hosts_service = job.coordinated and self._index == 0
        used = [addresses[task] for task in own] + [service] * hosts_service
        self._check_ports(used)
        return Plan(addresses, own, service if job.coordinated else None, hosts_service)

    def _check_ports(self, used: Sequence[str]) -> None:
        ports = [int(address.rpartition(":")[2]) for address in used]
        taken = [str(port) for port in ports if port > _LAST_PORT or not _is_free(port)]
        if taken:
            raise LaunchError(
                f"--hosts: expected ports {min(ports)} to {max(ports)} of this machine "
                f"({self._hosts[self._index].name}) to be free. Taken, or above {_LAST_PORT}: "
                f"{', '.join(taken)}. End what listens there (an earlier run?), or give another "
                "base port to --hosts, on all machines alike."
            )

    def _first_trainer(self, job: Job) -> int:
        before = shares(job, len(self._hosts))[: self._index]
        return sum(job.computes(task.type) for share in before for task in share)


class HostsLauncher(Launcher):
    """Runs this machine's share of a job, and supervises it. Arguments as `HostsExecutor`."""

    def __init__(
        self,
        hosts: Sequence[Host],
        index: int,
        environment: Mapping[str, str],
        output: Output | None = None,
        service: ServiceCommand = service_command,
    ) -> None:
        self._executor = HostsExecutor(hosts, index, environment, service)
        self._output = output

    def launch(self, job: Job) -> int:
        output = self._output or Output(job.tasks())
        return Supervisor(job, self._executor, output).run()


def own_index(hosts: Sequence[Host]) -> int:
    """Which of the hosts this machine is: the one whose address it can listen on.

    Raises:
        LaunchError: none is, or several are.
    """
    own = [index for index, host in enumerate(hosts) if _is_own(host.name)]
    if len(own) != 1:
        found = ", ".join(hosts[index].name for index in own) or "none of them"
        raise LaunchError(
            "--hosts: expected exactly one of the machines to be this one. Got "
            f"{found} out of {', '.join(host.name for host in hosts)}. Say which with "
            "--host-index 0, 1, ...: its place in the list."
        )
    return own[0]


def _is_loopback(name: str) -> bool:
    return name.lower() == "localhost" or name == "[::1]" or name.startswith("127.")


def _is_own(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:  # Not known here, so not this machine.
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: object) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)  # type: ignore[arg-type]
        except OSError:
            return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port that only waits for late packets of an ended one is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
