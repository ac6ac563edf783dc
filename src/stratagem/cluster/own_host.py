"""The host at which this task listens: its own one of the cluster, and no other.

What a machine's name resolves to on the machine itself is often 127.0.0.1 or 127.0.1.1, which no
other machine reaches. So all that listens in a job listens at the host that the cluster gives.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping


def find(task: str, addresses: Mapping[str, str]) -> str:
    """The host of a task, without port or brackets, looked at before anybody waits for it.

    Args:
        task: this task, such as "worker 1".
        addresses: "host:port" of each task of the cluster.

    Raises:
        ValueError: it is no host of this machine, or one that other machines do not reach.
    """
    host = _host(addresses[task])
    field = "cluster." + task.replace(" ", "[") + "]"
    expected = f"TF_CONFIG {field}: expected an address of this machine, since this task is {task}."
    got = f"Got {addresses[task]}"
    try:
        address = _resolve(host)
        with socket.create_server((address, 0), family=_family(address)):
            pass
    except OSError as error:
        raise ValueError(
            f"{expected} {got}: {error.strerror or error}. The task's type and index may be "
            "another task's, or the host be known by another name or address here."
        ) from None
    others = {_host(where) for name, where in addresses.items() if name != task}
    if is_loopback(address) and (far := _first_elsewhere(others - {host})):
        raise ValueError(
            f"{expected} {got}: here that is {address}, which tasks on other machines (such as "
            f"{far}) do not reach. Write the machine's IP address in TF_CONFIG on all tasks, or "
            "correct the name in its /etc/hosts."
        )
    return host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there; also for names."""
    try:
        return ipaddress.ip_address(_resolve(host.strip("[]")).partition("%")[0]).is_loopback
    except OSError:
        return False


def _first_elsewhere(hosts: Iterable[str]) -> str | None:
    for host in sorted(hosts):
        try:
            _resolve(host)
        except OSError:  # whether it is there is another question
            continue
        if not is_loopback(host):
            return host
    return None


def _resolve(host: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise OSError(error.errno, f"the host name is unknown ({error.strerror})") from None
    return str(found[0][4][0])


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
