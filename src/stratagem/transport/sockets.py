"""Carries a hub's messages over ZeroMQ: one socket for all who connect, one for all peers.

Both are ROUTER sockets, so that a poll looks at two sockets however many connections there are.
ZeroMQ connects again by itself; what gets lost then, the two ends of a request send again.
"""

from __future__ import annotations

import functools
import itertools
import selectors
import socket as system_socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import zmq

from stratagem.cluster.keys import Key
from stratagem.cluster.rollcall import split_address
from stratagem.transport import bundles, curve
from stratagem.transport.doorbell import Doorbell
from stratagem.transport.message import Limits
from stratagem.transport.refusals import Refusals
from stratagem.transport.same_host import SharedMemory
from stratagem.transport.seldom import Seldom
from stratagem.transport.shares import Shares

Way: TypeAlias = tuple[bool, bytes]
"""Whether this end has connected, and ZeroMQ's id of the connection."""

# Plain numbers: pyzmq looks at its enumerations at each use, which takes a microsecond.
_EVENTS, _READABLE, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)

_BATCH = 256  # messages that are taken from a socket in one turn
_COPIED_BYTES = 1 << 16  # arrays below are copied into ZeroMQ's buffers, which is faster
_MILLISECONDS = 1000


class Sockets:
    """See `carrier.Carrier`.

    Args:
        name: of this end, for errors and log lines.
        key: of the job, or the user's.
        limits: of messages.
        share: whether large arrays go through shared memory, where both ends can.
    """

    def __init__(self, name: str, key: Key, limits: Limits, share: bool = True):
        if not key.secret:
            raise ValueError(
                f"Expected a key for the connections of {name}. Got none. Use "
                "Key.always(config.environment())."
            )
        self._name, self._key, self._limits = name, key, limits
        self._share = share
        self._seldom = Seldom(self.now)
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.max_sockets = 1 << 14
        self._selector = selectors.DefaultSelector()
        self._bell = Doorbell()
        self._selector.register(self._bell.reader, selectors.EVENT_READ)
        self._readers: dict[int, Callable[[list[Any]], None]] = {}
        self._fresh: set[int] = set()  # descriptors of sockets that are to be looked at
        self._descriptors = [0, 0]  # of the sockets for who connects, and for peers
        self._out: Any = None
        self._in: Any = None
        self._zap: Any = None
        self._doorkeeper: curve.Doorkeeper | None = None
        self._refusals: Refusals | None = None
        self._outbox: dict[Way, list[list[bytes]]] = {}  # small messages, until `flush`
        self._links = itertools.count(1)
        self._addresses: dict[bytes, str] = {}

    now = staticmethod(time.monotonic)

    def listen(self, address: str) -> str:
        curve.check_address(address, self._key, self._name, "listen")
        host, port = split_address(address)
        keys = curve.pairs(self._key.secret)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(curve.ZAP)
        self._doorkeeper = curve.Doorkeeper(self._zap, keys.connector.public)
        self._in = socket = self._socket()
        socket.curve_server = True
        socket.curve_secretkey = keys.listener.secret
        socket.zap_domain = b"stratagem"
        self._refusals = Refusals(socket)
        try:
            socket.bind(_endpoint(host, port, numeric=True))
        except zmq.ZMQError as error:
            raise OSError(
                error.errno,
                f"Expected an address of this machine that is free. Got {address} ({self._name}): "
                f"{error.strerror}. Another program listens there, or the host is another machine.",
            ) from None
        self._descriptors[False] = self._watch(socket, functools.partial(self._read, False, socket))
        self._watch(self._zap, self._decide)
        self._watch(self._refusals.socket, self._report)
        bound = socket.last_endpoint.decode().rpartition(":")[2]
        return f"{address.rpartition(':')[0]}:{bound}"

    def connect(self, address: str) -> Way:
        curve.check_address(address, self._key, self._name, "connect")
        host, port = split_address(address)
        if self._out is None:
            keys = curve.pairs(self._key.secret)
            self._out = self._socket()
            self._out.curve_serverkey = keys.listener.public
            self._out.curve_publickey = keys.connector.public
            self._out.curve_secretkey = keys.connector.secret
            reader = functools.partial(self._read, True, self._out)
            self._descriptors[True] = self._watch(self._out, reader)
        link = next(self._links).to_bytes(5, "big")[1:]  # ids that begin with 0 are ZeroMQ's own
        link = b"L" + link
        endpoint = self._addresses[link] = _endpoint(host, port, numeric=False)
        self._out.setsockopt(zmq.CONNECT_ROUTING_ID, link)
        self._out.connect(endpoint)
        return True, link

    def disconnect(self, way: Way) -> None:
        endpoint = self._addresses.pop(way[1])
        if self._out is not None and endpoint not in self._addresses.values():
            self._out.disconnect(endpoint)

    def shares(self) -> Shares:
        return SharedMemory() if self._share else Shares()

    def send(self, way: Way, header: bytes, arrays: Sequence[np.ndarray]) -> None:
        if len(header) + sum(array.nbytes for array in arrays) <= bundles.MOST_BYTES:
            message = [header, *(array.tobytes() for array in arrays)]
            self._outbox.setdefault(way, []).append(message)
            return
        if way in self._outbox:  # what was sent before arrives before
            self._send(way, bundles.join(self._outbox.pop(way)), ())
        self._send(way, header, arrays)

    def flush(self) -> None:
        while self._outbox:
            way, messages = self._outbox.popitem()
            self._send(way, bundles.join(messages), ())

    def _send(self, way: Way, header: bytes, arrays: Sequence[np.ndarray]) -> None:
        mine, route = way
        socket = self._out if mine else self._in
        if socket is None:
            return
        self._fresh.add(self._descriptors[mine])
        flags = _NOBLOCK | _SNDMORE
        try:
            socket.send(route, flags)
            if not arrays:
                socket.send(header, _NOBLOCK)
                return
            socket.send(header, flags)
            last = len(arrays) - 1
            for i, array in enumerate(arrays):
                flat = array.reshape(-1).view(np.uint8)  # as not all dtypes are buffers
                more = _NOBLOCK if i == last else flags
                socket.send(flat, more, copy=flat.nbytes < _COPIED_BYTES)
        except zmq.Again:
            # The queue of that connection is full: its end does not read. It will ask again.
            self._seldom.warning("full", "%s: a message was dropped, its queue is full", self._name)

    def receive(self, seconds: float) -> list[tuple[Way, list[Any]]]:
        came = self._take()
        if came:
            return came
        # A socket's descriptor tells of what came after the last look at the socket. So each is
        # looked at after it was used (`_fresh`), and before a wait for its descriptor.
        for key, _ in self._selector.select(seconds):
            if key.fd == self._bell.reader:
                self._bell.quiet()
            else:
                self._fresh.add(key.fd)
        return self._take()

    def more(self) -> bool:
        return bool(self._fresh)

    def alarm(self, when: float) -> None:
        """Nothing: the poll has the time."""

    def wake(self) -> None:
        self._bell.ring()

    def close(self, asked: float, answered: float) -> None:
        self.flush()
        if self._refusals is not None:
            self._refusals.close()
        if self._zap is not None:
            self._zap.close(0)
        for socket, seconds in ((self._out, asked), (self._in, answered)):
            if socket is not None:
                socket.close(int(seconds * _MILLISECONDS))
        self._context.term()
        self._selector.close()
        self._bell.close()

    def _socket(self) -> Any:
        socket = self._context.socket(zmq.ROUTER)
        socket.ipv6 = True
        socket.linger = 0
        socket.sndhwm = 0  # what is open to a peer is limited by `outgoing`
        socket.maxmsgsize = max(self._limits.array_bytes, self._limits.header_bytes)
        socket.reconnect_ivl = 50
        socket.reconnect_ivl_max = 1000
        socket.heartbeat_ivl = 3000
        socket.heartbeat_timeout = 10000
        socket.handshake_ivl = 10000
        socket.backlog = 1024
        return socket

    def _take(self) -> list[tuple[Way, list[Any]]]:
        """What there is in the sockets that may have something."""
        came: list[tuple[Way, list[Any]]] = []
        while self._fresh:
            descriptor = self._fresh.pop()
            self._readers[descriptor](came)
            if len(came) >= _BATCH:
                self._fresh.add(descriptor)
                break
        return came

    def _read(self, mine: bool, socket: Any, came: list[Any]) -> None:
        """Takes messages from a socket."""
        while socket.getsockopt(_EVENTS) & _READABLE:
            way = (mine, socket.recv(_NOBLOCK))
            frames = self._frames(socket)
            bundle = bundles.split(frames[0], self._limits.items) if len(frames) == 1 else None
            if bundle is None:
                came.append((way, frames))
            else:
                came.extend((way, message) for message in bundle)
            if len(came) >= _BATCH:
                return

    def _decide(self, _: list[Any]) -> None:
        """Answers who wants to connect."""
        if self._zap is not None and self._doorkeeper is not None:
            while self._zap.getsockopt(_EVENTS) & _READABLE:
                if (refused := self._doorkeeper.answer()) is not None:
                    self._refused(refused, "it has another key")

    def _report(self, _: list[Any]) -> None:
        """Logs who was refused."""
        for address, why in self._refusals.read() if self._refusals is not None else ():
            self._refused(address, why)

    def _watch(self, socket: Any, reader: Callable[[list[Any]], None]) -> int:
        """Looks at a socket from now on; gives its descriptor."""
        descriptor: int = socket.getsockopt(zmq.FD)
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._readers[descriptor] = reader
        self._fresh.add(descriptor)
        return descriptor

    def _frames(self, socket: Any) -> list[Any]:
        """The frames of a message after the first."""
        if not socket.getsockopt(_RCVMORE):
            return []
        header = socket.recv(_NOBLOCK, copy=False)
        frames: list[Any] = [header.bytes]
        more = header.more
        while more:
            frame = socket.recv(_NOBLOCK, copy=False)
            more = frame.more
            if len(frames) <= self._limits.arrays + 1:  # one more than may be, to be refused
                frames.append(frame.buffer)
        return frames

    def _refused(self, address: str, why: str) -> None:
        address = address.removeprefix("::ffff:")
        self._seldom.warning(
            "refused", "%s refused a connection from %s: %s", self._name, address, why
        )


def _endpoint(host: str, port: int, *, numeric: bool) -> str:
    """As ZeroMQ writes addresses; it takes no names to listen at."""
    if numeric:
        try:
            found = system_socket.getaddrinfo(host, port, type=system_socket.SOCK_STREAM)
            host = str(found[0][4][0])
        except OSError as error:
            raise OSError(
                error.errno,
                f"Expected the address of this machine. Got {host}: {error.strerror}. Correct the "
                "name in TF_CONFIG or in the name service.",
            ) from None
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
