"""Policy OFF with several workers: a worker's own batches, cut to what one replica takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stratagem.data.adapt import Source
from stratagem.data.batch import check_structure, read_batch
from stratagem.data.split import RebatchRule, row_slices, split_rows
from stratagem.data.workers import Workers


def pieces(source: Source, num_replicas: int, workers: Workers) -> Source:
    """A source of `num_replicas` pieces of each batch, whose sizes differ by at most one.

    A worker's replicas take the pieces in turn, so that a batch lasts as many steps as there are
    workers. The pattern of sizes is rotated by worker (`split.even_pattern`): in each step all
    workers together take as many rows as one batch has.

    Args:
        source: of this worker's batches, as for the whole job.
        num_replicas: of the job.
        workers: of the job.
    """

    def cut(batches: Iterator[Any]) -> Iterator[Any]:
        structure = None
        for index, batch in enumerate(batches):
            (leaves, treedef), rows = read_batch(batch, index)
            structure = treedef if structure is None else structure
            check_structure(structure, treedef, index)
            counts = split_rows(
                rows,
                num_replicas,
                RebatchRule.EVEN,
                num_workers=workers.count,
                worker=workers.index,
            )
            for part in row_slices(counts):
                yield treedef.unflatten([leaf[part] for leaf in leaves])

    count = source.cardinality
    return Source(
        f"{source.kind}, read by each worker in full",
        lambda: cut(source.open()),
        cardinality=count if count is None or math.isinf(count) else count * num_replicas,
        spec=source.spec,
        peek=source.first,
    )
