"""Whether a task that takes part in a job is still there, and still of this job."""

from __future__ import annotations

from typing import Any

from stratagem.errors import JobMismatchError
from stratagem.parameter_server.client import as_raised

_SILENCE_SECONDS = 5.0  # after which a task counts as lost


def why_lost(peer: Any, up: str | None) -> str:
    """Why a task counts as lost; nothing where it is there, or was not.

    Args:
        peer: the connection to it.
        up: the incarnation that takes part; None: none does.
    """
    if up is None:
        return ""
    if peer.incarnation not in (None, up):
        return "its process ended, and another one has begun"
    if peer.silence > _SILENCE_SECONDS:
        return f"it has not been heard for {peer.silence:.1f} s"
    return ""


def other_job(answer: Any) -> JobMismatchError | None:
    """The error of a task that serves another job; None for every other answer."""
    error = as_raised(answer)
    return error if isinstance(error, JobMismatchError) else None
