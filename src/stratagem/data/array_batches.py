"""Cuts arrays that are in memory into batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from stratagem.data.spec import TensorSpec


class ArrayBatches:
    """The rows of a structure of arrays, in batches. Made by `batches`; iterate it repeatedly."""

    def __init__(
        self, arrays: Any, batch_size: int, *, drop_remainder: bool, shuffle_seed: int | None
    ):
        self._arrays = jax.tree.map(np.asarray, arrays)
        shapes = [leaf.shape for leaf in jax.tree.leaves(self._arrays)]
        if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                "Expected one or more arrays with the same number of rows. Got shapes "
                f"{shapes}. The first axis of each must count the rows."
            )
        if batch_size < 1:
            raise ValueError(
                f"Expected a batch_size of at least 1. Got batch_size={batch_size}. It counts the "
                "rows of a global batch, of all replicas together."
            )
        self.drop_remainder = drop_remainder
        self._rows = shapes[0][0]
        self._batch_size = batch_size
        self._seed = shuffle_seed
        self._passes = 0

    @property
    def spec(self) -> Any:
        """Structure of `TensorSpec` of a batch."""
        rows = self._batch_size if self.drop_remainder else None
        return jax.tree.map(
            lambda leaf: TensorSpec((rows, *leaf.shape[1:]), leaf.dtype), self._arrays
        )

    def __len__(self) -> int:
        """Batches of one pass."""
        whole, rest = divmod(self._rows, self._batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    def __iter__(self) -> Iterator[Any]:
        order: np.ndarray | None = None
        if self._seed is not None:
            order = np.random.default_rng((self._seed, self._passes)).permutation(self._rows)
        self._passes += 1
        return self._cut(order)

    def _cut(self, order: np.ndarray | None) -> Iterator[Any]:
        for index in range(len(self)):
            rows: Any = slice(index * self._batch_size, (index + 1) * self._batch_size)
            if order is not None:
                rows = order[rows]
            yield jax.tree.map(lambda leaf, rows=rows: leaf[rows], self._arrays)


def batches(
    arrays: Any,
    batch_size: int,
    *,
    drop_remainder: bool = False,
    shuffle_seed: int | None = None,
) -> ArrayBatches:
    """What `tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)` gives, without TF.

    For more (files, maps, mixtures, parallel reading) use Grain.

    Args:
        arrays: array or structure of arrays `[rows, ...]`, all with the same number of rows.
        batch_size: rows of a global batch, of all replicas together.
        drop_remainder: leave out a last batch with fewer rows.
        shuffle_seed: shuffle, in another order on each pass; the same seed gives the same orders.

    Returns:
        An iterable of batches with the structure of `arrays`; `len` counts the batches.

    Raises:
        ValueError: no arrays, row counts that differ, or a batch size below 1.
    """
    return ArrayBatches(
        arrays, batch_size, drop_remainder=drop_remainder, shuffle_seed=shuffle_seed
    )
