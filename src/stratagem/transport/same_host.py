"""Agrees with the other end to share memory, where both run on one machine.

Pings and pongs carry it: each says which boot of which machine it runs on; where they are the same,
each offers an arena, and uses it after the other has said that it has mapped it. Until then, and
where that fails (containers that do not see each other's processes, other users, systems without
such memory), arrays travel through TCP.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import MalformedMessageError
from stratagem.transport.arena import LEAST_BYTES, Receiver, Sender
from stratagem.transport.message import Place
from stratagem.transport.shares import Shares

_log = logging.getLogger("stratagem")


class SharedMemory(Shares):
    """See the module and `shares.Shares`."""

    def __init__(self) -> None:
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._same = False
        self._settled = False  # the other end has mapped our arena, or will not
        self._usable = False
        self._reply: dict[str, Any] = {}
        self._closed = False

    @property
    def usable(self) -> bool:
        return self._usable

    @property
    def blocks(self) -> int:
        """Arrays that lie in the arena of this end now."""
        return self._sender.blocks if self._sender is not None else 0

    def place(
        self, arrays: Sequence[np.ndarray]
    ) -> tuple[tuple[np.ndarray, ...], Sequence[Place | None]]:
        arrays = tuple(np.asarray(array, order="C") for array in arrays)
        if not self._usable or not any(array.nbytes >= LEAST_BYTES for array in arrays):
            return arrays, ()
        placed = [self._place(array) for array in arrays]
        return tuple(array for array, _ in placed), [where for _, where in placed]

    def allocate(self, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        count = math.prod(shape) if isinstance(shape, Sequence) else shape
        size = count * dtype.itemsize
        if self._usable and size >= LEAST_BYTES and self._sender is not None:
            memory = self._sender.allocate(size)
            if memory is not None:
                return memory.view(dtype).reshape(shape)
        return np.empty(shape, dtype)

    def open(self, slot: int, start: int, size: int) -> np.ndarray:
        if self._receiver is None:
            raise MalformedMessageError(
                "Expected arrays in frames in a message. Got one in shared memory, of which none "
                "is shared with the other end."
            )
        return self._receiver.open(slot, start, size)

    def say(self) -> Any:
        reply, self._reply = self._reply, {}
        if not self._settled and (boot := _boot()):
            reply = {"boot": boot, **reply}
            if self._sender is not None:
                reply["offer"] = self._sender.offer
        return reply or None

    def hear(self, said: Any) -> bool:
        if not isinstance(said, dict) or self._closed:
            return False
        news = False
        if not self._same and said.get("boot") == _boot() != "":
            self._same = news = True
            self._make()
        if self._same and "offer" in said:
            self._answer(said["offer"])
            news = True
        sender = self._sender
        if sender is not None and said.get("opened") == sender.token:
            self._settled = self._usable = True
        elif sender is not None and said.get("refused") == sender.token:
            sender.close()
            self._sender, self._settled = None, True
        elif "boot" in said and not self._same:
            self._settled = True  # another machine
        return news

    def tick(self) -> None:
        if self._sender is not None:
            self._sender.tick()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender, self._receiver, self._usable = None, None, False
        self._closed = True

    def _place(self, array: np.ndarray) -> tuple[np.ndarray, Place | None]:
        if array.nbytes < LEAST_BYTES or self._sender is None:
            return array, None
        if (where := self._sender.hand(array)) is not None:
            return array, where
        memory = self._sender.allocate(array.nbytes)
        if memory is None:
            return array, None
        copy = memory.view(array.dtype).reshape(array.shape)
        np.copyto(copy, array)
        return copy, self._sender.hand(memory)

    def _make(self) -> None:
        try:
            self._sender = Sender()
        except OSError as error:
            _log.info("Large arrays go through TCP, not shared memory: %s", error)
            self._settled = True

    def _answer(self, offer: Any) -> None:
        token = offer[2] if isinstance(offer, list) and len(offer) == 4 else None
        if self._receiver is not None and self._receiver.token == token:
            self._reply = {"opened": token}
            return
        try:
            self._receiver = Receiver(offer)
            self._reply = {"opened": token}
        except OSError as error:
            _log.info("Large arrays come through TCP, not shared memory: %s", error)
            self._reply = {"refused": token}


@functools.cache
def _boot() -> str:
    """Which boot of which machine this is; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
