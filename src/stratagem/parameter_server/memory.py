"""How much memory this process may take."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 0.85
# Of control groups, versions 2 and 1.
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def available(limits: tuple[Path, ...] = _LIMITS) -> int:
    """Bytes: 85 % of the machine's memory, or of the control group's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # Not there, or "max": no limit.
            continue
    return int(total * _SHARE)


def check(server: int, limit: int, there: int, more: int, what: str) -> None:
    """Raises MemoryError where a server has no room for more.

    Args:
        server: which.
        limit: bytes that it may keep.
        there: bytes that it keeps.
        more: bytes that it is to keep.
        what: that is.
    """
    if more and there + more > limit:
        raise MemoryError(
            f"ps {server}: expected at most {limit:,} bytes of variables and staged gradients. Got "
            f"{more:,} more for {what}, beside {there:,}. Use more parameter servers, smaller "
            "tables or a higher memory limit."
        )
