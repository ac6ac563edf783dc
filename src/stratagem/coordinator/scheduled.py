"""What is scheduled: a function with its arguments, and where its result goes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from stratagem.coordinator.instructions import Dispatch, Resolution
from stratagem.coordinator.per_worker import PerWorkerIterator
from stratagem.coordinator.per_worker_values import WorkerArrays
from stratagem.coordinator.plans import Family
from stratagem.coordinator.remote_value import RemoteValue
from stratagem.strategies import tallied


@dataclasses.dataclass
class Scheduled:
    """One scheduled call.

    Attributes:
        family: how workers run it.
        arrays: what goes along: arrays, or one a worker.
        iterators: its per-worker iterators, by position.
        value: where its result goes.
        counts: whether it changes variables (not an evaluation).
        rows: how many rows it trains on, if that is known; for weights in a synchronous round.
        batch: which batch of which accounted dataset it is for; None where that is not noted.
        at: which rows its worker reads; see `data.numbered`.
        share: its part of the rows of its round; None where all parts are equal.
        parts: how many make its round; 0: as many as there are workers.
    """

    family: Family
    arrays: list[Any]
    iterators: list[PerWorkerIterator]
    value: RemoteValue
    counts: bool = True
    rows: int | None = None
    batch: tuple[str, int] | None = None
    at: list[int] | None = None
    share: float | None = None
    parts: int = 0

    @property
    def numbers(self) -> list[int]:
        """The job's numbers of its iterators, by position."""
        return [iterator.number for iterator in self.iterators]

    @property
    def needs(self) -> list[str]:
        """The iterators that it reads, as the state names them."""
        return [str(self.iterators[position].number) for position in self.family.reads]

    def fields(self, what: Dispatch, share: float) -> dict[str, Any]:
        """What its worker has to know; see `worker`.

        Args:
            what: how it is sent.
            share: its part of the rows of its round, where it has none of its own.
        """
        return {
            "closure": what.closure, "token": what.token, "family": self.family.number,
            "below": what.below, "round": what.round,
            "weight": 1.0 if self.rows is None else float(self.rows),
            "share": share if self.share is None else self.share,
            "iterators": self.numbers, "at": self.at,
        }  # fmt: skip

    def arguments(self, worker: int) -> list[np.ndarray]:
        """The arrays for a worker.

        Raises:
            ValueError: there is none for this worker in a PerWorkerValues.
        """
        return [_of(a, worker) if isinstance(a, WorkerArrays) else a for a in self.arrays]

    def resolve(self, outcome: Resolution, result: Any) -> None:
        """Gives its result, or what became of it, to where it goes. In the coordinator's thread."""
        if outcome == "ended":
            self.value.end()
        elif outcome == "cancelled":
            self.value.cancel()
        elif outcome == "error":
            self.value.set_exception(result)
        else:
            number, arrays = result
            plan = self.family.plan(number)
            count = plan.parts.results
            tallied.add(plan.local, arrays[count:])  # before anybody knows that it is done
            self.value.set_result(plan.parts.unpack(list(arrays[:count])))


def _of(values: WorkerArrays, worker: int) -> np.ndarray:
    if worker >= len(values.values):
        raise ValueError(
            f"PerWorkerValues: expected a value for each worker. Got {len(values.values)}, and "
            f"worker {worker} is to run the function. Make it with one more value."
        )
    return values.values[worker]
