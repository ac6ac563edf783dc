"""Batches that a worker reads by their numbers, which a coordinator deals out."""

from __future__ import annotations

import logging
from typing import Any

import cloudpickle
import numpy as np

from stratagem.data.row_batches import RowBatches

_MOST_BYTES = 16 << 20  # of a source that is sent to each worker

_log = logging.getLogger("stratagem")


class NumberedBatches:
    """A `RowBatches` on a worker: its source reads rows there, so that no row travels.

    Args:
        batches: as the program made them.
    """

    def __init__(self, batches: RowBatches):
        self._batches = batches
        self._order: tuple[int, np.ndarray | None] | None = None

    def read(self, number: int, step: int, start: int, stop: int) -> Any:
        """Rows `start` to `stop` of batch `step` of pass `number`."""
        if self._order is None or self._order[0] != number:
            self._order = number, self._batches.order(number)
        rows = self._batches.batch(step, self._order[1])
        leaves, treedef = rows.read(slice(start, min(stop, rows.count)))
        return treedef.unflatten(leaves)


def pickled(batches: RowBatches) -> bytes | None:
    """What makes the batches readable on workers; None where only this process can read them.

    Arrays stay here: to send each worker all rows would be more than its share of them.
    """
    if batches.in_memory:
        return None
    try:
        data = cloudpickle.dumps(NumberedBatches(batches))
    except Exception as error:  # a source may hold anything
        _log.info("The coordinator reads the data: they cannot be sent to workers (%s).", error)
        return None
    if len(data) > _MOST_BYTES:
        _log.info(
            "The coordinator reads the data: to send their source to workers takes %.0f MB.",
            len(data) / 1e6,
        )
        return None
    return data
