"""Small pushes to a server that leave as one request, as most of what one costs is its way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.errors import MalformedMessageError
from stratagem.parameter_server.pending import as_raised
from stratagem.transport import several
from stratagem.transport.message import Message
from stratagem.transport.outgoing import Ticket, remote_error

_MOST = 64  # pushes of a request

Send = Callable[[int, Mapping[str, Any], Sequence[np.ndarray]], Ticket]


class Part:
    """One push of a request; what a `Ticket` is for a whole one.

    Attributes:
        method: what for.
    """

    method = "push"

    def __init__(self, number: int):
        self._number = number
        self._ticket: Ticket | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._error is not None or (self._ticket is not None and self._ticket.done)

    def result(self) -> Message:
        """What became of it, once it is over; raises its error, or that of the request."""
        if self._error is not None:
            raise self._error
        if self._ticket is None:
            raise RuntimeError("Expected a push that is over. Got one that has not been sent.")
        said = self._ticket.result().fields.get("each")
        if not isinstance(said, list) or self._number >= len(said):
            raise MalformedMessageError(
                f"Expected an answer of {self._ticket.peer} to each push. Got {said!r:.200}. It "
                "runs another version."
            )
        mine = said[self._number]
        if "type" in mine:
            raise as_raised(remote_error(self._ticket.peer, mine, self.method))
        return Message("", mine, ())

    def of(self, ticket: Ticket | None, error: Exception | None = None) -> None:
        """It has been sent, or could not be."""
        self._ticket, self._error = ticket, error


class Gathered:
    """Pushes that wait for others, for each server; see the module.

    Args:
        send: sends a request: server, fields and arrays.
    """

    def __init__(self, send: Send):
        self._send = send
        self._wait = False
        self._waiting: dict[int, list[tuple[Part, dict[str, Any], Sequence[np.ndarray]]]] = {}

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Small pushes in here leave at its end, or before anything else that is asked."""
        self._wait = True
        try:
            yield
        finally:
            self._wait = False
            self.flush()

    def add(self, server: int, fields: dict[str, Any], arrays: Sequence[np.ndarray]) -> Part:
        """A push to a server; its arrays are named by their place among them."""
        small = several.are_small(arrays)
        if not small:
            self._leave(server)
        waiting = self._waiting.setdefault(server, [])
        part = Part(len(waiting))
        waiting.append((part, fields, arrays))
        if not (small and self._wait) or len(waiting) >= _MOST:
            self._leave(server)
        return part

    def flush(self) -> None:
        """Sends all that waits."""
        for server in list(self._waiting):
            self._leave(server)

    def _leave(self, server: int) -> None:
        waiting = self._waiting.pop(server, [])
        if not waiting:
            return
        each, arrays = several.join((fields, mine) for _, fields, mine in waiting)
        ticket = error = None
        try:
            ticket = self._send(server, {"each": each}, arrays)
        except Exception as e:  # it is told to each that is in it, who may not be who sends
            error = e
        for part, _, _ in waiting:
            part.of(ticket, error)
