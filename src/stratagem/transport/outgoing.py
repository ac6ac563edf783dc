"""The end of a connection that asks: requests, their repeats and deadlines. No sockets, no clocks.

A request travels once. While it has no answer, a ping asks the other end about it from time to
time. What the other end has never seen is sent again; an answer that it has given, and that should
have come before its pong, is asked for again. So nothing large travels twice unless it was lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from stratagem.errors import (
    MalformedMessageError,
    PeerLostError,
    PeerTimeoutError,
    RemoteError,
    StratagemError,
)
from stratagem.transport.message import NOBODY, PING, REPEAT, REQUEST, Message, Prefix, pack
from stratagem.transport.shares import Shares

if TYPE_CHECKING:
    from stratagem.transport.hub import Hub

Result: TypeAlias = Message | Exception
Done: TypeAlias = Callable[[Result], None]

WINDOW_BYTES = 256 << 20
"""Bytes of open requests to a peer; who posts more waits."""

WINDOW_REQUESTS = 4096
"""Open requests to a peer; who posts more waits."""

_MOST_ASKED = 1024  # requests that a ping asks about
_LONG_SILENCE, _SELDOM = 60, 10  # heartbeats after which pings become seldom, and how much
_FORMER = 8  # incarnations of a peer whose late messages are told from its present one's


class Awaited(Protocol):
    """A request, or what is part of one; see `Ticket`."""

    @property
    def done(self) -> bool: ...

    def result(self) -> Message: ...


class Ticket:
    """A request that was posted.

    Attributes:
        peer: who was asked.
        method: what for.
        done: whether it is over.
    """

    __slots__ = ("_callback", "_result", "done", "method", "peer")

    def __init__(self, peer: Peer, method: str, callback: Done | None):
        self.peer, self.method, self._callback = peer, method, callback
        self._result: Result | None = None
        self.done = False

    def result(self) -> Message:
        """The answer of a request that is over; raises its error."""
        if self._result is None:
            raise RuntimeError(
                f"Expected a request that is over. Got {self.method!r} to {self.peer.name}, which "
                "has no answer yet. Wait with hub.wait([ticket])."
            )
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def finish(self, result: Result) -> Done | None:
        """Sets the result; gives what is to be called with it."""
        self._result, self.done = result, True
        callback, self._callback = self._callback, None
        return callback


@dataclass(slots=True)
class _Open:
    """A request without an answer."""

    ticket: Ticket
    body: bytes
    frames: Sequence[np.ndarray]
    arrays: Sequence[np.ndarray]  # kept while the other end may read them in shared memory
    size: int
    seconds: float
    sent: float
    deadline: float
    incarnation: bytes


class Peer:
    """A task that this hub is connected to. Made by `Hub.connect`; used in the hub's thread.

    Attributes:
        name: as errors say it, such as "ps 1".
        address: where it listens.
        incarnation: a random id of the hub at the other end, hence other after a restart; None
            before it was heard.
        bytes: of the requests that are open, or may still be on the way.
    """

    def __init__(self, hub: Hub, name: str, address: str, link: Any, shares: Shares):
        self.name, self.address, self.link = name, address, link
        self.incarnation: str | None = None
        self.bytes = 0
        self.shares = shares
        self.due = float("inf")
        self._hub = hub
        self._to = NOBODY
        self._former: deque[bytes] = deque(maxlen=_FORMER)
        self._open: dict[int, _Open] = {}
        self._next = 1
        self._below = 1
        self._heard: float | None = None
        self._prompted: float | None = hub.now()
        self._pinged = float("-inf")
        # Requests that ended without an answer, until the peer says that it will not execute them:
        # they may be in a queue on the way, and the peer may still open their arrays.
        self._late: dict[int, _Open] = {}

    def __repr__(self) -> str:
        return f"<Peer {self}>"

    def __str__(self) -> str:
        return self.name if self.address in self.name else f"{self.name} at {self.address}"

    @property
    def silence(self) -> float:
        """Seconds for which it has not answered what it was sent; 0 where it owes no answer.

        Time in which this hub did not turn does not count against the peer.
        """
        if self._prompted is None:
            return 0.0
        return max(0.0, self._hub.looked - self._prompted)

    @property
    def heard(self) -> bool:
        """Whether it was ever heard."""
        return self._heard is not None

    @property
    def open(self) -> int:
        """Requests without an answer."""
        return len(self._open)

    def post(
        self,
        method: str,
        fields: Mapping[str, Any] | None = None,
        arrays: Sequence[np.ndarray] = (),
        *,
        seconds: float,
        done: Done | None = None,
    ) -> Ticket:
        """Asks the peer for something.

        Where requests of `WINDOW_BYTES` or `WINDOW_REQUESTS` are open it waits, turning the hub.

        Args:
            method: what for.
            fields: see `Message`.
            arrays: see `Message`; nobody changes them before the request is over.
            seconds: the deadline, from now.
            done: called in the hub's thread with the answer, or the error.

        Raises:
            MalformedMessageError: it is no message, or too large.
            PeerTimeoutError: the peer did not take earlier requests in time.
        """
        message = Message(method, fields or {}, tuple(arrays))
        return self._hub.post(self, message, seconds, done)

    # What follows is for the hub.

    def full(self, more: int, times: int = 1) -> bool:
        """Whether so many bytes more have to wait; a single request never has to."""
        count = len(self._open) + len(self._late)
        return count > 0 and (
            self.bytes + more > WINDOW_BYTES * times or count >= WINDOW_REQUESTS * times
        )

    def send(self, message: Message, seconds: float, done: Done | None, now: float) -> Ticket:
        """Sends a request."""
        arrays, places = self.shares.place(message.arrays)
        if arrays:
            message = Message(message.method, message.fields, arrays)
        body, frames, size = pack(message, self._hub.limits, places)
        number, self._next = self._next, self._next + 1
        ticket = Ticket(self, message.method, done)
        request = _Open(
            ticket, body, frames, arrays, size, seconds, now, now + seconds, self._to
        )  # fmt: skip
        self._open[number] = request
        self.bytes += size
        self._transmit(number, request)
        if self._prompted is None:
            self._prompted = now
        return ticket

    def hear(self, prefix: Prefix, now: float) -> bool:
        """Notes who has sent a message; whether it counts."""
        sender = prefix.sender
        if sender in self._former:
            return False
        self._heard, self._prompted = now, None
        if sender != self._to:
            if self._to != NOBODY:
                self._lost()
            self._to, self.incarnation = sender, sender.hex()
            for request in self._open.values():
                request.incarnation = sender
        return True

    def answer(self, number: int, result: Result) -> None:
        """Takes the answer of a request; one that came before is ignored."""
        request = self._open.get(number)
        if request is not None:
            self._close(number, request, result, late=False)

    def awaits(self, number: int) -> bool:
        """Whether the request is open."""
        return number in self._open

    def method(self, number: int) -> str:
        """What an open request is for."""
        return self._open[number].ticket.method

    def pong(self, prefix: Prefix, fields: Mapping[str, Any], now: float) -> None:
        """Sends again what got lost on the way, or asks for it."""
        for number in [number for number in self._late if number < prefix.below]:
            self.bytes -= self._late.pop(number).size
        for number in _numbers(fields, "unknown"):
            if (request := self._open.get(number)) is not None:
                self._transmit(number, request)
        if again := [n for n in _numbers(fields, "answered") if n in self._open]:
            self._control(REPEAT, {"numbers": again})
        if self.shares.hear(fields.get("shares")):
            self._ping(now)

    def tick(self, now: float, heartbeat: float) -> float:
        """Expires deadlines and pings; gives when to come again."""
        nearest = now + heartbeat
        expired = []
        for number, request in self._open.items():
            if request.deadline <= now:
                expired.append(number)
            else:
                nearest = min(nearest, request.deadline)
        for number in expired:
            request = self._open[number]
            self._close(number, request, self._timeout(request), late=True)
        if self.silence > _LONG_SILENCE * heartbeat:
            heartbeat *= _SELDOM  # pings wait for it in a queue
        if now >= self._pinged + heartbeat:
            self._ping(now)
        return min(nearest, max(self._pinged + heartbeat, now))

    def abandon(self, why: str) -> None:
        """Ends all requests, as the hub closes."""
        for number, request in list(self._open.items()):
            error = PeerLostError(
                f"Expected an answer of {self} to {request.ticket.method!r}. Got none: {why}."
            )
            self._close(number, request, error, late=False)
        self.shares.close()

    def timeout(self, method: str, seconds: float, what: str = "an answer") -> PeerTimeoutError:
        """The error of a wait for this peer."""
        if not self.heard:
            state = (
                "It was never heard: it does not run, is out of reach, or has another "
                "STRATAGEM_CLUSTER_KEY (then its log says that it refused a connection)."
            )
        elif self.silence > 2 * self._hub.heartbeat:
            state = (
                f"It has been silent for {self.silence:.1f} s: it is stopped, busy or out of reach."
            )
        else:
            state = "It is alive: it is busy with this or other work."
        return PeerTimeoutError(
            f"Expected {what} of {self} to {method!r} within {seconds:g} s (this is "
            f"{self._hub.name}). Got none. {state} Look at its log, or allow more time."
        )

    def _timeout(self, request: _Open) -> PeerTimeoutError:
        return self.timeout(request.ticket.method, request.seconds)

    def _lost(self) -> None:
        """Ends what was asked of the process that was there before."""
        old = self._to
        self._former.append(old)
        self.bytes -= sum(request.size for request in self._late.values())
        self._late.clear()
        self.shares.close()
        self.shares = self._hub.new_shares()
        for number, request in list(self._open.items()):
            error = PeerLostError(
                f"Expected an answer of {self} to {request.ticket.method!r} (this is "
                f"{self._hub.name}). Got one of another process: it was restarted, so what it held "
                "in memory may be gone. Restore its state, then ask again."
            )
            self._close(number, request, error, late=False)

    def _transmit(self, number: int, request: _Open) -> None:
        prefix = Prefix(
            REQUEST, self._hub.id, request.incarnation, number, self._lowest(), request.seconds
        )
        self._hub.transmit(self.link, prefix, request.body, request.frames)

    def _ping(self, now: float) -> None:
        """Asks whether it lives, and about the requests that are open for a while."""
        self._pinged = now
        waiting: list[int] = []
        for number, request in self._open.items():
            if len(waiting) < _MOST_ASKED and now - request.sent >= self._hub.heartbeat / 2:
                waiting.append(number)
        fields: dict[str, Any] = {}
        if waiting:
            fields["asked"] = waiting
        if (shares := self.shares.say()) is not None:
            fields["shares"] = shares
        self._control(PING, fields)
        if self._prompted is None:
            self._prompted = now

    def _control(self, kind: int, fields: Mapping[str, Any]) -> None:
        prefix = Prefix(kind, self._hub.id, self._to, 0, self._lowest())
        body, frames, _ = pack(Message("", fields))
        self._hub.transmit(self.link, prefix, body, frames)

    def _lowest(self) -> int:
        """No request below this number is open."""
        # Numbers rise, and dicts keep their order, so the first one is the lowest.
        return next(iter(self._open), self._next)

    def _close(self, number: int, request: _Open, result: Result, late: bool) -> None:
        del self._open[number]
        if late:
            self._late[number] = request
        else:
            self.bytes -= request.size
        self._hub.finish(request.ticket, result)


def remote_error(peer: Peer, fields: Mapping[str, Any], method: str) -> StratagemError:
    """The error of an answer that is one."""
    kind, text, trace = (fields.get(key) for key in ("type", "text", "traceback"))
    if not (isinstance(kind, str) and isinstance(text, str) and isinstance(trace, str)):
        return MalformedMessageError(
            f"Expected an error of {peer}. Got one without text. It runs another version."
        )
    return RemoteError(str(peer), method, kind, text, trace)


def _numbers(fields: Mapping[str, Any], key: str) -> list[int]:
    numbers = fields.get(key, [])
    return [n for n in numbers if type(n) is int] if isinstance(numbers, list) else []
