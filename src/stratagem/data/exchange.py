"""What the workers tell each other about the steps ahead, off the thread that trains."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

from stratagem.cluster.channel import Channel
from stratagem.errors import PeerTimeoutError

_SLICE_SECONDS = 0.25  # how soon a waiting exchange notices that nobody wants it any more


class StoppedError(Exception):
    """The pass that the exchange belongs to was closed."""


class Exchange:
    """All workers' messages of each turn, for the thread that reads one pass ahead.

    Such a thread may wait for long without harm while its batches are not needed yet: another
    worker may be busy with something else. So the deadline runs only while somebody waits for it.

    Args:
        channel: of the job.
        name: of the pass, the same on every worker.
    """

    def __init__(self, channel: Channel, name: str):
        self.stop = threading.Event()
        self.awaited_since: float | None = None  # set by who waits for the thread's result
        self._channel = channel
        self._base = channel.key(name)
        self._turns = itertools.count()
        self._broken = False

    def all_gather(self, mine: Any) -> list[Any]:
        """The messages of all workers, by index. Messages are what JSON can hold.

        Raises:
            PeerTimeoutError: names the workers that did not come while somebody waited.
            RuntimeError: another worker's data failed; says which and how.
            StoppedError: `stop` was set.
        """
        found = self._turn({"said": mine})
        failed = [
            f"{name}: {message['failed']}"
            for name, message in zip(self._channel.names, found, strict=True)
            if "failed" in message
        ]
        if failed:
            self._broken = True
            raise RuntimeError(
                f"Expected every worker to read its data. Got {'; '.join(failed)} (this is "
                f"{self._channel.names[self._channel.rank]}, whose data can be read). Look at the "
                "output of that worker."
            )
        return [message["said"] for message in found]

    def fail(self, error: BaseException) -> None:
        """Tells the others, in place of the message of this turn, why there will be no more.

        Waits for nobody. Does nothing when it was the exchange that failed.
        """
        if self._broken:
            return
        channel, base = self._channel, f"{self._base}/{next(self._turns)}"
        message = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        if channel.rank:
            channel.store.set(f"{base}/{channel.rank}", json.dumps(message).encode())
        else:
            found = [message] + [{"said": None}] * (channel.size - 1)
            channel.store.set(f"{base}/all", json.dumps(found).encode())

    def _turn(self, message: Any) -> list[Any]:
        channel, turn = self._channel, next(self._turns)
        base, data = f"{self._base}/{turn}", json.dumps(message).encode()
        if channel.rank:
            channel.store.set(f"{base}/{channel.rank}", data)
            return json.loads(self._wait(base, "all"))
        parts = [data] + [self._wait(base, str(rank)) for rank in range(1, channel.size)]
        channel.store.set(f"{base}/all", b"[" + b",".join(parts) + b"]")
        if turn:  # who sends for this turn has read the answer of the one before
            for name in ("all", *range(1, channel.size)):
                channel.store.delete(f"{self._base}/{turn - 1}/{name}")
        return [json.loads(part) for part in parts]

    def _wait(self, base: str, name: str) -> bytes:
        while not self.stop.is_set():
            found = self._channel.store.get(f"{base}/{name}", _SLICE_SECONDS)
            if found is not None:
                return found
            since = self.awaited_since
            if since is not None and time.monotonic() - since > self._channel.seconds:
                self._broken = True
                raise PeerTimeoutError(self._missing(base))
        self._broken = True
        raise StoppedError

    def _missing(self, base: str) -> str:
        channel = self._channel
        others = [r for r in range(1, channel.size) if r != channel.rank]
        absent = [r for r in others if channel.store.get(f"{base}/{r}", 0.05) is None]
        if channel.rank and not absent:
            absent = [0]
        return (
            f"Expected all {channel.size} workers to read the dataset's next batch within "
            f"{channel.seconds:g} s. Missing: {', '.join(channel.names[r] for r in absent)} (this "
            f"is {channel.names[channel.rank]}). It has ended, is stuck, or left the dataset: "
            "every worker must iterate it alike, to its end or for the same number of steps."
        )
