"""Which ids of a dynamic table have a row, and for how long."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which ids have a row, and for how long.

    Args:
        admit_after: an id gets its row when it occurs for the `admit_after`-th time.
        expire_after: rows that were not touched for so long are removed by `expire`; in the unit
            of the clock that the table is given, seconds or steps. None: never.
        max_rows: how many rows one parameter server keeps at most. None: as many as memory holds.
        when_full: "error", or "evict": the least recently used rows go, a 32nd of them at once.
    """

    admit_after: int = 1
    expire_after: float | None = None
    max_rows: int | None = None
    when_full: str = "error"

    def __post_init__(self) -> None:
        for name, least in (("admit_after", 1), ("max_rows", 1)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= least):
                raise ValueError(_policy(name, "an integer of 1 or more", value))
        if self.expire_after is not None and not self.expire_after > 0:
            raise ValueError(_policy("expire_after", "a number above 0", self.expire_after))
        if self.when_full not in ("error", "evict"):
            raise ValueError(_policy("when_full", "'error' or 'evict'", self.when_full))


def _policy(name: str, expected: str, value: Any) -> str:
    return (
        f"Expected {name} of {expected} for a dynamic table. Got {value!r}. Leave it out for its "
        "default."
    )
