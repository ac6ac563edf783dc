"""How a coordinator takes the servers for its job, and leaves them; see `holder.py`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from stratagem.errors import JobMismatchError, StratagemError
from stratagem.parameter_server.client import Servers
from stratagem.parameter_server.holder import SILENT_SECONDS
from stratagem.transport.thread import HubThread

_RETRY_SECONDS = 0.5
_LEAVE_SECONDS = 1.0

_log = logging.getLogger("stratagem")


def take(
    asking: HubThread, servers: Servers, hello: Callable[[], list[dict[str, Any]]], seconds: float
) -> list[dict[str, Any]]:
    """Takes all servers for a job; gives what each says of itself; ready: for this job.

    Args:
        asking: runs the hub of `servers`.
        servers: all of them.
        hello: says hello to all; gives what each says of itself.
        seconds: how long to wait for servers; for another job's coordinator, which may have died,
            not longer than until it would be forgotten.

    Raises:
        JobMismatchError: another job has a server.
        PeerTimeoutError: a server did not answer.
    """
    until = time.monotonic() + min(seconds, SILENT_SECONDS + 5.0)
    told = False
    while True:
        try:
            return [{**one, "ready": one["ready"] and one["job"] == servers.job} for one in hello()]
        except JobMismatchError as error:
            if time.monotonic() >= until:
                asking.submit(lambda hub: leave(servers))
                raise JobMismatchError(str(error)) from None
            if not told:
                _log.warning("Waits, since that one may have died: %s", error)
                told = True
        time.sleep(_RETRY_SECONDS)


def leave(servers: Servers) -> None:
    """Tells all servers that this job has no coordinator now. Does not wait."""
    for peer in servers.peers:
        with contextlib.suppress(StratagemError):  # one that is gone need not hear it
            peer.post("leave", {"job": servers.job}, seconds=_LEAVE_SECONDS)
