"""Warnings that anybody can cause, said seldom enough that they fill no disk."""

from __future__ import annotations

import logging
from collections.abc import Callable

_SECONDS = 10.0  # between two warnings of a kind
_AT_ONCE = 5  # of a kind, before that counts

_log = logging.getLogger("stratagem")


class Seldom:
    """Logs a few warnings of each kind, then one every 10 s with how many were left out.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._kinds: dict[str, tuple[float, int, int]] = {}

    def warning(self, kind: str, text: str, *values: object) -> None:
        """Logs a warning, or counts it."""
        now = self._now()
        last, said, left_out = self._kinds.get(kind, (now, 0, 0))
        if now - last >= _SECONDS:
            last, said = now, 0
        if said >= _AT_ONCE:
            self._kinds[kind] = (last, said, left_out + 1)
            return
        if left_out:
            text, values = text + " (%d more of this kind were left out)", (*values, left_out)
        _log.warning(text, *values)
        self._kinds[kind] = (now, said + 1, 0)
