"""What servers are asked, while they have not answered; and what they refuse it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from stratagem.errors import (
    BackupError,
    BackupMismatchError,
    CorruptBackupError,
    JobMismatchError,
    NotReadyError,
    RemoteError,
)
from stratagem.transport.message import Message
from stratagem.transport.outgoing import Awaited

# What a server raises and a caller may want to catch; the rest stays RemoteError.
_ERRORS: dict[str, type[Exception]] = {
    e.__name__: e
    for e in (NotReadyError, BackupError, BackupMismatchError, CorruptBackupError, JobMismatchError,
              ValueError, MemoryError)
}  # fmt: skip

T = TypeVar("T")


class Waits(Protocol):
    """What can wait for the answers of requests."""

    def wait(self, tickets: Sequence[Any]) -> list[Message]:
        """The answers; raises the first error."""


class Pending(Generic[T]):
    """Requests on their way.

    Attributes:
        tickets: of the hub.
    """

    def __init__(self, servers: Waits, tickets: Sequence[Awaited], join: Callable[[Any], T]):
        self.tickets = list(tickets)
        self._servers, self._join = servers, join

    @property
    def done(self) -> bool:
        """Whether all have answered, or failed."""
        return all(ticket.done for ticket in self.tickets)

    def result(self) -> T:
        """Waits, turning the hub.

        Raises:
            PeerTimeoutError, PeerLostError: a server did not answer, or was restarted.
            NotReadyError: a server has no state, and is to be restored.
            ValueError, MemoryError, RemoteError: a server refused it.
        """
        return self._join(self._servers.wait(self.tickets))


def as_raised(result: Any) -> Any:
    """An error that a server has raised, as its class where callers may want to catch it."""
    if isinstance(result, RemoteError) and result.type_name in _ERRORS:
        return _ERRORS[result.type_name](f"{result.who}, {result.method}: {result.text}")
    return result
