"""Cuts rows into batches: arrays in memory, or a source that gives any row by its number."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from stratagem.data.adapt import SelfDescribed, Source
from stratagem.data.batch import Element, check_structure, read_element
from stratagem.data.owned import owned_array
from stratagem.data.spec import TensorSpec, spec_of
from stratagem.data.workers import fingerprint

_ENDLESS = sys.maxsize  # the length of a Grain dataset that repeats for ever


class Rows:
    """A global batch whose rows are read when asked for, so that each worker reads its own.

    Args:
        count: rows of the batch.
        read: gives the rows of a slice of it.
        identify: what tells the batch from others, without reading rows of other workers.
    """

    def __init__(self, count: int, read: Callable[[slice], Element], identify: Callable[[], str]):
        self.count = count
        self.read = read
        self.identify = identify


class _Store(Protocol):
    """Where rows are."""

    kind: str
    rows: int

    def take(self, index: Any) -> Element:
        """The rows of a slice or an array of numbers, stacked."""

    def spec(self) -> Any:
        """Structure of `TensorSpec` of a batch, its rows unknown."""

    def identify(self, index: Any) -> str:
        """What tells these rows from others."""


class _Arrays:
    kind = "arrays in batches"

    def __init__(self, arrays: Any):
        leaves, treedef = jax.tree.flatten(arrays)
        self._treedef: Any = treedef
        self._leaves = [np.asarray(leaf) for leaf in leaves]
        shapes = [leaf.shape for leaf in self._leaves]
        if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                "Expected one or more arrays with the same number of rows. Got shapes "
                f"{shapes}. The first axis of each must count the rows."
            )
        self.rows = shapes[0][0]

    def take(self, index: Any) -> Element:
        return Element([leaf[index] for leaf in self._leaves], self._treedef)

    def spec(self) -> Any:
        return self._treedef.unflatten([spec_of(leaf, static_rows=False) for leaf in self._leaves])

    def identify(self, index: Any) -> str:
        return fingerprint(self.take(index).leaves)


class _Items:
    def __init__(self, items: Any):
        self.kind = f"a {type(items).__name__} in batches"
        self._items = items
        self.rows = len(items)
        self._first: Element | None = None

    def take(self, index: Any) -> Element:
        rows = [self._row(i) for i in _numbers(index)]
        if not rows:
            like = self._like()
            return Element([leaf[None][:0] for leaf in like.leaves], like.treedef)
        columns = zip(*(row.leaves for row in rows), strict=True)
        return Element([np.stack([np.asarray(x) for x in c]) for c in columns], rows[0].treedef)

    def _row(self, number: int) -> Element:
        row = self._items[number]
        if row is None:
            raise ValueError(
                f"Expected a row for every number below {self.rows}. Got None for row {number} of "
                f"{self.kind}, as a filter gives it. Filter before, so that the length counts what "
                "is left, or batch with the library (Grain: .to_iter_dataset().batch(n))."
            )
        read = read_element(row, number)
        element = Element([owned_array(leaf) for leaf in read.leaves], read.treedef)
        if self._first is None:
            self._first = element
        check_structure(self._first.treedef, element.treedef, number)
        return element

    def _like(self) -> Element:
        return self._row(0) if self._first is None else self._first

    def spec(self) -> Any:
        like = self._like()
        leaves = [TensorSpec((None, *leaf.shape), leaf.dtype) for leaf in like.leaves]
        return like.treedef.unflatten(leaves)

    def identify(self, index: Any) -> str:
        numbers = _numbers(index)
        digest = zlib.crc32(repr(numbers).encode())
        return f"rows {numbers[:5]} and on, of {self.rows} (CRC {digest})"


def _numbers(index: Any) -> list[int]:
    return list(range(index.start, index.stop)) if isinstance(index, slice) else index.tolist()


class RowBatches(SelfDescribed):
    """Rows in batches. Made by `batches`; iterate it repeatedly."""

    def __init__(
        self, source: Any, batch_size: int, *, drop_remainder: bool, shuffle_seed: int | None
    ):
        self._store: _Store = _Items(source) if _is_items(source) else _Arrays(source)
        if batch_size < 1:
            raise ValueError(
                f"Expected a batch_size of at least 1. Got batch_size={batch_size}. It counts the "
                "rows of a global batch, of all replicas together."
            )
        if self._store.rows == _ENDLESS and shuffle_seed is not None:
            raise ValueError(
                "Expected a source with an end, to shuffle its rows. Got one that repeats for "
                f"ever, with shuffle_seed={shuffle_seed}. Leave out repeat(), or shuffle in Grain: "
                "dataset.shuffle(seed).repeat()."
            )
        self.drop_remainder = drop_remainder
        self.batch_size = batch_size
        self.passes = 0  # begun so far
        self._seed = shuffle_seed

    @property
    def in_memory(self) -> bool:
        """Whether the rows are arrays of this process."""
        return isinstance(self._store, _Arrays)

    @property
    def rows(self) -> int:
        """Of one pass, those that are left out too."""
        return self._store.rows

    @property
    def spec(self) -> Any:
        """Structure of `TensorSpec` of a batch."""
        rows = self.batch_size if self.drop_remainder else None
        return jax.tree.map(
            lambda leaf: TensorSpec((rows, *leaf.shape[1:]), leaf.dtype), self._store.spec()
        )

    def __len__(self) -> int:
        """Batches of one pass."""
        whole, rest = divmod(self._store.rows, self.batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self, _whole)

    def as_source(self) -> Source:
        """How it is distributed."""
        endless = self._store.rows == _ENDLESS
        return Source(
            self._store.kind,
            lambda: iter(self),
            open_rows=lambda: _Pass(self, lambda rows: rows),
            cardinality=math.inf if endless else len(self),
            get_spec=lambda: self.spec,
            static_rows=self.drop_remainder,
        )

    def order(self, number: int) -> np.ndarray | None:
        """The numbers of the rows in the order of a pass; None for the order that they have."""
        if self._seed is None:
            return None
        return np.random.default_rng((self._seed, number)).permutation(self._store.rows)

    def batch(self, step: int, order: np.ndarray | None) -> Rows:
        """Batch `step` of a pass over the rows in an order."""
        start = step * self.batch_size
        count = min(self.batch_size, self._store.rows - start)

        def index(part: slice) -> Any:
            found = slice(start + part.start, start + part.stop)
            return found if order is None else order[found]

        return Rows(
            count,
            lambda part: self._store.take(index(part)),
            lambda: self._store.identify(index(slice(0, count))),
        )


def _whole(rows: Rows) -> Any:
    leaves, treedef = rows.read(slice(0, rows.count))
    return treedef.unflatten(leaves)


class _Pass(Iterator[Any]):
    """One pass, which can begin anywhere: with `get_state` and `set_state` as Grain's iterators."""

    def __init__(self, batches: RowBatches, convert: Callable[[Rows], Any]):
        self._batches = batches
        self._convert = convert
        self._begin(batches.passes, 0)

    def _begin(self, number: int, step: int) -> None:
        self._number, self._step = number, step
        self._batches.passes = number + 1
        self._order = self._batches.order(number)

    def __next__(self) -> Any:
        if self._step >= len(self._batches):
            raise StopIteration
        rows = self._batches.batch(self._step, self._order)
        self._step += 1
        return self._convert(rows)

    def get_state(self) -> dict[str, int]:
        """The pass, and the batches of it that were given."""
        return {"pass": self._number, "step": self._step}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on from a state; later passes follow on its pass."""
        self._begin(state["pass"], state["step"])


def _is_items(source: Any) -> bool:
    """Whether it gives rows by number, and is no array or structure of arrays."""
    if not jax.tree_util.all_leaves([source]) or isinstance(source, (str, bytes)):
        return False
    return (
        hasattr(source, "__getitem__")
        and hasattr(source, "__len__")
        and not hasattr(source, "__array__")
    )


def batches(
    source: Any,
    batch_size: int,
    *,
    drop_remainder: bool = False,
    shuffle_seed: int | None = None,
) -> RowBatches:
    """What `tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)` gives, without TF.

    Distributed, each worker reads only the rows of its own replicas. So give a Grain MapDataset
    here unbatched, with its maps and shuffles; one that Grain batches is read by every worker in
    full, as nothing public says which rows a batch is made of.

    Args:
        source: array or structure of arrays `[rows, ...]`, all with the same number of rows; or an
            object with `len(source)` and `source[i]`, which gives row i as a structure of arrays
            without the row axis: a Grain MapDataset or data source, a torch map-style Dataset.
        batch_size: rows of a global batch, of all replicas together.
        drop_remainder: leave out a last batch with fewer rows.
        shuffle_seed: shuffle, in another order on each pass; the same seed gives the same orders.

    Returns:
        An iterable of batches with the structure of `source`; `len` counts the batches.

    Raises:
        ValueError: no arrays, row counts that differ, a batch size below 1, or a shuffle of what
            has no end.
    """
    return RowBatches(source, batch_size, drop_remainder=drop_remainder, shuffle_seed=shuffle_seed)
