"""The end of a connection that is asked: executes a request once and keeps its answer to repeat it.

No sockets, no clocks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from stratagem.errors import MalformedMessageError
from stratagem.transport.message import ANSWER, ERROR, NOBODY, PONG, Message, Prefix, pack
from stratagem.transport.shares import Shares

if TYPE_CHECKING:
    from stratagem.transport.hub import Hub

Serve: TypeAlias = Callable[["Request"], Message | None]

KEPT_BYTES = 512 << 20
"""Bytes of answers that are kept for one client; the oldest are forgotten first."""

_MOST_WORKING = 1 << 14  # requests of a client that have no answer yet
_GRACE_SECONDS = 60.0  # for which a client is known after its last deadline
_MOST_TRACE = 1 << 16  # characters of a traceback


@dataclass(slots=True)
class _Answer:
    """What was answered, to be repeated; the arrays are kept while the client may read them."""

    kind: int
    body: bytes
    frames: Sequence[np.ndarray]
    arrays: Sequence[np.ndarray]
    size: int


class Request:
    """Something that a client asks for; `answer` or `fail` it once, in the hub's thread.

    Attributes:
        method: what is asked for.
        fields: see `Message`; of any content: whoever serves checks them.
        arrays: see `Message`; read-only. They may lie in memory that is shared with the client:
            whoever keeps one for long should copy it.
        client: who asks; two requests of one hub have the same.
        seconds: how long the client waits for the answer, from when it asked.
    """

    __slots__ = ("_number", "_over", "arrays", "client", "fields", "method", "seconds")

    def __init__(self, client: Client, number: int, message: Message, seconds: float):
        self.client, self._number, self.seconds = client, number, seconds
        self.method, self.fields, self.arrays = message.method, message.fields, message.arrays
        self._over = False

    def answer(
        self,
        message: Message | None = None,
        fields: Mapping[str, Any] | None = None,
        arrays: Sequence[np.ndarray] = (),
    ) -> None:
        """Answers it, with a message or with fields and arrays.

        Nobody changes the arrays afterwards: hand over copies, or `allocate` them.
        """
        self._end()
        message = message or Message("", fields or {}, tuple(arrays))
        self.client.answer(self._number, ANSWER, message)

    def fail(self, error: BaseException) -> None:
        """Raises RemoteError at the client."""
        self._end()
        self.client.answer(self._number, ERROR, Message("", told(error)))

    def allocate(self, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
        """As `Hub.allocate`, for the answer."""
        return self.client.shares.allocate(shape, dtype)

    @property
    def shares_memory(self) -> bool:
        """Whether what `allocate` gives does not travel."""
        return self.client.shares.usable

    @property
    def over(self) -> bool:
        """Whether it was answered."""
        return self._over

    def _end(self) -> None:
        if self._over:
            raise RuntimeError(
                f"Expected one answer to {self.method!r}. Got a second one. Answer or fail it once."
            )
        self._over = True


def told(error: BaseException) -> dict[str, Any]:
    """An error as the fields of which `remote_error` makes it again."""
    trace = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
    return {"type": type(error).__name__, "text": str(error), "traceback": trace}


class Client:
    """A hub that has connected to this one.

    Attributes:
        incarnation: its random id.
        shares: memory shared with it.
        heard: when it was heard last.
    """

    def __init__(self, hub: Hub, incarnation: bytes, shares: Shares):
        self.incarnation = incarnation.hex()
        self.shares = shares
        self.heard = float("-inf")
        self.until = float("-inf")  # when it may be forgotten: no deadline of it is later
        self.route: Any = None
        self._hub = hub
        self._below = 0
        self._working: set[int] = set()
        self._answers: dict[int, _Answer] = {}
        self._kept = 0
        self._forgotten: set[int] = set()

    def __repr__(self) -> str:
        return f"<Client {self.incarnation[:8]}>"

    def hear(self, route: Any, prefix: Prefix, now: float) -> None:
        """Notes by which way it was heard last, and what it has got."""
        self.route, self.heard = route, now
        self.until = max(self.until, now + prefix.seconds + _GRACE_SECONDS)
        if prefix.below > self._below:
            self._drop(prefix.below)

    def takes(self, number: int) -> bool:
        """Whether a request is new; an answer that was given already is repeated."""
        if number < self._below or number in self._working:
            return False
        if number in self._answers or number in self._forgotten:
            self.repeat(number)
            return False
        if len(self._working) >= _MOST_WORKING:
            self._refuse(number, RuntimeError(
                f"Expected at most {_MOST_WORKING} requests at a time. Got one more."
            ))  # fmt: skip
            return False
        self._working.add(number)
        return True

    def answer(self, number: int, kind: int, message: Message) -> None:
        """Sends an answer, and keeps it until the client says that it has got it."""
        try:
            arrays, places = self.shares.place(message.arrays)
            if arrays:
                message = Message("", message.fields, arrays)
            body, frames, size = pack(message, self._hub.limits, places)
        except MalformedMessageError as error:
            self._refuse(number, error)
            raise
        self._keep(number, _Answer(kind, body, frames, arrays, size))

    def repeat(self, number: int) -> None:
        """Sends an answer again."""
        if (answer := self._answers.get(number)) is not None:
            self._transmit(number, answer)
        elif number in self._forgotten:
            self._refuse(number, RuntimeError(
                f"Expected a client that takes its answers. Got one that has not taken {self._kept}"
                " bytes of them, so this one was forgotten. The request was executed."
            ))  # fmt: skip

    def pong(self, asked: Any) -> None:
        """Answers a ping: what of the requests it asks about was never seen, and what is done."""
        fields: dict[str, Any] = {}
        if isinstance(asked, list) and asked:
            numbers = [n for n in asked if type(n) is int and n >= self._below]
            given = self._answers.keys() | self._forgotten
            fields["answered"] = [n for n in numbers if n in given]
            known = given | self._working
            fields["unknown"] = [n for n in numbers if n not in known]
        if (shares := self.shares.say()) is not None:
            fields["shares"] = shares
        self.control(fields)

    def control(self, fields: Mapping[str, Any]) -> None:
        """Sends a pong."""
        body, frames, _ = pack(Message("", fields))
        prefix = Prefix(PONG, self._hub.id, NOBODY, 0, self._below)
        self._hub.transmit(self.route, prefix, body, frames)

    def refuse(self, number: int, error: Exception) -> None:
        """Answers a request that is not executed."""
        if number >= self._below and number not in self._answers:
            self._refuse(number, error)

    def _drop(self, below: int) -> None:
        """Drops the answers of requests with smaller numbers, which the client has."""
        got: Iterable[int] = range(self._below, below)
        if below - self._below > len(self._answers):
            got = [number for number in self._answers if number < below]
        for number in got:
            if (answer := self._answers.pop(number, None)) is not None:
                self._kept -= answer.size
        if self._forgotten:
            self._forgotten = {number for number in self._forgotten if number >= below}
        self._below = below

    def _refuse(self, number: int, error: Exception) -> None:
        fields = {"type": type(error).__name__, "text": str(error), "traceback": ""}
        body, frames, size = pack(Message("", fields))
        self._keep(number, _Answer(ERROR, body, frames, (), size))

    def _keep(self, number: int, answer: _Answer) -> None:
        self._working.discard(number)
        self._transmit(number, answer)
        if number < self._below:  # it does not wait for it any more
            return
        self._answers[number] = answer
        self._kept += answer.size
        while self._kept > KEPT_BYTES and len(self._answers) > 1:
            oldest = next(iter(self._answers))
            self._kept -= self._answers.pop(oldest).size
            self._forgotten.add(oldest)

    def _transmit(self, number: int, answer: _Answer) -> None:
        prefix = Prefix(answer.kind, self._hub.id, NOBODY, number)
        self._hub.transmit(self.route, prefix, answer.body, answer.frames)
