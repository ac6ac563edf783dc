"""What Grain needs to read what tf.data reads: rows of arrays, generators, one after the other.

Grain is optional; `grain` is None where it is not installed, and `require_grain` says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

try:
    import grain
except ImportError:  # An extra of the package.
    grain = None


def require_grain() -> None:
    """Refuses tf.data where Grain is missing.

    Raises:
        ImportError: says how to install it.
    """
    if grain is None:
        raise ImportError(
            "Expected Grain, which tf.data.Dataset stands on. It is not installed. Run: pip "
            "install grain; or pass batches of another kind to the strategy, such as "
            "stratagem.data.batches(arrays, batch_size)."
        )


class Rows:
    """The rows of a structure of arrays, by number: a source for Grain."""

    def __init__(self, arrays: Any):
        self._arrays = arrays
        self._count = len(jax.tree.leaves(arrays)[0])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return jax.tree.map(lambda array: array[index], self._arrays)


class Stream(object if grain is None else grain.IterDataset):  # type: ignore[misc]
    """A Grain dataset of what a function's iterable gives; each pass calls the function."""

    def __init__(self, start: Callable[[], Iterable[Any]]):
        super().__init__()
        self._start = start

    def __iter__(self) -> Any:
        return _StreamIterator(self._start)


class _StreamIterator(object if grain is None else grain.DatasetIterator):  # type: ignore[misc]
    """One pass over a Stream. Its state is the number of elements that were read."""

    def __init__(self, start: Callable[[], Iterable[Any]]):
        super().__init__()
        self._start = start
        self._elements: Iterator[Any] = iter(start())
        self._read = 0

    def __next__(self) -> Any:
        element = next(self._elements)
        self._read += 1
        return element

    def get_state(self) -> dict[str, Any]:
        """The position, in elements."""
        return {"read": self._read}

    def set_state(self, state: dict[str, Any]) -> None:
        """Starts again and reads up to the position."""
        self._elements = iter(self._start())
        self._read = state["read"]
        for _ in itertools.islice(self._elements, self._read):
            pass


def is_indexed(dataset: Any) -> bool:
    """Whether Grain can reach any element of it directly."""
    return isinstance(dataset, grain.MapDataset)


def streamed(dataset: Any) -> Any:
    """The dataset as one that is read in order, in this thread."""
    if not is_indexed(dataset):
        return dataset
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def chained(datasets: Callable[[], Iterable[Any]]) -> Any:
    """The elements of datasets, one dataset after the other; each is made when its turn comes."""
    return Stream(lambda: (element for dataset in datasets() for element in streamed(dataset)))


def interleaved(datasets: Callable[[], Iterable[Any]], cycle_length: int, block_length: int) -> Any:
    """Elements of datasets in turns, in the order of tf.data's interleave.

    Grain's own interleave has no blocks, and reads each open dataset in a thread of its own.

    Args:
        datasets: gives the datasets, from the first one, at each pass.
        cycle_length: how many are open at a time.
        block_length: elements that one gives in its turn.
    """

    def turns() -> Iterator[Any]:
        waiting = iter(datasets())
        open_: list[Iterator[Any] | None] = [None] * cycle_length
        empty = 0  # places in a row that nothing was left to fill
        for place in itertools.cycle(range(cycle_length)):
            if open_[place] is None:
                found = next(waiting, None)
                open_[place] = None if found is None else iter(streamed(found))
            elements = open_[place]
            if elements is None:
                empty += 1
                if empty == cycle_length:
                    return
                continue
            empty = 0
            block = list(itertools.islice(elements, block_length))
            yield from block
            if len(block) < block_length:
                open_[place] = None

    return Stream(turns)


def numbered(dataset: Any, keep: Callable[[int], bool]) -> Any:
    """The elements of a stream whose number is to be kept."""
    pairs = dataset.map_with_index(lambda i, element: (i, element))
    return pairs.filter(lambda pair: keep(pair[0])).map(lambda pair: pair[1])


def stack_rows(elements: Sequence[Any]) -> Any:
    """Elements of one structure as one batch of NumPy arrays `[rows, ...]`.

    Raises:
        ValueError: elements of different structures or shapes.
    """
    try:
        return jax.tree.map(lambda *rows: np.stack([np.asarray(r) for r in rows]), *elements)
    except ValueError as error:
        shapes = [jax.tree.map(np.shape, element) for element in elements]
        raise ValueError(
            f"Expected elements of one structure and shape to batch. Got {shapes}. Make them "
            "equal in a map before batch."
        ) from error
