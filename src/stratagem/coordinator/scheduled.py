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
        batch: which batch of which accounted dataset it is for; None where that is not noted.
        at: which rows its worker reads; see `data.numbered`.
    """

    family: Family
    arrays: list[Any]
    value: RemoteValue
    counts: bool = True
    rows: int | None = None
    keep: Any = None
    batch: tuple[str, int] | None = None
    at: list[int] | None = None

    def arguments(self, worker: int) -> list[np.ndarray]:
        """The arrays for a worker.

        Raises:
            ValueError: there is none for this worker in a PerWorkerValues.
        """
        return [_of(a, worker) if isinstance(a, PerWorkerValues) else a for a in self.arrays]


def _of(values: PerWorkerValues, worker: int) -> np.ndarray:
    if worker >= len(values.values):
        raise ValueError(
            f"PerWorkerValues: expected a value for each worker. Got {len(values.values)}, and "
            f"worker {worker} is to run the function. Make it with one more value."
        )
    return values.values[worker]
