"""A dataset as a recipe, read through Grain: what Keras, the strategies and loops ask of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import _keras
from stratagem.compat import streams
from stratagem.compat.dataset_options import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Options
from stratagem.compat.namespace import refuse
from stratagem.compat.streams import grain
from stratagem.compat.tensors import TensorSpec
from stratagem.data import OptionalElement
from stratagem.data.adapt import SelfDescribed, Source
from stratagem.data.distributed_dataset import refuse_inside_program
from stratagem.errors import OutOfRangeError

Count = int | float | None  # elements of a pass; math.inf without end, None when unknown
Pass = tuple[int, ...]  # which pass it is, and which repetition within it


class _Methods(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        refuse(f"data.Dataset.{name}")


class Recipe(SelfDescribed, _keras.DataAdapter, metaclass=_Methods):
    """A dataset that each pass builds anew, with the number of the pass for its shuffles.

    Args:
        build: makes Grain's dataset for a pass.
        count: elements of a pass.
    """

    def __init__(self, build: Callable[[Pass], Any], count: Count):
        streams.require_grain()
        self._build = build
        self._count = count
        self._options = Options()
        self._ahead = 0  # elements that a thread makes before they are asked for
        self._same_rows: bool | None = None  # of batches; None where elements are no batches
        self._same_order = False  # whether repetitions keep the order
        self._passes = 0

    def _then(self, step: Callable[[Any, Pass], Any], count: Count, **changed: Any) -> Any:
        """This dataset with one more transformation."""
        made = copy.copy(self)
        made._build = lambda number: step(self._build(number), number)
        made._count = count
        made._passes = 0
        for name, value in changed.items():
            setattr(made, name, value)
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        refuse(f"data.Dataset.{name}")

    # What it says about itself.

    def options(self) -> Options:
        """The options it carries."""
        return self._options

    def with_options(self, options: Options, name: str | None = None) -> Any:
        """The dataset with options; those it had stay where these say nothing."""
        del name
        merged = self._options.merge(options)
        return self._then(lambda ds, _: ds, self._count, _options=merged)

    def cardinality(self) -> jax.Array:
        """Elements of a pass; tf.data.INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        if self._count is None:
            return jnp.int32(UNKNOWN_CARDINALITY)
        return jnp.int32(INFINITE_CARDINALITY if math.isinf(self._count) else self._count)

    def __len__(self) -> int:
        if self._count is None or math.isinf(self._count):
            what = "unknown" if self._count is None else "infinite"
            raise TypeError(
                f"Expected a dataset whose length is known. Got one of {what} length. Count with "
                "a loop, or use take(n)."
            )
        return int(self._count)

    def __bool__(self) -> bool:
        return True  # not by its length

    @property
    def element_spec(self) -> Any:
        """Structure of tf.TensorSpec, from the first element of a pass of its own.

        The first axis of a batch is None unless all batches have the same number of rows.
        """
        element = next(self._read((0,)), None)

        def spec(leaf: Any) -> TensorSpec:
            shape: tuple[Any, ...] = np.shape(leaf)
            if shape and self._same_rows is False:
                shape = (None, *shape[1:])
            return TensorSpec(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

        return jax.tree.map(spec, element)

    def as_source(self) -> Source:
        """What distributed datasets read."""
        return Source(
            "a tf.data.Dataset",
            self.as_numpy_iterator,
            cardinality=self._count,
            policy=self._options.experimental_distribute.auto_shard_policy,
            static_rows=self._same_rows is True,
        )

    # Reading.

    def _read(self, number: Pass) -> Iterator[Any]:
        dataset = streams.streamed(self._build(number))
        if self._ahead:
            dataset = grain.experimental.ThreadPrefetchIterDataset(
                dataset, prefetch_buffer_size=self._ahead
            )
        elements = iter(dataset)
        try:
            for element in elements:
                yield jax.tree.map(np.asarray, element)
        finally:
            elements.close()

    def as_numpy_iterator(self) -> Iterator[Any]:
        """A new pass, as NumPy arrays."""
        refuse_inside_program()
        self._passes += 1
        return self._read((self._passes,))

    def __iter__(self) -> Iterator[Any]:
        return DatasetIterator(self)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Folds the elements of a pass: `state = reduce_func(state, element)`."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    # What Keras asks of its input.

    def get_numpy_iterator(self) -> Iterator[Any]:
        """A new pass, for Keras."""
        return self.as_numpy_iterator()

    get_jax_iterator = get_numpy_iterator

    @property
    def num_batches(self) -> int | None:
        """Elements of a pass, for Keras; None when unknown or without end."""
        return None if self._count is None or math.isinf(self._count) else int(self._count)

    @property
    def batch_size(self) -> None:
        """Unknown: batches may differ."""
        return None

    has_partial_batch = batch_size
    partial_batch_size = batch_size


class DatasetIterator:
    """One pass over a dataset, as tensors. Made by `iter(dataset)`."""

    def __init__(self, dataset: Recipe):
        self._dataset = dataset
        self._elements = dataset.as_numpy_iterator()

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        refuse_inside_program()
        return jax.tree.map(_on_device, next(self._elements))

    def get_next(self) -> Any:
        """The next element.

        Raises:
            OutOfRangeError: the dataset has ended.
        """
        for element in self:
            return element
        raise OutOfRangeError(
            "Expected another element. Got the end of the dataset. Use a for loop, or "
            "get_next_as_optional()."
        )

    def get_next_as_optional(self) -> OptionalElement:
        """The next element or, past the end, an optional without value."""
        for element in self:
            return OptionalElement(element)
        return OptionalElement()

    @property
    def element_spec(self) -> Any:
        """The spec of the elements."""
        return self._dataset.element_spec


def _on_device(array: np.ndarray) -> Any:
    """A tensor; text stays with NumPy, since JAX has none."""
    return array if array.dtype.kind in "OSU" else jnp.asarray(array)
