"""Who was refused at a listening socket, as ZeroMQ's monitor tells it."""

from __future__ import annotations

import os
import socket as system_socket
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

_UNKNOWN = "an unknown address"
_MOST = 1024  # connections whose addresses are kept

_FAILED = {
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it does not speak ZeroMQ, or went away",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it has another key, or none, or is no Stratagem task",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it has another key",
}
_NO_ZEROMQ = "it does not speak ZeroMQ"
_EVENTS = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED
for _event in _FAILED:
    _EVENTS |= _event


class Refusals:
    """Reads the monitor of a socket.

    Args:
        watched: the socket, before it listens.

    Attributes:
        socket: is ready to read when something has happened.
    """

    def __init__(self, watched: Any):
        self._watched = watched
        self.socket: Any = watched.get_monitor_socket(int(_EVENTS))
        self._accepted: dict[int, tuple[str, int]] = {}  # address, how many were let in before
        self._let_in = 0
        self._why: str | None = None

    def read(self) -> list[tuple[str, str]]:
        """Address and reason of each that was refused since the last call."""
        refused = []
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            event: Any = recv_monitor_message(self.socket, zmq.NOBLOCK)
            kind, value = event["event"], event["value"]
            if kind == zmq.Event.ACCEPTED:
                if len(self._accepted) < _MOST:
                    self._accepted[value] = (_address(value), self._let_in)
            elif kind == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._let_in += 1
            elif kind in _FAILED:
                self._why = _FAILED[kind]  # the next event is that this one disconnects
            elif kind == zmq.Event.DISCONNECTED:
                address, before = self._accepted.pop(value, (_UNKNOWN, -1))
                if self._why is None and before == self._let_in:
                    self._why = _NO_ZEROMQ
                if self._why is not None:
                    refused.append((address, self._why))
                self._why = None
        return refused

    def close(self) -> None:
        """Ends it, before the socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(0)


def _address(descriptor: int) -> str:
    """Who is connected, unless that has ended meanwhile."""
    try:
        with system_socket.socket(fileno=os.dup(descriptor)) as connection:
            host, port, *_ = connection.getpeername()
    except (OSError, ValueError):
        return _UNKNOWN
    return f"{host.removeprefix('::ffff:')}:{port}"
