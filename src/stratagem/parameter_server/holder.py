"""A server belongs to one job at a time: as long as the coordinator that took it is heard."""

from __future__ import annotations

import os
import socket

from stratagem.errors import JobMismatchError
from stratagem.transport.incoming import Client

SILENT_SECONDS = 10.0
"""After so long without a sign of its coordinator, a server may be taken for another job."""


class Holder:
    """Whom a server belongs to.

    Args:
        index: which ps it is.
    """

    def __init__(self, index: int):
        self._index = index
        self._job = self._who = ""
        self._client: Client | None = None

    def check(self, job: str, client: Client, now: float) -> None:
        """Whether a job may have the server now.

        Raises:
            JobMismatchError: another one has it.
        """
        if job == self._job or self._client in (None, client):
            return
        silence = now - self._client.heard
        if silence < SILENT_SECONDS:
            raise JobMismatchError(
                f"ps {self._index}: expected to be taken by one job at a time. Got job {job!r}, "
                f"while job {self._job!r} has it, whose coordinator ({self._who}) was heard "
                f"{silence:.1f} s ago. End that program, or give this one servers of its own. One "
                f"that has died is forgotten after {SILENT_SECONDS:g} s."
            )

    def take(self, job: str, client: Client, who: str, now: float) -> None:
        """A coordinator takes it, or takes it again; raises as `check`."""
        self.check(job, client, now)
        self._job, self._client, self._who = job, client, who

    def leave(self, job: str) -> None:
        """The coordinator of a job has left."""
        if job == self._job:
            self._client = None


def this_process() -> str:
    """Who this is, for others to find."""
    return f"process {os.getpid()} on {socket.gethostname()}"
