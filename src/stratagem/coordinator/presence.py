"""Whether a task that takes part in a job is still there."""

from __future__ import annotations

from typing import Any

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
