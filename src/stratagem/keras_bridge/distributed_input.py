"""A distributed dataset as input of `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from stratagem import _keras
from stratagem.data import DistributedDataset
from stratagem.values import PerReplica, is_distributed


class GlobalBatch(PerReplica):
    """The parts of one tensor of a batch, with the shape that the whole has: what Keras asks."""

    __slots__ = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that each replica holds."""
        if self.stacked is not None:
            return (self.stacked.shape[1],) * self.stacked.shape[0]
        return tuple(part.shape[0] for part in self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parts joined along the rows."""
        rest = self.stacked.shape[2:] if self.stacked is not None else self.values[0].shape[1:]
        return (sum(self.rows), *rest)

    @property
    def ndim(self) -> int:
        """Rank of the parts."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Their dtype."""
        return self.stacked.dtype if self.stacked is not None else self.values[0].dtype


def adapt(data: Any) -> Any:
    """Wraps a distributed dataset for Keras; leaves other data as they are."""
    return DistributedAdapter(data) if isinstance(data, DistributedDataset) else data


class DistributedAdapter(_keras.DataAdapter):
    """Gives Keras the batches of a distributed dataset without joining their parts.

    One pass is one epoch, however long: no steps need to be said.
    """

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset

    def get_jax_iterator(self) -> Iterator[Any]:
        """The batches of one pass."""
        for element in self._dataset:
            yield jax.tree.map(_global, element, is_leaf=is_distributed)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """The same batches, each joined on the host."""
        for element in self.get_jax_iterator():
            yield jax.tree.map(join, element, is_leaf=is_distributed)

    @property
    def num_batches(self) -> int | None:
        """Batches of one pass; None when unknown or without end."""
        count = self._dataset.cardinality
        return None if count is None or math.isinf(count) else int(count)

    @property
    def batch_size(self) -> None:
        """Unknown: batches may differ."""
        return None

    @property
    def has_partial_batch(self) -> None:
        """Unknown."""
        return None

    @property
    def partial_batch_size(self) -> None:
        """Unknown."""
        return None


def _global(leaf: Any) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    stacked = leaf.stacked
    return GlobalBatch(leaf.values) if stacked is None else GlobalBatch.from_stacked(stacked)


def join(leaf: Any) -> Any:
    """A tensor of a batch as one NumPy array, `[rows, ...]`."""
    if not isinstance(leaf, PerReplica):
        return np.asarray(leaf)
    return np.concatenate([np.asarray(part) for part in leaf.values])
