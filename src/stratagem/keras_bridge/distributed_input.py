"""A distributed dataset as input of `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from stratagem.coordinator import ClusterCoordinator
from stratagem.data import (
    DatasetWithOptions,
    DistributedDataset,
    DistributedIterator,
    FileBatches,
    RowBatches,
    numbered,
)
from stratagem.data.dealt import DealtDataset
from stratagem.keras_bridge.adapters import OwnBatches
from stratagem.keras_bridge.on_workers import CreatorAdapter, DatasetCreator, NumberedPass
from stratagem.values import PerReplica, is_distributed


class GlobalBatch(PerReplica):
    """The parts of one tensor of a batch, with the shape that the whole has: what Keras asks."""

    __slots__ = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that each replica holds."""
        return tuple(shape[0] for shape in self.shapes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parts joined along the rows."""
        return (sum(self.rows), *self.shapes[0][1:])

    @property
    def ndim(self) -> int:
        """Rank of the parts."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Their dtype."""
        return self.stacked.dtype if self.stacked is not None else self.values[0].dtype


def adapt(data: Any, strategy: Any) -> Any:
    """Wraps a distributed dataset for Keras, and distributes what only this package knows.

    Leaves other data as they are: Keras reads them.
    """
    if isinstance(data, DatasetCreator):
        if strategy.served:
            return CreatorAdapter(data, strategy)
        data = strategy.distribute_datasets_from_function(data.dataset_fn, data.input_options)
    if strategy.served:
        return iterated(data, strategy)
    if isinstance(data, (DatasetWithOptions, FileBatches, RowBatches)):
        data = strategy.experimental_distribute_dataset(data)
    return DistributedAdapter(data, strategy) if isinstance(data, DistributedDataset) else data


def iterated(data: Any, strategy: Any) -> Any:
    """Data that only this package knows, for a strategy that deals out batches as they come.

    Workers read what can be read by its number; the rest the coordinator reads.
    """
    if isinstance(data, DatasetWithOptions):
        data = data.dataset
    known = isinstance(data, (FileBatches, RowBatches, DealtDataset))
    return DealtAdapter(data, strategy) if known else data


class DealtAdapter(OwnBatches):
    """Gives Keras the batches of a dataset as they are. One pass is one epoch.

    Args:
        dataset: iterable anew for each epoch.
        strategy: served.
    """

    def __init__(self, dataset: Any, strategy: Any):
        self._dataset = dataset
        self._there: Any = None  # the iterator of the workers
        data = numbered.pickled(dataset) if isinstance(dataset, RowBatches) else None
        if data is not None and len(dataset):
            self._there = ClusterCoordinator(strategy).open_iterator(data)

    def get_jax_iterator(self) -> Iterator[Any]:
        """The batches of one pass, or what stands for them where workers read them."""
        if self._there is not None:
            return NumberedPass(self._dataset, self._there)
        return self.get_numpy_iterator()

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Likewise."""
        if isinstance(self._dataset, DealtDataset):
            return self._dataset.batches()
        return iter(self._dataset)

    @property
    def num_batches(self) -> int | None:
        """Batches of one pass, where that is known."""
        return len(self._dataset) if isinstance(self._dataset, RowBatches) else None


class DistributedAdapter(OwnBatches):
    """Gives Keras the batches of a distributed dataset without joining their parts.

    One pass is one epoch, however long: no steps need to be said.
    """

    def __init__(self, dataset: DistributedDataset, strategy: Any):
        self._dataset = dataset
        self._strategy = strategy

    def get_jax_iterator(self) -> Iterator[Any]:
        """The batches of one pass."""
        return _Batches(iter(self._dataset))

    def get_numpy_iterator(self) -> Iterator[Any]:
        """The same batches, each joined on the host."""
        for element in self.get_jax_iterator():
            yield jax.tree.map(lambda x: join(x, self._strategy), element, is_leaf=is_distributed)

    @property
    def num_batches(self) -> int | None:
        """Batches of one pass; None when unknown or without end."""
        count = self._dataset.cardinality
        return None if count is None or math.isinf(count) else int(count)


class _Batches(Iterator[Any]):
    """One pass, which can say where it is and go on from there, for backups."""

    def __init__(self, elements: DistributedIterator):
        self._elements = elements
        self.get_state = elements.get_state
        self.set_state = elements.set_state

    def __next__(self) -> Any:
        return jax.tree.map(as_global, next(self._elements), is_leaf=is_distributed)


def as_global(leaf: Any) -> Any:
    """A PerReplica value as what Keras can ask for its whole shape."""
    if not isinstance(leaf, PerReplica):
        return leaf
    stacked = leaf.stacked
    value: PerReplica = (
        GlobalBatch(leaf.values, leaf.shapes)
        if stacked is None
        else GlobalBatch.from_stacked(stacked)
    )
    value.dealt = leaf.dealt
    return value


def join(leaf: Any, strategy: Any) -> Any:
    """A tensor of a batch as one NumPy array, `[rows, ...]`. Every process calls it."""
    if not isinstance(leaf, PerReplica):
        return np.asarray(leaf)
    return np.concatenate([np.asarray(part) for part in strategy.all_parts(leaf)])
