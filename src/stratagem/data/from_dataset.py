"""Splits every batch of one dataset between the replicas."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from stratagem.data.adapt import Source, adapt
from stratagem.data.batch import check_structure, read_batch
from stratagem.data.distributed_dataset import DistributedDataset, Step, log_first_step
from stratagem.data.placement import Placement
from stratagem.data.policy import (
    AutoShardPolicy,
    InputOptions,
    check_input_options,
    rebatch_rule,
)
from stratagem.data.spec import distribute_spec, spec_of
from stratagem.data.split import row_slices, split_rows

_SHOWN_ROWS = 5  # of `WorkerInput.first_rows`


class SplitFeed:
    """A `Feed` that deals the rows of each batch, by the rule of the dataset's shard policy.

    Every batch is dealt by itself, so no replica gets more than `ceil(rows / replicas)` rows.
    TF's OFF and FILE differ in a last, smaller batch: it fills the pattern of a full one in order.
    """

    def __init__(self, source: Source, placement: Placement):
        self.policy = AutoShardPolicy.AUTO if source.policy is None else source.policy
        self.num_replicas = placement.num_replicas
        self.cardinality = source.cardinality
        self._source = source
        self._placement = placement
        self._rule = rebatch_rule(self.policy)
        self._logged = False
        self.how = f"rows of each batch split by rule {self._rule.name}"

    def steps(self) -> Iterator[Step]:
        """Starts a pass; a one-shot source refuses a second one here."""
        return self._steps(self._source.open())

    def _steps(self, batches: Iterator[Any]) -> Iterator[Step]:
        first: jax.tree_util.PyTreeDef | None = None
        index = -1
        for index, batch in enumerate(batches):
            (leaves, treedef), rows = read_batch(batch, index)
            if first is not None:
                check_structure(first, treedef, index)
            counts = split_rows(rows, self.num_replicas, self._rule)
            slices = row_slices(counts)
            element = treedef.unflatten([self._placement.split(leaf, slices) for leaf in leaves])
            shown: tuple[Any, ...] = ()
            if first is None:
                first = treedef
                shown = first_rows(leaves[0])
                if not self._logged:
                    log_first_step(self, counts)
                    self._logged = True
            yield Step(element, counts, shown)
        if index < 0:
            raise self._source.empty()

    def element_spec(self) -> Any:
        """From the dataset's own spec where it has one, else from its first batch."""
        spec = self._source.spec
        if spec is None:
            (leaves, treedef), _ = read_batch(self._source.first(), 0)
            static = self._source.static_rows
            spec = treedef.unflatten([spec_of(leaf, static_rows=static) for leaf in leaves])
        return distribute_spec(spec, self.num_replicas, split=True)


def first_rows(leaf: Any) -> tuple[Any, ...]:
    """What identifies the first rows of an array: the values, or a CRC-32 of each row."""
    if not leaf.shape:
        return (np.asarray(leaf).item(),)
    rows = np.asarray(leaf[:_SHOWN_ROWS])
    if rows.ndim == 1:
        return tuple(rows.tolist())
    return tuple(zlib.crc32(row.tobytes()) for row in rows)


def distribute_dataset(
    dataset: Any, *, mesh: Mesh, options: InputOptions | None = None
) -> DistributedDataset:
    """Distributes a dataset of global batches: `Strategy.experimental_distribute_dataset`.

    Args:
        dataset: iterable of batches `[rows, ...]`, or of structures of them, of any library; a
            function without arguments that returns one; with `with_options` it has a policy.
        mesh: the replicas' devices, one axis "replica".
        options: how to feed.

    Returns:
        A dataset whose elements have the same structure, each leaf a `PerReplica` (with one
        replica a plain array). Every row is given once.

    Raises:
        TypeError: no iterable of batches.
        ValueError: the dataset is distributed already.
        NotImplementedError: PER_REPLICA, which needs `distribute_from_function`.
    """
    options = InputOptions() if options is None else options
    check_input_options(options, from_function=False)
    if isinstance(dataset, DistributedDataset):
        raise ValueError(
            "Expected a dataset that is not distributed yet. Got a DistributedDataset. Iterate it "
            "as it is, or distribute the dataset that it was made from."
        )
    placement = Placement(mesh, to_device=options.experimental_fetch_to_device)
    return DistributedDataset(SplitFeed(adapt(dataset), placement))
