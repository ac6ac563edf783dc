"""All processes of a job agree that it ends, and after which step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import jax

from stratagem.cluster import runtime
from stratagem.cluster.channel import Channel

_POLL_SECONDS = 1.0


class Agreement(Protocol):
    """What a process needs of its job to leave together with the others."""

    def announce(self, topic: str) -> None:
        """Tells all processes; any thread, any number of times."""

    def announced(self, topic: str) -> bool:
        """True once any process has announced it; asked at each step, so it takes no time."""

    def latest(self, topic: str, counter: int) -> int:
        """The largest counter of all processes; each says its own and waits for the others."""

    def close(self) -> None:
        """Ends what was started; no further calls."""


class Alone:
    """The agreement of a process that is alone."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def announce(self, topic: str) -> None:
        """As `Agreement`."""
        self._topics.add(topic)

    def announced(self, topic: str) -> bool:
        """As `Agreement`."""
        return topic in self._topics

    def latest(self, topic: str, counter: int) -> int:
        """Its own counter."""
        del topic
        return counter

    def close(self) -> None:
        """Nothing was started."""


class InJob:
    """The agreement of the processes of a job, over its channel.

    A thread listens for announcements, so that a step does not wait to find out. A process may run
    ahead of the others, since steps are dispatched before they are computed: so all say how far
    they are, and the furthest one decides. The others can follow it: whatever they need of it, it
    has dispatched.

    Args:
        channel: the job's.
        name: of this agreement; a job may have several.
        topics: what may be announced, in the order in which it happens.
    """

    def __init__(self, channel: Channel, name: str, topics: Sequence[str]):
        self._channel = channel
        self._stream = channel.stream(name)
        self._keys = {topic: channel.key(f"{name}/{topic}") for topic in topics}
        self._heard = {topic: threading.Event() for topic in topics}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stratagem-agree", daemon=True)
        self._thread.start()

    def announce(self, topic: str) -> None:
        """As `Agreement`."""
        if self._heard[topic].is_set():
            return
        try:
            self._channel.store.set(self._keys[topic], b"yes")
        except jax.errors.JaxRuntimeError as e:  # another process was first
            if "ALREADY_EXISTS" not in str(e):
                raise
        self._heard[topic].set()

    def announced(self, topic: str) -> bool:
        """As `Agreement`."""
        return self._heard[topic].is_set()

    def latest(self, topic: str, counter: int) -> int:
        """As `Agreement`.

        Raises:
            PeerTimeoutError: names the processes that did not come to their next step.
        """
        said = self._stream.all_gather(b"%d" % counter, f"the last step ({topic})")
        return max(map(int, said))

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        for topic, key in self._keys.items():
            while not self._heard[topic].is_set():
                if self._closed.is_set():
                    return
                if self._channel.store.get(key, _POLL_SECONDS) is not None:
                    self._heard[topic].set()


def of_this_process(name: str, topics: Sequence[str]) -> Agreement:
    """The agreement of the job that this process is in."""
    job = runtime.current()
    return Alone() if job is None else InJob(job.channel, name, topics)
