"""The service that holds a job together: it knows who is there, and hosts JAX's coordination.

Each task keeps one connection (`cluster/member.py`). A process that dies closes it, whatever it
died of, and the others know within milliseconds. A change of the members makes a new generation,
with a coordination service of its own: what the old one knew of the lost (addresses, barriers) is
not to be had out of it. Who connects gets a challenge first (`keys.py`).
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from stratagem import _jax
from stratagem.cluster import keys
from stratagem.cluster.membership import (
    Announce,
    Await,
    Beat,
    Dismiss,
    Effect,
    End,
    Hold,
    Membership,
    Refuse,
    Warn,
)
from stratagem.cluster.messages import LIMIT, Admit, Hello, Joined, decode, encode

_TICK_SECONDS = 0.5
_LOOK_SECONDS = 0.02
_PATIENCE_SECONDS = 10.0
_PORT_TRIES = 20

Host = Callable[[str, int], tuple[int, Any]]
_log = logging.getLogger("stratagem")


def host_jax(host: str, tasks: int) -> tuple[int, Any]:
    """Starts JAX's coordination service for some tasks on a free port; the port, and itself.

    Raises:
        RuntimeError: it cannot listen there.
    """
    problem = ""
    for _ in range(_PORT_TRIES):  # A port that was free a moment ago may be taken.
        with socket.create_server((host.strip("[]"), 0), family=_family(host)) as probe:
            port: int = probe.getsockname()[1]
        try:
            service = _jax.host_service(f"{host}:{port}", tasks)
        except RuntimeError as error:
            problem = str(error)
        else:
            return port, service
    raise RuntimeError(
        f"Expected to start JAX's coordination service on a free port of {host}. {_PORT_TRIES} "
        f"tries failed, the last with: {problem}. Look whether a firewall or limit forbids it."
    )


class Service:
    """The members of one job; runs in the thread that calls `serve`, or in its own after `start`.

    Args:
        address: "host:port" to listen at; port 0 picks one. JAX's service listens at that host.
        tasks: how many the job starts with.
        host: starts the coordination service of a generation.
        key: of the job; who has not the same one is refused. None lets everybody in.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(
        self, address: str, tasks: int, host: Host = host_jax, key: keys.Key | None = None
    ):
        self._host, _, port = address.rpartition(":")
        self._listener = socket.create_server(
            (self._host.strip("[]"), int(port)), family=_family(self._host)
        )
        self.address = f"{self._host}:{self._listener.getsockname()[1]}"
        self._members = Membership(tasks)
        self._start_hosting = host
        self._key = key or keys.Key()
        self._hosted: dict[int, Any] = {}  # services, by generation
        self._joined: dict[str, int] = {}  # the generation that each member is in
        self._generation = -1
        self._lines: dict[socket.socket, bytearray] = {}
        self._challenges: dict[socket.socket, str] = {}
        self._tasks: dict[socket.socket, str] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serves in a thread, where one of the tasks hosts the service itself."""
        self._thread = threading.Thread(target=self.serve, name="stratagem-service", daemon=True)
        self._thread.start()

    def close(self, seconds: float = 0.0) -> None:
        """Ends it; a process that still uses JAX's coordination service ends with it.

        Args:
            seconds: how long to wait for the tasks to end before.
        """
        start = time.monotonic()
        silent = True
        while self._tasks and (waited := time.monotonic() - start) < seconds:
            if silent and waited >= _PATIENCE_SECONDS:
                silent = False
                _log.warning(
                    "This process has come to its end, and waits up to %g s for %s, which need the "
                    "service that it hosts.",
                    seconds,
                    ", ".join(sorted(self._tasks.values())),
                )
            time.sleep(_LOOK_SECONDS)
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def outlive(self, task: str, seconds: float) -> None:
        """Waits for all tasks but this one to end; JAX aborts those whose service is gone."""
        deadline = time.monotonic() + seconds
        while set(self._tasks.values()) - {task} and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def serve(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Serves until `close`, or until it is not wanted any more."""
        with selectors.DefaultSelector() as selector, self._listener:
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ)
            ticked = time.monotonic()
            while wanted() and not self._closed.is_set():
                for key, _ in selector.select(_TICK_SECONDS):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        self._read(key.fileobj, selector)
                if time.monotonic() - ticked >= _TICK_SECONDS:
                    ticked = time.monotonic()
                    self._carry_out(self._members.tick(ticked))
                    self._tell("beat", None)
            for line in self._lines:
                line.close()
        for service in self._hosted.values():
            service.shutdown()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            line, _ = self._listener.accept()
            line.setblocking(False)
            self._lines[line] = bytearray()
            self._challenges[line] = keys.challenge()
            selector.register(line, selectors.EVENT_READ)
            _send(line, "challenge", self._challenges[line])

    def _read(self, line: Any, selector: selectors.BaseSelector) -> None:
        try:
            data = line.recv(LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        buffer = self._lines[line]
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            message, buffer[: end + 1] = bytes(buffer[:end]), b""
            if not self._take(line, message):
                data = b""  # a stranger, or a task of another attempt
                break
        if not data or len(buffer) > LIMIT:
            selector.unregister(line)
            self._drop(line)

    def _drop(self, line: socket.socket) -> None:
        del self._lines[line], self._challenges[line]
        line.close()
        task = self._tasks.pop(line, None)
        if task is not None and task not in self._tasks.values():
            why = "its connection closed"
            self._carry_out(self._members.gone(task, why, time.monotonic()))

    def _take(self, line: socket.socket, text: bytes) -> bool:
        """Takes in one message; False where the connection is to end."""
        now, message = time.monotonic(), decode(text)
        if message is None:
            return False
        if isinstance(message, Hello):
            return line not in self._tasks and self._greet(line, message, now)
        if line not in self._tasks:
            return False
        task = self._tasks[line]
        if isinstance(message, Beat):
            self._members.heard(task, message, now)
        elif isinstance(message, Joined):
            self._note_joined(task, message.generation)
        elif isinstance(message, Admit):
            self._carry_out(self._members.admit(now))
        elif message.error is None:
            self._carry_out(self._members.left(task))
            self._tell("left", task)
        else:
            self._carry_out(self._members.gone(task, message.error, now))
        return True

    def _greet(self, line: socket.socket, hello: Hello, now: float) -> bool:
        """Lets a task in; False where it may not take part."""
        mine, theirs = self._challenges[line], hello.challenge
        if fault := self._key.fault(hello.proof, "member", mine, theirs, hello.said):
            _log.warning("Refused a task that says it is %.40r: it %s", hello.task, fault)
            _send(line, "refused", f"{hello.task} {fault}")
            return False
        _send(line, "welcome", self._key.proof("service", theirs, mine))
        effects = self._members.hello(hello.task, hello.rank, hello.terms, now)
        if any(isinstance(effect, Refuse) for effect in effects):
            _send(line, "end", asdict(effects[0]))
            return False
        self._tasks[line] = hello.task
        self._carry_out(effects)
        return True

    def _note_joined(self, task: str, generation: int) -> None:
        """Ends the services that nobody uses any more."""
        self._joined[task] = generation
        oldest = min((self._joined.get(m, -1) for m in self._members.members), default=-1)
        for number in [n for n in self._hosted if n < oldest]:
            self._hosted.pop(number).shutdown()

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Announce):
                self._generation += 1
                port, service = self._start_hosting(self._host, len(effect.members))
                self._hosted[self._generation] = service
                said = {"number": self._generation, "port": port, **asdict(effect)}
                self._tell("generation", said)
            elif isinstance(effect, Hold):
                self._tell("hold", asdict(effect), self._members.members)
            elif isinstance(effect, Await):
                self._tell("await", asdict(effect), self._members.members)
            elif isinstance(effect, Dismiss):
                self._tell("dismiss", asdict(effect), effect.tasks)
            elif isinstance(effect, End):
                self._tell("end", asdict(effect))
            elif isinstance(effect, Warn):  # by the first one, the chief: the user reads it once
                self._tell("warn", effect.why, self._members.members[:1])

    def _tell(self, kind: str, said: Any, tasks: Sequence[str] | None = None) -> None:
        for line, task in self._tasks.items():
            if tasks is None or task in tasks:
                _send(line, kind, said)


def _send(line: socket.socket, kind: str, said: Any) -> None:
    """Tells a task; a message fits into the buffer of a connection that is read."""
    with contextlib.suppress(OSError):  # It is gone; the end of its connection follows.
        line.send(encode(kind, said))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
