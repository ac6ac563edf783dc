"""The processes of a job, as a backup needs them: all say something, or the chief says it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from stratagem.cluster import runtime
from stratagem.cluster.channel import Stream
from stratagem.cluster.runtime import Job

T = TypeVar("T")


class Peers:
    """This process among those of its job. All make the same calls in the same order.

    Args:
        job: the job; None for a process that is alone.
        name: of the stream on the job's channel.
    """

    def __init__(self, job: Job | None, name: str):
        self._job = job
        self._name = name

    @classmethod
    def of_this_process(cls, name: str) -> Peers:
        """Those of the job that this process is in."""
        return cls(runtime.current(), name)

    @property
    def rank(self) -> int:
        """This process; the processes may change between calls."""
        return 0 if self._job is None else self._job.rank

    @property
    def size(self) -> int:
        """How many processes there are."""
        return 1 if self._job is None else self._job.size

    @property
    def is_chief(self) -> bool:
        """Whether this one writes the files."""
        return self._job is None or self._job.is_chief

    @property
    def is_waiting(self) -> bool:
        """Whether this process has not joined the others yet."""
        return self._job is not None and self._job.is_waiting

    @property
    def others_wait(self) -> bool:
        """Whether processes wait to be admitted, as far as this one knows."""
        return self._job is not None and self._job.may_change and self._job.member.others_wait

    def admit(self) -> None:
        """Lets them join, as all processes do at this place.

        Raises:
            GroupChangedError: they do; see `Lockstep.unit`.
        """
        if self._job is not None:
            self._job.member.admit()
            self._job.member.raise_if_changed()

    def enter(self) -> bytes:
        """Joins the others; what they `give`."""
        if self._job is None or self._job.lockstep is None:
            raise RuntimeError("Expected a strategy before a backup. Got none: create it first.")
        return self._job.lockstep.enter()

    @property
    def _stream(self) -> Stream | None:
        if self._job is None or self._job.is_waiting:
            return None
        return self._job.channel.stream(self._name)

    def together(
        self,
        work: Callable[[], T],
        again: Callable[[T], object] | None = None,
        give: Callable[[], bytes] | None = None,
    ) -> T:
        """Does what consists of several exchanges, all of it again where processes are lost."""
        return work() if self._job is None else self._job.together(work, again, give)

    def gather(self, value: Any, what: str) -> list[Any]:
        """The values of all processes, by rank; JSON can hold them.

        Raises:
            PeerTimeoutError: names the processes that did not come.
        """
        stream = self._stream
        if stream is None:
            return [value]
        parts = stream.all_gather(json.dumps(value).encode(), what)
        return [json.loads(part) for part in parts]

    def from_chief(self, value: Any, what: str) -> Any:
        """The chief's value; JSON can hold it."""
        return json.loads(self.bytes_from_chief(json.dumps(value).encode(), what))

    def bytes_from_chief(self, data: bytes, what: str) -> bytes:
        """The chief's bytes, in as many messages as they take."""
        stream = self._stream
        if stream is None:
            return data
        return stream.from_first(data, what)  # the chief is process 0
