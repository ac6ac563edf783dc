"""All processes of a job agree that it ends, and after which step."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import jax

from stratagem.cluster import runtime
from stratagem.cluster.channel import Channel
from stratagem.cluster.runtime import Job
from stratagem.errors import GroupChangedError, PeerTimeoutError

_POLL_SECONDS = 1.0


class Agreement(Protocol):
    """What a process needs of its job to leave together with the others."""

    def announce(self, topic: str) -> None:
        """Tells all processes; any thread, any number of times."""

    def announced(self, topic: str, counter: int | None = None) -> bool:
        """True once any process has announced it; asked at each step, so it takes no time.

        Args:
            topic: what.
            counter: where this process is, at a place at which it would leave; the same at the
                same place on all processes, and never less than before.
        """

    def latest(self, topic: str, counter: int) -> int | None:
        """The least counter at which all processes can leave, once it was announced.

        None where that cannot be known before the next step, since the processes change.
        """

    def close(self) -> None:
        """Ends what was started; no further calls."""


class Alone:
    """The agreement of a process that is alone."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def announce(self, topic: str) -> None:
        """As `Agreement`."""
        self._topics.add(topic)

    def announced(self, topic: str, counter: int | None = None) -> bool:
        """As `Agreement`."""
        del counter
        return topic in self._topics

    def latest(self, topic: str, counter: int) -> int:
        """Its own counter."""
        del topic
        return counter

    def close(self) -> None:
        """Nothing was started."""


class InJob:
    """The agreement of the processes of a job, over its channel.

    A thread listens for announcements, so that a step does not wait to find out. Some hear of one
    a step later than others, and a process that waits in a step for another one cannot be asked.
    So the threads say which place each process has passed when it heard: it stops to look at the
    next one. All leave at the first place that nobody had passed.

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
        self._passed = dict.fromkeys(topics, -1)  # no more changed once it was heard
        self._passing = threading.Lock()
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
        channel = self._channel
        self._tell(channel, topic, b"yes")
        self._hears(channel, topic)

    def _hears(self, channel: Channel, topic: str) -> None:
        """From now on this process looks at each place; tells which was the last that it passed."""
        with self._passing:
            self._heard[topic].set()
        self._tell(channel, f"{topic}/{channel.rank}", b"%d" % self._passed[topic])

    def _tell(self, channel: Channel, what: str, value: bytes) -> None:
        try:
            channel.store.set(channel.key(f"{self._name}/{what}"), value)
        except jax.errors.JaxRuntimeError as e:
            # Another process was first; or the processes change, and `_listen` says it again.
            if "ALREADY_EXISTS" not in str(e) and channel is self._channel and not self._changes():
                raise

    def _changes(self) -> bool:
        return self._job is not None and self._job.may_change

    def announced(self, topic: str, counter: int | None = None) -> bool:
        """As `Agreement`."""
        with self._passing:
            heard = self._heard[topic].is_set()
            if not heard and counter is not None:
                self._passed[topic] = counter
        return heard

    def latest(self, topic: str, counter: int) -> int | None:
        """As `Agreement`.

        Raises:
            PeerTimeoutError: names the processes that do not say where they are.
        """
        del counter
        channel = self._channel
        deadline = time.monotonic() + channel.seconds
        passed: list[int] = []
        try:
            for rank in range(channel.size):
                left = max(0.001, deadline - time.monotonic())
                said = channel.store.get(channel.key(f"{self._name}/{topic}/{rank}"), left)
                if said is None:
                    raise PeerTimeoutError(
                        f"Expected all processes to say within {channel.seconds:g} s where they "
                        f"are, to agree on the last step ({topic}). Missing: "
                        f"{channel.names[rank]} (this is {channel.names[channel.rank]}). Look "
                        "whether it is stopped or out of reach."
                    )
                passed.append(int(said))
        except GroupChangedError:
            if not self._changes():
                raise
            return None
        return max(passed) + 1

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
                        self._tell(channel, topic, b"yes")
                        self._hears(channel, topic)
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
            self._hears(channel, topic)


def of_this_process(name: str, topics: Sequence[str]) -> Agreement:
    """The agreement of the job that this process is in."""
    job = runtime.current()
    return Alone() if job is None else InJob(job.channel, name, topics, job)
