"""What is scheduled: a function with its arguments, and where its result goes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from stratagem.coordinator.per_worker import PerWorkerValues
from stratagem.coordinator.plans import Family
from stratagem.coordinator.remote_value import RemoteValue


@dataclasses.dataclass
class Scheduled:
    """One scheduled call.

    Attributes:
        family: how workers run it.
        arrays: what goes along: arrays, or one a worker.
        value: where its result goes.
        counts: whether it changes variables (not an evaluation).
        rows: how many rows it trains on, if that is known; for weights in a synchronous round.
        keep: what is done with its local values, in the coordinator's thread.
    """

    family: Family
    arrays: list[Any]
    value: RemoteValue
    counts: bool = True
    rows: int | None = None
    keep: Any = None

    def arguments(self, worker: int) -> list[np.ndarray]:
        """The arrays for a worker."""
        return [a.values[worker] if isinstance(a, PerWorkerValues) else a for a in self.arrays]
