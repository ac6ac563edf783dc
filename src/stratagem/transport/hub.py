"""All connections of one thread: requests to peers, and what clients ask of it.

Nothing happens but in `turn` (and in what turns: `call`, `wait`, a `post` that has to wait). A turn
costs what came and what is due, however many peers there are.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from stratagem.cluster.keys import Key
from stratagem.errors import MalformedMessageError
from stratagem.transport import message as frames_of
from stratagem.transport.carrier import Carrier
from stratagem.transport.incoming import Client, Request, Serve
from stratagem.transport.message import LIMITS, Limits, Message, Prefix, read_prefix, unpack
from stratagem.transport.outgoing import Awaited, Done, Peer, Result, Ticket, remote_error
from stratagem.transport.seldom import Seldom
from stratagem.transport.shares import Shares
from stratagem.transport.sockets import Sockets

HEARTBEAT_SECONDS = 1.0
"""How often a peer is pinged, and asked about requests that have no answer."""

_GATHER_SECONDS = 0.0005  # for which small messages are kept, to leave together
_WAIT_SECONDS = 60.0  # of one turn of a wait
_MOST_CLIENTS = 1 << 16
_SWEEP_SECONDS = 30.0  # between looks for clients that can be forgotten

_log = logging.getLogger("stratagem")


class Hub:
    """See the module. `local.LocalNetwork.hub` makes its twin for tests.

    One thread uses it, but for `wake`.

    Args:
        name: of this end, as errors say it, such as "worker 1".
        key: of the job, or the user's: `Key.always(config.environment())`. With the user's only
            loopback addresses are used.
        carrier: carries the frames; ZeroMQ where None is given.
        limits: of messages.
        heartbeat: see `HEARTBEAT_SECONDS`.
    """

    def __init__(
        self,
        name: str,
        key: Key | None = None,
        *,
        carrier: Carrier | None = None,
        limits: Limits = LIMITS,
        heartbeat: float = HEARTBEAT_SECONDS,
    ):
        if carrier is None:
            carrier = Sockets(name, key or Key(), limits)
        self.name, self.limits, self.heartbeat = name, limits, heartbeat
        self.id = os.urandom(16)
        self.now: Callable[[], float] = carrier.now  # seconds
        self.looked = self.now()  # when it had read all that came
        self._carrier: Carrier = carrier
        self._peers: dict[Any, Peer] = {}
        self._clients: dict[bytes, Client] = {}
        self._serve: Serve | None = None
        self._due: list[tuple[float, int, Peer]] = []
        self._order = itertools.count()
        self._together = 0  # whoever sends now flushes later
        self.inside = 0  # handlers and callbacks that run now
        self._came: deque[tuple[Any, list[Any]]] = deque()
        self._sweep = self.looked + _SWEEP_SECONDS
        self._seldom = Seldom(carrier.now)
        self._closed = False

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def incarnation(self) -> str:
        """This hub's random id, as peers see it."""
        return self.id.hex()

    def listen(self, address: str, serve: Serve) -> str:
        """Serves who connects.

        Args:
            address: "host:port"; port 0 for a free one.
            serve: called with each request, in the hub's thread; gives the answer, or None where
                `request.answer` or `request.fail` follows later. What it raises is raised at the
                client. It may post, but must not wait: who waits there serves nobody.

        Returns:
            The address, with the port.

        Raises:
            ValueError: the address may not be listened at, see `sockets`.
            OSError: it cannot be.
        """
        if self._serve is not None:
            raise RuntimeError(f"Expected one call of listen. Got a second one ({self.name}).")
        address = self._carrier.listen(address)
        self._serve = serve
        return address

    def connect(self, address: str, name: str) -> Peer:
        """A peer that listens at an address, now or later. Does not wait.

        Args:
            address: "host:port".
            name: as errors say it, such as "ps 1".

        Raises:
            ValueError: the address may not be connected to, see `sockets`.
        """
        way = self._carrier.connect(address)
        peer = self._peers[way] = Peer(self, name, address, way, self._carrier.shares())
        self._come_back(peer, self.now())
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forgets a peer; its open requests fail with PeerLostError."""
        if self._peers.pop(peer.link, None) is not None:
            peer.due = float("inf")
            peer.abandon("this end has disconnected")
            self._carrier.disconnect(peer.link)

    def turn(self, seconds: float) -> None:
        """Delivers what came, sends what is due, expires deadlines.

        Args:
            seconds: how long to wait for something to come. It returns earlier after anything has
                happened, also after `wake`.
        """
        self._not_inside("turn")
        self._carrier.flush()
        if not self._came:
            if self._due:
                seconds = min(seconds, self._due[0][0] - self.now())
            self._came.extend(self._carrier.receive(max(0.0, seconds)))
        with self.together():
            self._look()
        if self._due:
            self._carrier.alarm(self._due[0][0])

    def _look(self) -> None:
        """Delivers what came, and does what is due."""
        flushed = self.now()
        while self._came:  # it is kept where a callback raises
            self._deliver(*self._came.popleft())
            if (now := self.now()) - flushed > _GATHER_SECONDS:
                self._carrier.flush()
                flushed = now
        now = self.now()
        if not self._carrier.more():
            self.looked = now
        while self._due and self._due[0][0] <= now:
            when, _, peer = heapq.heappop(self._due)
            if when == peer.due:  # otherwise it was moved
                peer.due = float("inf")
                self._come_back(peer, peer.tick(now, self.heartbeat))
                peer.shares.tick()
        if now >= self._sweep:
            self._forget_clients(now)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Small messages that are posted or answered in here leave at its end, or at a turn."""
        self._together += 1
        try:
            yield
        finally:
            self._together -= 1
            if not self._together and not self._closed:
                self._carrier.flush()

    def wake(self) -> None:
        """Ends a turn that waits, or the next one. Any thread may call it."""
        self._carrier.wake()

    def call(
        self,
        peer: Peer,
        method: str,
        fields: Mapping[str, Any] | None = None,
        arrays: Sequence[np.ndarray] = (),
        *,
        seconds: float,
    ) -> Message:
        """Asks a peer and waits for its answer, turning.

        Raises:
            PeerTimeoutError, PeerLostError, RemoteError, MalformedMessageError: see `Peer.post`.
        """
        (answer,) = self.wait([peer.post(method, fields, arrays, seconds=seconds)])
        return answer

    def wait(self, tickets: Sequence[Awaited]) -> list[Message]:
        """Waits for the answers of requests, turning; raises the first error there is.

        Every request has a deadline, so this ends.
        """
        for ticket in tickets:
            while not ticket.done:
                self._not_inside("wait")
                self.turn(_WAIT_SECONDS)
        return [ticket.result() for ticket in tickets]

    def allocate(self, to: Peer | Client, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
        """An array with any values, to be filled and sent to this peer, or client, once.

        It lies in memory that is shared with it, where that helps, so that it is not copied when
        it is sent. It may not be sent to another one without a copy, which is made then.
        """
        return to.shares.allocate(shape, dtype)

    def close(self, seconds: float = 1.0) -> None:
        """Closes all connections; open requests fail with PeerLostError.

        Args:
            seconds: how long what was sent has to leave.
        """
        if self._closed:
            return
        self._closed = True
        asked = seconds if any(peer.open for peer in self._peers.values()) else 0.0
        for peer in list(self._peers.values()):
            peer.abandon("this end has closed its connections")
        for client in self._clients.values():
            client.shares.close()
        self._peers.clear()
        self._clients.clear()
        self._carrier.close(asked, seconds)

    # What follows is for the other files of this room.

    def post(self, peer: Peer, message: Message, seconds: float, done: Done | None) -> Ticket:
        """See `Peer.post`."""
        if self._closed:
            raise RuntimeError(f"Expected an open hub. Got a post after {self.name} closed it.")
        size = sum(array.nbytes for array in message.arrays)
        if peer.full(size):
            seconds = self._wait_for_room(peer, message.method, size, seconds)
        now = self.now()
        ticket = peer.send(message, seconds, done, now)
        if now + seconds < peer.due:
            self._come_back(peer, now + seconds)
        return ticket

    def transmit(self, way: Any, prefix: Prefix, body: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Sends a message."""
        if not self._closed:
            self._carrier.send(way, prefix.pack() + body, arrays)
            if not self._together:
                self._carrier.flush()

    def new_shares(self) -> Shares:
        """See `Carrier.shares`."""
        return self._carrier.shares()

    def finish(self, ticket: Ticket, result: Result) -> None:
        """Ends a request and calls who waits for it."""
        callback = ticket.finish(result)
        if callback is None:
            return
        self.inside += 1
        try:
            callback(result)
        finally:
            self.inside -= 1

    def _wait_for_room(self, peer: Peer, method: str, size: int, seconds: float) -> float:
        """Turns until a peer has answered enough; gives what is left of the time."""
        if self.inside:
            if peer.full(size, 2):
                raise peer.timeout(method, 0.0, "room for another request")
            return seconds
        end = self.now() + seconds
        while peer.full(size):
            if (left := end - self.now()) <= 0:
                raise peer.timeout(method, seconds, "room for another request")
            self.turn(left)
        return max(0.0, end - self.now())

    def _not_inside(self, what: str) -> None:
        if self.inside:
            raise RuntimeError(
                f"Expected no {what} in a handler or callback of the same hub ({self.name}): it "
                "would serve nobody meanwhile. Got one. Use post(..., done=...) there, and give "
                "None from the handler to answer later."
            )

    def _come_back(self, peer: Peer, when: float) -> None:
        if peer.link in self._peers:
            peer.due = when
            heapq.heappush(self._due, (when, next(self._order), peer))
            self._carrier.alarm(when)

    def _deliver(self, way: Any, frames: list[Any]) -> None:
        """Takes one message."""
        try:
            prefix = read_prefix(frames[0]) if frames else None
            if prefix is None:
                raise MalformedMessageError("Expected a header in a message. Got no frame.")
            peer = self._peers.get(way)
            if peer is not None:
                self._hear_peer(peer, prefix, frames)
            elif self._serve is not None and prefix.kind <= frames_of.REPEAT:
                self._hear_client(way, prefix, frames)
        except MalformedMessageError as error:
            self._seldom.warning("malformed", "%s got a malformed message: %s", self.name, error)

    def _hear_peer(self, peer: Peer, prefix: Prefix, frames: list[Any]) -> None:
        now = self.now()
        if prefix.kind <= frames_of.REPEAT:
            raise MalformedMessageError(f"Expected an answer of {peer}. Got a request.")
        if not peer.hear(prefix, now):
            return
        if prefix.kind == frames_of.PONG:
            peer.pong(prefix, unpack(frames[0], frames[1:], self.limits).fields, now)
        elif peer.awaits(prefix.number):
            result: Result
            try:
                answer = unpack(frames[0], frames[1:], self.limits, peer.shares.open)
                result = answer
                if prefix.kind == frames_of.ERROR:
                    result = remote_error(peer, answer.fields, peer.method(prefix.number))
            except MalformedMessageError as error:
                result = error
            peer.answer(prefix.number, result)

    def _hear_client(self, way: Any, prefix: Prefix, frames: list[Any]) -> None:
        client = self._clients.get(prefix.sender)
        if client is None:
            if len(self._clients) >= _MOST_CLIENTS:
                raise MalformedMessageError(
                    f"Expected at most {_MOST_CLIENTS} clients. Got one more."
                )
            client = Client(self, prefix.sender, self._carrier.shares())
            self._clients[prefix.sender] = client
        client.hear(way, prefix, self.now())
        if prefix.to not in (frames_of.NOBODY, self.id):
            client.control({})  # it means the process that was here before
        elif prefix.kind == frames_of.REQUEST:
            self._hear_request(client, prefix, frames)
        else:
            fields = unpack(frames[0], frames[1:], self.limits).fields
            if prefix.kind == frames_of.PING:
                client.shares.hear(fields.get("shares"))
                client.pong(fields.get("asked"))
            else:
                numbers = fields.get("numbers")
                for number in numbers if isinstance(numbers, list) else ():
                    client.repeat(number)

    def _hear_request(self, client: Client, prefix: Prefix, frames: list[Any]) -> None:
        if not client.takes(prefix.number):
            return
        try:
            message = unpack(frames[0], frames[1:], self.limits, client.shares.open)
        except MalformedMessageError as error:
            client.refuse(prefix.number, error)
            raise
        request = Request(client, prefix.number, message, prefix.seconds)
        self.inside += 1
        try:
            answer = self._serve(request) if self._serve is not None else None
            if answer is not None:
                request.answer(answer)
        except Exception as error:
            if request.over:
                _log.exception("%s, after it answered %r", self.name, request.method)
            else:
                request.fail(error)
        finally:
            self.inside -= 1

    def _forget_clients(self, now: float) -> None:
        self._sweep = now + _SWEEP_SECONDS
        for key in [key for key, client in self._clients.items() if client.until < now]:
            self._clients.pop(key).shares.close()
        for client in self._clients.values():
            client.shares.tick()
