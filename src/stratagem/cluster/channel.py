"""A small control channel between the processes of a job: agreeing, never moving tensors.

It runs over the key-value store that every job already has (JAX's coordination service), off the
devices, so that it works while a step runs and when one is stuck. Every wait has a deadline.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from stratagem.errors import PeerTimeoutError

_FIRST_WARNING_SECONDS = 10.0
_WARNING_SECONDS = 60.0  # between later ones
_CHUNK = 1 << 20  # bytes of a message

_log = logging.getLogger("stratagem")


class Store(Protocol):
    """Keys and values that all processes of a job see."""

    def set(self, key: str, value: bytes) -> None:
        """Writes a key that does not exist yet."""

    def get(self, key: str, seconds: float) -> bytes | None:
        """Waits for a key to exist; None when it does not within the time."""

    def delete(self, key: str) -> None:
        """Removes a key, if it is there."""


class Channel:
    """One process's end of the channel.

    Every process opens the same streams and makes the same calls on each, in the same order;
    different streams do not order each other, so that different threads can have their own.

    Args:
        store: the job's key-value store.
        rank: this process, from 0.
        names: how errors name each process, such as "worker 1 at host1:2222".
        seconds: the deadline of every wait.
        scope: a prefix for the keys, new for each attempt of the job.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[str],
        seconds: float,
        scope: str = "stratagem",
    ):
        self.rank = rank
        self.names = tuple(names)
        self.seconds = seconds
        self.store = store
        self.scope = scope
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Processes of the job."""
        return len(self.names)

    def key(self, name: str) -> str:
        """A key of this attempt of the job, for use with the store itself."""
        return f"{self.scope}/key/{name}"

    def stream(self, name: str) -> Stream:
        """The stream of a name; the same object for the same name."""
        with self._lock:
            if name not in self._streams:
                self._streams[name] = Stream(self, f"{self.scope}/{name}", name)
            return self._streams[name]


class Stream:
    """An order of exchanges. Made by `Channel.stream`; one thread at a time may use it."""

    def __init__(self, channel: Channel, prefix: str, name: str):
        self._channel = channel
        self.rank = channel.rank
        self._prefix = prefix
        self._name = name
        self._turns = itertools.count()

    def all_gather(self, payload: bytes, what: str) -> list[bytes]:
        """Gives every process the payloads of all, by rank. Every process calls it.

        Process 0 collects the payloads and hands out the list, so that n processes need 3n
        messages, not n * n.

        Args:
            payload: this process's part, at most a few megabytes.
            what: what the processes agree on, for the error.

        Raises:
            PeerTimeoutError: names every process that has not come to this exchange in time.
        """
        channel, turn = self._channel, next(self._turns)
        if channel.size == 1:
            return [payload]
        base = f"{self._prefix}/{turn}"
        wait = _Wait(channel, base, what, channel.seconds)
        if channel.rank:
            channel.store.set(f"{base}/{channel.rank}", payload)
            return _unpack(wait.get(f"{base}/all"), channel.size)
        channel.store.set(f"{base}/0", b"")  # for who asks who is missing
        parts = [payload]
        for rank in range(1, channel.size):
            parts.append(wait.get(f"{base}/{rank}"))
        channel.store.set(f"{base}/all", _pack(parts))
        self._forget(turn)
        return parts

    def from_first(self, data: bytes, what: str) -> bytes:
        """Gives every process the bytes of process 0, of any size. Every process calls it.

        Args:
            data: those of process 0; ignored elsewhere.
            what: for the error.

        Raises:
            PeerTimeoutError: see `all_gather`.
        """
        data = data if self._channel.rank == 0 else b""
        size = int(self.all_gather(b"%d" % len(data), what)[0])
        parts = [
            self.all_gather(data[start : start + _CHUNK], what)[0]
            for start in range(0, size, _CHUNK)
        ]
        return b"".join(parts)

    def _forget(self, turn: int) -> None:
        """Removes what everyone has read: who sends for turn n has read the answer of n - 1."""
        if turn:
            base = f"{self._prefix}/{turn - 1}"
            for rank in range(self._channel.size):
                self._channel.store.delete(f"{base}/{rank}")
            self._channel.store.delete(f"{base}/all")


class _Wait:
    """The wait of one exchange, with its deadline, and what is said before it passes."""

    def __init__(self, channel: Channel, base: str, what: str, seconds: float):
        self._channel, self._base, self._what, self._seconds = channel, base, what, seconds
        self._began = time.monotonic()
        self._warning = _FIRST_WARNING_SECONDS

    def get(self, key: str) -> bytes:
        """The value of a key of the exchange, once it is there."""
        while True:
            waited = time.monotonic() - self._began
            until = min(self._warning, self._seconds)
            value = self._channel.store.get(key, max(0.001, until - waited))
            if value is not None:
                return value
            waited = time.monotonic() - self._began
            if waited >= self._seconds:
                raise PeerTimeoutError(
                    f"Expected all {self._channel.size} processes to agree on {self._what} within "
                    f"{self._seconds:g} s. {self._missing()} It has ended, is stuck, or runs "
                    "another program: every process must make the same calls in the same order, "
                    "also those that only the chief needs."
                )
            if waited >= self._warning:
                self._warning = waited + _WARNING_SECONDS
                _log.warning(
                    "Waiting for all processes to agree on %s for %.0f s, up to %g s. %s",
                    self._what, waited, self._seconds, self._missing(),
                )  # fmt: skip

    def _missing(self) -> str:
        channel = self._channel
        others = [r for r in range(channel.size) if r != channel.rank]
        absent = [r for r in others if channel.store.get(f"{self._base}/{r}", 0.05) is None]
        names = ", ".join(channel.names[r] for r in absent or [0])
        return f"Missing: {names} (this is {channel.names[channel.rank]})."


def _pack(parts: Sequence[bytes]) -> bytes:
    sizes = b"".join(len(part).to_bytes(8, "big") for part in parts)
    return sizes + b"".join(parts)


def _unpack(joined: bytes, count: int) -> list[bytes]:
    parts = []
    start = 8 * count
    for i in range(count):
        size = int.from_bytes(joined[8 * i : 8 * i + 8], "big")
        parts.append(joined[start : start + size])
        start += size
    return parts


class LocalStore:
    """A store of one process: for one that waits to join, and where threads play processes."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """As `Store`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes | None:
        """As `Store`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def delete(self, key: str) -> None:
        """As `Store`."""
        with self._changed:
            self._values.pop(key, None)

    def __len__(self) -> int:
        return len(self._values)
