"""The rows of files, dealt to global batches in a way that no number of workers changes.

The files of a dataset form lanes, each read from its first file to its last. A lane belongs to one
worker. Before each batch everyone learns how many rows each lane has at hand, and fills the batch
from them by the same rule, so that all batches are full until the rows end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from stratagem.data.batch import Element
from stratagem.data.split import fill_batch

# Of this worker's lanes, what each has at hand; of all workers' lanes. See `gather` below.
Gather = Callable[[dict[int, int]], list[int]]


class Lane:
    """Rows of some files, one after the other.

    Args:
        chunks: `[rows, ...]` each, all of one structure.
        skip: rows to leave out at the start.
    """

    def __init__(self, chunks: Iterator[Element], skip: int = 0):
        self._chunks = chunks
        self._skip = skip
        self._at_hand: list[Element] = []
        self._rows = 0

    def look(self, rows: int) -> int:
        """How many rows are left, at most `rows`; reads as far as that takes."""
        while self._rows < rows:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            count = len(chunk.leaves[0])
            dropped = min(self._skip, count)
            self._skip -= dropped
            if dropped < count:
                self._at_hand.append(_cut(chunk, slice(dropped, count)))
                self._rows += count - dropped
        return min(rows, self._rows)

    def take(self, rows: int) -> list[Element]:
        """That many rows, which `look` has found, in the pieces they were read in."""
        taken = []
        self._rows -= rows
        while rows:
            chunk = self._at_hand[0]
            count = len(chunk.leaves[0])
            if count <= rows:
                taken.append(self._at_hand.pop(0))
            else:
                taken.append(_cut(chunk, slice(0, rows)))
                self._at_hand[0] = _cut(chunk, slice(rows, count))
            rows -= min(rows, count)
        return taken


def next_counts(
    batch_size: int, lanes: dict[int, Lane], gather: Gather, alive: Sequence[bool]
) -> tuple[list[int], list[bool]]:
    """How many rows each lane gives to the next batch. Every worker calls it.

    A lane first looks only as far as an even share asks for; further where that does not fill the
    batch.

    Args:
        batch_size: rows of a full batch.
        lanes: this worker's, by number.
        gather: tells all workers what this one's lanes have; returns what all lanes have, by
            number.
        alive: which lanes of all have not ended, as far as is known.

    Returns:
        The counts, all 0 at the end, and which lanes are still alive.
    """
    reach = -(-batch_size // max(1, sum(alive)))
    while True:
        found = gather({number: lane.look(reach) for number, lane in lanes.items()})
        if sum(found) >= batch_size or reach >= batch_size:
            return fill_batch(batch_size, found), [count > 0 for count in found]
        reach = min(batch_size, 2 * reach)


def joined(taken: Sequence[Element], like: Element | None) -> Element:
    """Pieces one after the other; `like` without rows when there are none."""
    if not taken:
        if like is None:
            raise ValueError("Expected pieces, or an element to know their structure from.")
        return _cut(like, slice(0, 0))
    if len(taken) == 1:
        return taken[0]
    columns: Any = zip(*(piece.leaves for piece in taken), strict=True)
    return Element([np.concatenate(column) for column in columns], taken[0].treedef)


def _cut(element: Element, part: slice) -> Element:
    return Element([leaf[part] for leaf in element.leaves], element.treedef)
