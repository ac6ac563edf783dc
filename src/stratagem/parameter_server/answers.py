"""What the servers together are told, and say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratagem.parameter_server.plan import Unit


@dataclass(frozen=True)
class Item:
    """A push to one unit.

    Attributes:
        unit: which; its program need not be there.
        rows: numbers of the rows, int64, sorted, no number twice; None: all.
        handed: kind ("scalar", "rows", "whole") and value of each; "bags": a `Bagged`, of which a
            server makes rows.
    """

    unit: Unit
    rows: np.ndarray | None
    handed: Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Pulled:
    """Values.

    Attributes:
        whole: of each variable.
        rows: `[ids, ...]` of each table, longer where there was to be room; or sums of its bags.
        versions: of each server; None of one that was not asked.
    """

    whole: list[np.ndarray]
    rows: list[np.ndarray]
    versions: list[int | None]


@dataclass(frozen=True)
class Pushed:
    """What became of a push.

    Attributes:
        applied: whether any server applied or staged any of it now.
        staleness: of each server that was asked.
        late: whether it came after its round.
    """

    applied: bool
    staleness: list[int]
    late: bool


@dataclass(frozen=True)
class Committed:
    """What became of a round.

    Attributes:
        applied: whether all servers have applied it, now or before.
        missing: closures that a server, which was restarted, has no gradients of: run them again.
        dropped: the most closures that one server has thrown away.
    """

    applied: bool
    missing: list[int]
    dropped: int
