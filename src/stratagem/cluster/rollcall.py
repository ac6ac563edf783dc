"""Who is there: before a job starts, every task meets the leader at the leader's own address.

JAX's own start waits for the others without saying for whom. Here, after the deadline, every task
says which tasks are missing and at what address; and a task of another cluster, of another version
or with a clock that is off is found out before anything can hang.

The leader (chief, or worker 0) listens at the address that the cluster gives it. The others
connect, say who they are, and keep the line open until the leader answers. Messages are one line
of JSON, at most 64 KiB, read as data and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stratagem.errors import JobMismatchError, PeerTimeoutError

_LIMIT = 1 << 16  # bytes of a message
_RETRY_SECONDS = 0.1
_GRACE_SECONDS = 3.0
_MAX_CLOCK_SKEW = 5.0  # seconds; more makes logs and file times of the job misleading


@dataclass(frozen=True)
class Card:
    """What a task says of itself.

    Args:
        task: as "worker 1".
        cluster: the tasks that train and their addresses, in the order of their ranks.
        version: of Stratagem and JAX.
        attempt: how often the job was restarted.
        clock: seconds since the epoch.
    """

    task: str
    cluster: tuple[tuple[str, str], ...]
    version: str
    attempt: int
    clock: float


def call(card: Card, rank: int, seconds: float, service: Callable[[], str]) -> str:
    """Meets the other tasks. Every task of the cluster calls it.

    Args:
        card: this task's.
        rank: its place in `card.cluster`; 0 leads.
        seconds: how long to wait for all.
        service: asked by the leader once all are there: the address of the job's coordination
            service, which every task gets.

    Returns:
        The address.

    Raises:
        PeerTimeoutError: names the tasks that are missing and their addresses.
        JobMismatchError: a task has another cluster, version or attempt; names what differs.
        ValueError: the leader's address is in use, or is no address of this machine.
    """
    if len(card.cluster) == 1:
        return service()
    deadline = time.monotonic() + seconds
    if rank:
        return _report(card, deadline, seconds)
    return _lead(card, deadline, seconds, service)


def _lead(card: Card, deadline: float, seconds: float, service: Callable[[], str]) -> str:
    own = card.cluster[0]
    with _listening(own) as listener, contextlib.ExitStack() as lines:
        present: dict[str, socket.socket] = {}
        faults: list[str] = []
        odd: list[socket.socket] = []
        end = [deadline]
        for line, said in _messages(listener, lines, end):
            got = _read_card(said)
            if got is None:
                continue  # a stranger: a port scan, a browser
            fault = _differences(card, got)
            if got.task in present and not fault:
                fault = f"  {got.task}: is there twice"
            if fault:
                faults.append(fault)
                odd.append(line)
                # The others are to hear it too, if they come soon.
                end[0] = min(end[0], time.monotonic() + _GRACE_SECONDS)
            else:
                present[got.task] = line
            if len(present) + len(odd) >= len(card.cluster) - 1:
                break
        missing = [t for t in card.cluster[1:] if t[0] not in present]
        if faults:
            text = _mismatch(card, faults)
            _send_all([*present.values(), *odd], {"error": text})
            raise JobMismatchError(text)
        if missing:
            text = _missing(missing, seconds, len(card.cluster))
            _send_all(present.values(), {"missing": text})
            raise PeerTimeoutError(text + f" (this is {_name(own)})")
        address = service()
        _send_all(present.values(), {"service": address})
        return address


def _report(card: Card, deadline: float, seconds: float) -> str:
    leader = card.cluster[0]
    own = next(t for t in card.cluster if t[0] == card.task)
    me = f" (this is {_name(own)})"
    host, port = _parse(leader[1])
    problem = "it does not answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=_left(deadline)) as line:
                _send(line, asdict(card))
                line.settimeout(_left(deadline) + 2 * _RETRY_SECONDS + 1)
                answer = json.loads(_read_line(line))
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
            time.sleep(min(_RETRY_SECONDS, _left(deadline)))
            continue
        except ValueError:
            problem = "what answers there is no leader of this job"
            time.sleep(min(_RETRY_SECONDS, _left(deadline)))
            continue
        if "missing" in answer:
            raise PeerTimeoutError(str(answer["missing"]) + me)
        if "error" in answer:
            raise JobMismatchError(str(answer["error"]) + me)
        return str(answer["service"])
    text = _missing([leader], seconds, len(card.cluster))
    raise PeerTimeoutError(f"{text} The last try: {problem}.{me}")


def _differences(mine: Card, got: Card) -> str:
    """What a task has that is not the leader's; empty when it is the same."""
    found = []
    if got.cluster != mine.cluster:
        found.append(f"its cluster is {_show(got.cluster)}, not {_show(mine.cluster)}")
    elif got.task not in [task for task, _ in mine.cluster]:
        found.append(f"it is none of the cluster's tasks {_show(mine.cluster)}")
    if got.version != mine.version:
        found.append(f"it runs {got.version}, not {mine.version}")
    if got.attempt != mine.attempt:
        found.append(f"it is of attempt {got.attempt}, not {mine.attempt}")
    if abs(got.clock - mine.clock) > _MAX_CLOCK_SKEW:
        found.append(f"its clock is {got.clock - mine.clock:+.0f} s off the leader's")
    return f"  {got.task}: " + "; ".join(found) if found else ""


def _mismatch(card: Card, faults: Sequence[str]) -> str:
    return (
        "Expected the same TF_CONFIG cluster, versions and clock on every task as on the leader "
        f"{_name(card.cluster[0])}. Got:\n" + "\n".join(faults) + "\nStart every task with the "
        "same cluster and in the same environment; only the task's type and index differ."
    )


def _missing(missing: Sequence[tuple[str, str]], seconds: float, count: int) -> str:
    return (
        f"Expected {count} tasks to start within {seconds:g} s. Missing: "
        + ", ".join(map(_name, missing))
        + ". Start it, or look at its log: it may have ended, wait for a resource, have another "
        "TF_CONFIG, or be unreachable from here (a firewall, a wrong host name)."
    )


def _name(task: tuple[str, str]) -> str:
    return f"{task[0]} at {task[1]}"


def _show(cluster: Sequence[tuple[str, str]]) -> str:
    return "[" + ", ".join(map(_name, cluster)) + "]"


@contextlib.contextmanager
def _listening(own: tuple[str, str]) -> Iterator[socket.socket]:
    """A socket at a task's address, or at its port where its host's name is another's (NAT)."""
    host, port = _parse(own[1])
    try:
        listener = socket.create_server((host, port), family=_family(host, port))
    except OSError as error:
        raise ValueError(_cannot_listen(own, error)) from None
    with listener:
        yield listener


def _cannot_listen(own: tuple[str, str], error: OSError) -> str:
    field = "cluster." + own[0].replace(" ", "[") + "]"
    return (
        f"TF_CONFIG {field}: expected a free address of this machine, since this task is {own[0]}. "
        f"Got {own[1]}: {error.strerror or error}. Another program may use the port, the address "
        "may be another machine's, or the task's type and index may be another task's."
    )


def _messages(
    listener: socket.socket, lines: contextlib.ExitStack, end: list[float]
) -> Iterator[tuple[socket.socket, bytes]]:
    """Every line that comes in before `end[0]`, with the connection to answer on."""
    with selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        buffers: dict[socket.socket, bytes] = {}
        while (left := _left(end[0])) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    line, _ = listener.accept()
                    lines.enter_context(line)
                    line.setblocking(False)
                    selector.register(line, selectors.EVENT_READ)
                    buffers[line] = b""
                    continue
                line = key.fileobj  # type: ignore[assignment]
                try:
                    data = line.recv(_LIMIT)
                except OSError:
                    data = b""
                buffers[line] += data
                if not data or b"\n" in buffers[line] or len(buffers[line]) > _LIMIT:
                    selector.unregister(line)
                    if data:
                        yield line, buffers[line]


def _read_card(text: bytes) -> Card | None:
    try:
        fields = json.loads(text)
        fields["cluster"] = tuple((str(t), str(a)) for t, a in fields["cluster"])
        card = Card(**fields)
        return card if isinstance(card.task, str) and abs(card.clock) >= 0 else None
    except (ValueError, TypeError, KeyError):
        return None


def _send(line: socket.socket, message: Any) -> None:
    with contextlib.suppress(OSError):  # it has gone: the leader's deadline says so
        line.setblocking(True)
        line.sendall(json.dumps(message).encode() + b"\n")


def _send_all(lines: Any, message: Any) -> None:
    for line in lines:
        _send(line, message)


def _read_line(line: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        data = line.recv(_LIMIT)
        if not data:
            raise ConnectionError("the leader closed the connection")
        received += data
        if len(received) > _LIMIT:
            raise ValueError("a message that is too long")
    return received


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _family(host: str, port: int) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror as error:
        raise OSError(error.errno, f"the host name is unknown ({error.strerror})") from None
