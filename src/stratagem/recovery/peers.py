"""The processes of a job, as a backup needs them: all say something, or the chief says it."""

from __future__ import annotations

import json
from typing import Any

from stratagem.cluster import runtime
from stratagem.cluster.channel import Channel

_CHUNK = 1 << 20  # bytes of a message on the job's channel


class Peers:
    """This process among those of its job. All make the same calls in the same order.

    Args:
        channel: the job's; None for a process that is alone.
        is_chief: whether this one writes the files.
        name: of the stream on the channel.
    """

    def __init__(self, channel: Channel | None, is_chief: bool, name: str):
        self._stream = None if channel is None else channel.stream(name)
        self.rank = 0 if channel is None else channel.rank
        self.size = 1 if channel is None else channel.size
        self.is_chief = is_chief

    @classmethod
    def of_this_process(cls, name: str) -> Peers:
        """Those of the job that this process is in."""
        job = runtime.current()
        return cls(None, True, name) if job is None else cls(job.channel, job.is_chief, name)

    def gather(self, value: Any, what: str) -> list[Any]:
        """The values of all processes, by rank; JSON can hold them.

        Raises:
            PeerTimeoutError: names the processes that did not come.
        """
        if self._stream is None:
            return [value]
        parts = self._stream.all_gather(json.dumps(value).encode(), what)
        return [json.loads(part) for part in parts]

    def from_chief(self, value: Any, what: str) -> Any:
        """The chief's value; JSON can hold it."""
        return json.loads(self.bytes_from_chief(json.dumps(value).encode(), what))

    def bytes_from_chief(self, data: bytes, what: str) -> bytes:
        """The chief's bytes, in as many messages as they take."""
        if self._stream is None:
            return data
        said = self._stream.all_gather(
            b"chief%d" % len(data) if self.is_chief else b"", what
        )
        chief = next(rank for rank, part in enumerate(said) if part)
        size = int(said[chief][5:])
        received = []
        for start in range(0, size, _CHUNK):
            part = data[start : start + _CHUNK] if self.is_chief else b""
            received.append(self._stream.all_gather(part, what)[chief])
        return b"".join(received)
