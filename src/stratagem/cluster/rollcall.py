"""Who is there: before a job starts, every task meets the leader at the leader's own address.

JAX's own start waits for the others without saying for whom. Here, after the deadline, every task
says which tasks are missing and at what address; and a task of another cluster, of another version
or with a clock that is off is found out before anything can hang.

The leader (chief, or worker 0) listens at the address that the cluster gives it. The others
connect, get a challenge (`keys.py`), say who they are, and keep the line open until the leader
answers. Messages are one line of JSON, at most 64 KiB, read as data and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stratagem.cluster.keys import VARIABLE, Key, challenge
from stratagem.cluster.tries import fair
from stratagem.errors import JobMismatchError, PeerTimeoutError

_LIMIT = 1 << 16  # bytes of a message
_RETRY_SECONDS = 0.1
_GRACE_SECONDS = 3.0
_CHALLENGE_SECONDS = 10.0  # what does not speak first is no leader
MAX_CLOCK_SKEW = 5.0  # seconds; more makes logs and file times of the job misleading


@dataclass(frozen=True)
class Card:
    """What a task says of itself.

    Args:
        task: as "worker 1".
        cluster: the tasks that train and their addresses, in the order of their ranks.
        version: of Stratagem and JAX.
        attempt: how often the job was restarted.
        clock: seconds since the epoch, when the call begins.
    """

    task: str
    cluster: tuple[tuple[str, str], ...]
    version: str
    attempt: int
    clock: float


@dataclass(frozen=True)
class _Line:
    """A connection to the leader, and what it was challenged with."""

    socket: socket.socket
    challenge: str


@dataclass(frozen=True)
class _Guest:
    """A task that has said who it is, and the challenge that it wants answered."""

    line: _Line
    challenge: str


def call(
    card: Card, rank: int, seconds: float, service: Callable[[], str], key: Key | None = None
) -> str:
    """Meets the other tasks. Every task of the cluster calls it.

    Args:
        card: this task's.
        rank: its place in `card.cluster`; 0 leads.
        seconds: how long to wait for all.
        service: asked by the leader once all are there: the address of the job's coordination
            service, which every task gets.
        key: of the job; None for none, which lets everybody in.

    Returns:
        The address.

    Raises:
        PeerTimeoutError: names the tasks that are missing and their addresses.
        JobMismatchError: a task has another cluster, version, attempt or key; names what differs.
        ValueError: the leader's address is in use, or is no address of this machine.
    """
    if len(card.cluster) == 1:
        return service()
    began = time.monotonic()
    deadline = began + seconds

    def now() -> Card:
        """The card, with what the clock says now: tasks do not start at once."""
        return replace(card, clock=card.clock + time.monotonic() - began)

    if rank:
        return _report(now, deadline, seconds, key or Key())
    return _lead(now, deadline, seconds, service, key or Key())


def _lead(
    now: Callable[[], Card],
    deadline: float,
    seconds: float,
    service: Callable[[], str],
    key: Key,
) -> str:
    card = now()
    own = card.cluster[0]
    with _listen(own) as listener, contextlib.ExitStack() as lines:
        present: dict[str, _Guest] = {}
        faults: list[str] = []
        odd: list[_Guest] = []
        refused: list[str] = []
        end = [deadline]
        for line, said in _messages(listener, lines, end):
            read = _read_card(said)
            if read is None:  # a stranger: a port scan, a browser
                line.socket.close()
                continue
            got, guest, proof = read[0], _Guest(line, read[1]), read[2]
            fault = key.fault(proof, "task", line.challenge, guest.challenge, asdict(got))
            if fault and key.secret:  # a stranger too: it may not end the job
                _answer(guest, {"error": _refusal(own, got.task, fault)}, key)
                line.socket.close()
                refused += [f"{t} {fault}" for t, _ in card.cluster[1:] if t == got.task]
                continue
            fault = f"  {got.task}: {fault}" if fault else _differences(now(), got)
            if got.task in present and not fault:
                fault = f"  {got.task}: is there twice"
            if fault:
                faults.append(fault)
                odd.append(guest)
                # The others are to hear it too, if they come soon.
                end[0] = min(end[0], time.monotonic() + _GRACE_SECONDS)
            else:
                present[got.task] = guest
            if len(present) + len(odd) >= len(card.cluster) - 1:
                break
        missing = [t for t in card.cluster[1:] if t[0] not in present]
        if faults:
            text = _mismatch(card, faults)
            _answer_all([*present.values(), *odd], {"error": text}, key)
            raise JobMismatchError(text)
        if missing:
            text = _missing(missing, seconds, len(card.cluster))
            if refused:
                text += f" Came and were refused: {', '.join(dict.fromkeys(refused))}."
            _answer_all(present.values(), {"missing": text}, key)
            raise PeerTimeoutError(text + f" (this is {_name(own)})")
        address = service()
        _answer_all(present.values(), {"service": address}, key)
        return address


def _report(now: Callable[[], Card], deadline: float, seconds: float, key: Key) -> str:
    card = now()
    leader = card.cluster[0]
    own = next(t for t in card.cluster if t[0] == card.task)
    me = f" (this is {_name(own)})"
    host, port = split_address(leader[1])
    problem = "it does not answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=fair(deadline)) as line:
                answer, fault = _ask(line, now(), deadline, key)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
            time.sleep(min(_RETRY_SECONDS, _left(deadline)))
            continue
        except (ValueError, KeyError, TypeError, RecursionError):
            problem = "what answers there is no leader of this job"
            time.sleep(min(_RETRY_SECONDS, _left(deadline)))
            continue
        if fault and "error" not in answer:
            raise JobMismatchError(_refusal(own, f"the leader {_name(leader)}", fault))
        if "missing" in answer:
            raise PeerTimeoutError(str(answer["missing"]) + me)
        if "error" in answer:
            raise JobMismatchError(str(answer["error"]) + me)
        return str(answer["service"])
    text = _missing([leader], seconds, len(card.cluster))
    raise PeerTimeoutError(f"{text} The last try: {problem}.{me}")


def _ask(line: socket.socket, card: Card, deadline: float, key: Key) -> tuple[Any, str]:
    """The leader's answer to a card, and what is wrong with the proof of its key."""
    line.settimeout(min(fair(deadline), _CHALLENGE_SECONDS))
    theirs, own = json.loads(_read_line(line))["challenge"], challenge()
    said = asdict(card)
    _send(line, {"card": said, "challenge": own, "proof": key.proof("task", theirs, own, said)})
    line.settimeout(_left(deadline) + 2 * _RETRY_SECONDS + _GRACE_SECONDS)
    message = json.loads(_read_line(line))
    answer = message["answer"]
    return answer, key.fault(message["proof"], "leader", own, theirs, answer)


def _refusal(own: tuple[str, str], who: str, fault: str) -> str:
    return (
        f"Expected every task of the job to have the same {VARIABLE} as {_name(own)}. "
        f"Got: {who} {fault}. Set the variable to the same secret on all tasks, or on none."
    )


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
    if abs(got.clock - mine.clock) > MAX_CLOCK_SKEW:
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


def listen(address: str) -> socket.socket:
    """A socket that listens at a task's address; OSError where this machine cannot."""
    host, port = split_address(address)
    return socket.create_server((host, port), family=_family(host, port))


def _listen(own: tuple[str, str]) -> socket.socket:
    """A socket at the leader's own address."""
    try:
        return listen(own[1])
    except OSError as error:
        raise ValueError(_cannot_listen(own, error)) from None


def _cannot_listen(own: tuple[str, str], error: OSError) -> str:
    field = "cluster." + own[0].replace(" ", "[") + "]"
    return (
        f"TF_CONFIG {field}: expected a free address of this machine, since this task is {own[0]}. "
        f"Got {own[1]}: {error.strerror or error}. Another program may use the port, the address "
        "may be another machine's, or the task's type and index may be another task's."
    )


def _messages(
    listener: socket.socket, lines: contextlib.ExitStack, end: list[float]
) -> Iterator[tuple[_Line, bytes]]:
    """Every line that comes in before `end[0]`, with the connection to answer on."""
    with selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        buffers: dict[_Line, bytes] = {}
        while (left := _left(end[0])) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):  # It has gone again.
                        connection = lines.enter_context(listener.accept()[0])
                        connection.setblocking(False)
                        line = _Line(connection, challenge())
                        selector.register(connection, selectors.EVENT_READ, line)
                        buffers[line] = b""
                        connection.send(_message({"challenge": line.challenge}))
                    continue
                line = key.data
                try:
                    data = line.socket.recv(_LIMIT)
                except OSError:
                    data = b""
                buffers[line] += data
                if not data or b"\n" in buffers[line] or len(buffers[line]) > _LIMIT:
                    selector.unregister(line.socket)
                    text = buffers.pop(line)
                    if data:
                        yield line, text
                    else:
                        line.socket.close()


def _read_card(text: bytes) -> tuple[Card, str, Any] | None:
    """What a task says of itself, its challenge and its proof; None where it is no task."""
    try:
        message = json.loads(text)
        fields = message["card"]
        fields["cluster"] = tuple((str(t), str(a)) for t, a in fields["cluster"])
        card = Card(**fields)
        kinds = [isinstance(v, str) for v in (card.task, card.version, message["challenge"])]
        good = all(kinds) and isinstance(card.attempt, int) and math.isfinite(card.clock)
        return (card, message["challenge"], message["proof"]) if good else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _message(said: Any) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _send(line: socket.socket, said: Any) -> None:
    with contextlib.suppress(OSError):  # it has gone: the leader's deadline says so
        line.settimeout(_CHALLENGE_SECONDS)
        line.sendall(_message(said))


def _answer(guest: _Guest, answer: Any, key: Key) -> None:
    proof = key.proof("leader", guest.challenge, guest.line.challenge, answer)
    _send(guest.line.socket, {"answer": answer, "proof": proof})


def _answer_all(guests: Iterable[_Guest], answer: Any, key: Key) -> None:
    for guest in guests:
        _answer(guest, answer, key)


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


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _family(host: str, port: int) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror as error:
        raise OSError(error.errno, f"the host name is unknown ({error.strerror})") from None
