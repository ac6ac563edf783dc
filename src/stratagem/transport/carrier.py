"""What a hub needs of what carries its messages: `sockets` between processes, `local` in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from stratagem.transport.shares import Shares


class Carrier(Protocol):
    """What carries frames between hubs. A way is an opaque, hashable value."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    def listen(self, address: str) -> str:
        """Lets others connect at "host:port"; gives the address with the port that it has."""

    def connect(self, address: str) -> Any:
        """The way to who listens there, now or later."""

    def disconnect(self, way: Any) -> None:
        """Forgets a way."""

    def shares(self) -> Shares:
        """What a new connection shares beside the frames."""

    def send(self, way: Any, header: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Sends a message, small ones with the next `flush`, or loses it. Never waits."""

    def flush(self) -> None:
        """Sends what was kept to be sent together."""

    def receive(self, seconds: float) -> list[tuple[Any, list[Any]]]:
        """Waits for messages, a wake or the time; gives (way, frames), some of what came."""

    def more(self) -> bool:
        """Whether there may be more to receive."""

    def alarm(self, when: float) -> None:
        """The hub has something to do then."""

    def wake(self) -> None:
        """Ends a wait in `receive`. Any thread."""

    def close(self, asked: float, answered: float) -> None:
        """Ends all.

        Args:
            asked: seconds that requests have to leave.
            answered: seconds that answers have to leave.
        """
