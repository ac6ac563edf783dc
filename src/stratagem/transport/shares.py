"""What two ends of a connection share beside it: memory, where they run on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stratagem.errors import MalformedMessageError
from stratagem.transport.message import Place


class Shares:
    """Nothing is: all arrays travel as frames. `same_host.SharedMemory` is the other kind."""

    @property
    def usable(self) -> bool:
        """Whether large arrays go through shared memory from here."""
        return False

    def place(
        self, arrays: Sequence[np.ndarray]
    ) -> tuple[tuple[np.ndarray, ...], Sequence[Place | None]]:
        """Arrays as they are to be sent, and where they lie in shared memory."""
        return tuple(np.asarray(array, order="C") for array in arrays), ()

    def allocate(self, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
        """An array to be sent, with any values."""
        return np.empty(shape, dtype)

    def open(self, slot: int, start: int, size: int) -> np.ndarray:
        """Bytes of the other end's memory, read-only, as uint8."""
        raise MalformedMessageError(
            "Expected arrays in frames in a message. Got one in shared memory, of which none is "
            "shared with the other end. It runs another version."
        )

    def say(self) -> Any:
        """What a ping or pong should tell the other end; None where that is nothing."""
        return None

    def hear(self, said: Any) -> bool:
        """Takes what the other end tells; whether there is something to tell it now."""
        return False

    def tick(self) -> None:
        """Gives memory back that is not used. Called now and then."""

    def close(self) -> None:
        """Ends sharing; views that are alive stay valid."""
