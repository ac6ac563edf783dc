"""All processes of a job agree that it ends, and after which step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import jax

from stratagem.cluster import runtime
from stratagem.cluster.channel import Channel
from stratagem.cluster.runtime import Job
from stratagem.errors import GroupChangedError

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
        job: whose channel it is, where that may become another one.
    """

    def __init__(self, channel: Channel, name: str, topics: Sequence[str], job: Job | None = None):
        self._first, self._job = channel, job
        self._name = name
        self._heard = {topic: threading.Event() for topic in topics}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stratagem-agree", daemon=True)
        self._thread.start()

    @property
    def _channel(self) -> Channel:
        return self._first if self._job is None else self._job.channel

    def announce(self, topic: str) -> None:
        """As `Agreement`."""
        if self._heard[topic].is_set():
            return
        self._tell(self._channel, topic)
        self._heard[topic].set()

    def _tell(self, channel: Channel, topic: str) -> None:
        try:
            channel.store.set(channel.key(f"{self._name}/{topic}"), b"yes")
        except jax.errors.JaxRuntimeError as e:
            # Another process was first; or the processes change, and `_listen` says it again.
            if "ALREADY_EXISTS" not in str(e) and channel is self._channel and not self._changes():
                raise

    def _changes(self) -> bool:
        return self._job is not None and self._job.may_change

    def announced(self, topic: str) -> bool:
        """As `Agreement`."""
        return self._heard[topic].is_set()

    def latest(self, topic: str, counter: int) -> int:
        """As `Agreement`.

        Raises:
            PeerTimeoutError: names the processes that did not come to their next step.
        """

        def gather() -> list[bytes]:
            stream = self._channel.stream(self._name)
            return stream.all_gather(b"%d" % counter, f"the last step ({topic})")

        said = gather() if self._job is None else self._job.together(gather)
        return max(map(int, said))

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        told = self._channel
        while not self._closed.is_set() and not all(h.is_set() for h in self._heard.values()):
            try:
                channel = self._channel
                if channel is not told:  # of other processes, who may not have heard it
                    for topic in (t for t, heard in self._heard.items() if heard.is_set()):
                        self._tell(channel, topic)
                    told = channel
                self._hear(channel)
            except (GroupChangedError, jax.errors.JaxRuntimeError):
                if not self._changes():
                    raise
                self._closed.wait(_POLL_SECONDS)

    def _hear(self, channel: Channel) -> None:
        """Waits a moment for the next topic."""
        topic = next(t for t, heard in self._heard.items() if not heard.is_set())
        if channel.store.get(channel.key(f"{self._name}/{topic}"), _POLL_SECONDS) is not None:
            self._heard[topic].set()


def of_this_process(name: str, topics: Sequence[str]) -> Agreement:
    """The agreement of the job that this process is in."""
    job = runtime.current()
    return Alone() if job is None else InJob(job.channel, name, topics, job)
