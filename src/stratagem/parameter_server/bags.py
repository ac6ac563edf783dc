"""Bags: sets of looked-up rows that a step adds up, as sums over a feature's ids do.

Of such a lookup only sums travel: servers add up rows before they send them, and are sent one
gradient for each bag, which is that of all its rows. (PyTorch's EmbeddingBag on one device; sums
over bags where the rows are, as row-wise sharded tables of TorchRec have them.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from stratagem.parameter_server import kernels


def fewer(bags: int, rows: int, servers: int) -> bool:
    """Whether sums of so many bags, to or from each server, are less than so many rows are."""
    return 0 < servers * bags < rows


@dataclasses.dataclass(frozen=True)
class Bags:
    """Which of some rows each bag has; a sparse matrix of ones.

    Attributes:
        places: int32 `[n]`, of the rows of the first bag, then of the next.
        bounds: int32 `[bags + 1]`, where each bag begins and ends in `places`.
    """

    places: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @classmethod
    def of(cls, lookups: Sequence[tuple[np.ndarray, int]]) -> Bags:
        """Of lookups, each with how many bags of equal size it is."""
        starts = [np.zeros(1, np.int32)]
        for places, count in lookups:
            per = places.size // count if count else 0
            starts.append(starts[-1][-1] + per * np.arange(1, count + 1, dtype=np.int32))
        flat = [places.reshape(-1) for places, _ in lookups]
        return cls(flat[0] if len(flat) == 1 else np.concatenate(flat), np.concatenate(starts))

    def within(self, start: int, stop: int, count: int) -> Bags:
        """What these bags have of the rows from one place to another, of so many rows."""
        if (start, stop) == (0, count):
            return self
        places, bounds = np.empty_like(self.places), np.empty_like(self.bounds)
        found = kernels.cut_bags(self.places, self.bounds, start, stop, places, bounds)
        return Bags(places[:found], bounds)

    def check(self, count: int) -> None:
        """Raises ValueError unless these are bags of so many rows."""
        places, bounds = self.places, self.bounds
        kinds = places.dtype == bounds.dtype == np.int32 and places.ndim == bounds.ndim == 1
        if not kinds or not len(bounds):
            raise ValueError(
                f"Expected bags as places int32[n] and bounds int32[bags + 1]. Got {places.dtype}"
                f"{list(places.shape)} and {bounds.dtype}{list(bounds.shape)}. Use the client of "
                "this version."
            )
        whole = bounds[0] == 0 and bounds[-1] == len(places)
        if not whole or bool((bounds[1:] < bounds[:-1]).any()):
            raise ValueError(
                f"Expected bounds of bags that ascend from 0 to {len(places)}. Got "
                f"{bounds[:10]} and so on. Use the client of this version."
            )
        if len(places) and not 0 <= places.min() <= places.max() < count:
            raise ValueError(
                f"Expected bags of rows from 0 to {count - 1}. Got {places.min()} to "
                f"{places.max()}. Use the client of this version."
            )

    def sums(
        self, rows: np.ndarray, out: np.ndarray, numbers: np.ndarray | None = None
    ) -> np.ndarray:  # fmt: skip
        """Writes the sum of each bag's rows to `out`, `[bags, *row]`, and gives that.

        Args:
            rows: `[n, *row]`, of `kernels.DTYPES`.
            out: of their dtype.
            numbers: which of the rows those are that the bags are of; None: the first ones.
        """
        where = self.places if numbers is None else numbers[self.places]
        kernels.sum_bags(out, where, self.bounds, rows)
        return out


@dataclasses.dataclass(frozen=True)
class Bagged:
    """Gradients of rows, one for each bag.

    Attributes:
        bags: of the rows.
        gradients: `[bags, *row]`, of `kernels.DTYPES`.
    """

    bags: Bags
    gradients: np.ndarray

    def by_row(self, count: int) -> np.ndarray:
        """The sum of the gradients of each of so many rows, `[count, *row]`."""
        out = np.zeros((count, *self.gradients.shape[1:]), self.gradients.dtype)
        self.add_to(out)
        return out

    def add_to(self, out: np.ndarray) -> None:
        """Adds them to sums of their rows, in the order of the bags."""
        kernels.add_bags(out, self.bags.places, self.bags.bounds, self.gradients)
