"""tf.data.Dataset on Grain: each method adds a Grain transformation, Grain does the work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from stratagem.compat import random, streams
from stratagem.compat.recipe import Count, Pass, Recipe
from stratagem.compat.streams import Stream, grain
from stratagem.compat.tensors import as_dtype, stacked
from stratagem.data.owned import owned

_CYCLE = 10  # datasets that interleave opens at a time unless told
_AHEAD = 2  # elements that prefetch(AUTOTUNE) holds ready


class Dataset(Recipe):
    """Elements that a program reads in order, as often as it likes (tf.data.Dataset).

    `fit` and the strategies take it as it is. A loop over it sees tensors, map functions see NumPy
    arrays and may return any tensors. Arguments named `name`, `num_parallel_calls` and
    `deterministic` are accepted: map functions run one after the other, in order.
    """

    # Sources.

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """One element for each row of a structure of arrays `[rows, ...]`.

        Raises:
            ValueError: arrays without rows, or with different numbers of them.
        """
        del name
        streams.require_grain()
        arrays = _arrays(tensors)
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(arrays)]
        if not shapes or not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                f"Expected arrays with the same number of rows. Got shapes {shapes}. The first "
                "axis of each counts the rows; use from_tensors for one element."
            )
        rows = streams.Rows(arrays)
        return Dataset(lambda _: grain.MapDataset.source(rows), len(rows))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """One element."""
        del name
        streams.require_grain()
        element = _arrays(tensors)
        return Dataset(lambda _: grain.MapDataset.source([element]), 1)

    @staticmethod
    def range(*args: int, output_type: Any = "int64", name: str | None = None) -> Dataset:
        """The numbers of Python's range."""
        del name
        streams.require_grain()
        dtype, count = as_dtype(output_type), len(range(*args))
        return Dataset(lambda _: grain.MapDataset.range(*args).map(dtype.type), count)

    @staticmethod
    def from_generator(
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Sequence[Any] = (),
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """What a generator function yields; each pass calls it again.

        Args:
            generator: called with `args`; yields elements.
            output_types: structure of dtypes, to convert the elements to.
            output_shapes: ignored: elements have the shapes that they have.
            args: for the generator.
            output_signature: structure of tf.TensorSpec, instead of output_types.
            name: ignored.

        Raises:
            TypeError: `generator` is not callable.
        """
        del output_shapes, name
        streams.require_grain()
        if not callable(generator):
            raise TypeError(
                "Expected a function that returns a generator. Got "
                f"{type(generator).__name__}. Pass the function, not what it returned."
            )
        specs = output_types if output_signature is None else output_signature
        dtypes = jax.tree.map(lambda spec: as_dtype(getattr(spec, "dtype", spec)), specs)
        start = lambda: (_typed(element, dtypes) for element in generator(*args))  # noqa: E731
        return Dataset(lambda _: Stream(start), None)

    @staticmethod
    def zip(*datasets: Any, name: str | None = None) -> Dataset:
        """Tuples of the elements of several datasets, until the shortest ends."""
        del name
        parts = datasets[0] if len(datasets) == 1 and isinstance(datasets[0], tuple) else datasets
        counts = [part._count for part in parts]
        count = None if None in counts else min(counts)

        def build(number: Pass) -> Any:
            found = [streams.streamed(part._build(number)) for part in parts]
            return grain.experimental.ZipIterDataset(found, strict=False)

        return Dataset(build, count)

    # Transformations.

    def map(
        self, map_func: Callable[..., Any], num_parallel_calls: Any = None,
        deterministic: bool | None = None, name: str | None = None,
    ) -> Dataset:  # fmt: skip
        """`map_func` of each element; a tuple becomes its arguments."""
        del num_parallel_calls, deterministic, name
        return self._then(lambda ds, _: ds.map(_spread(map_func)), self._count)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements for which `predicate` holds."""
        del name
        holds = _spread(predicate)
        return self._then(lambda ds, _: streams.streamed(ds).filter(lambda x: bool(holds(x))), None)

    def batch(
        self, batch_size: int, drop_remainder: bool = False, num_parallel_calls: Any = None,
        deterministic: bool | None = None, name: str | None = None,
    ) -> Dataset:  # fmt: skip
        """Consecutive elements as one, `[batch_size, ...]`; the last may have fewer."""
        del num_parallel_calls, deterministic, name
        size = int(batch_size)
        rounded = math.floor if drop_remainder else math.ceil
        return self._then(
            lambda ds, _: ds.batch(
                size, drop_remainder=drop_remainder, batch_fn=streams.stack_rows
            ),
            _each(self._count, lambda n: rounded(n / size)),
            _same_rows=drop_remainder,
        )

    def unbatch(self, name: str | None = None) -> Dataset:
        """The rows of each element as elements."""
        del name
        return self.interleave(Dataset.from_tensor_slices, cycle_length=1)

    def shuffle(
        self, buffer_size: int, seed: int | None = None,
        reshuffle_each_iteration: bool | None = None, name: str | None = None,
    ) -> Dataset:  # fmt: skip
        """The elements in another order, a new one in each pass and repetition unless told.

        A dataset that is finite and can be read at any place is shuffled as a whole; others within
        windows of `buffer_size` elements. Without a seed the order follows from
        tf.random.set_seed, so that it is the same in each run, and for all workers.
        """
        del name
        again = reshuffle_each_iteration is not False
        # Grain shuffles what it can reach; 32 bits for its numbers.
        whole = self._count is not None and self._count < 2**31
        words = [random.global_seed(), 0 if seed is None else 1 + int(seed)]

        def step(ds: Any, number: Pass) -> Any:
            drawn = np.random.SeedSequence([*words, *(number if again else ())]).generate_state(1)
            if whole and streams.is_indexed(ds):
                return ds.shuffle(int(drawn[0]))
            return grain.experimental.WindowShuffleIterDataset(
                streams.streamed(ds), window_size=int(buffer_size), seed=int(drawn[0] >> 1)
            )

        return self._then(step, self._count, _same_order=self._same_order or not again)

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """The elements `count` times over, for ever unless told."""
        del name
        times = math.inf if count is None or count < 0 else int(count)
        if times == 0 or self._count == 0:
            return self.take(0)
        if self._count == math.inf:
            return self
        total = math.inf if times == math.inf else _each(self._count, lambda n: n * times)

        def turns() -> Iterable[int]:
            return itertools.count() if times == math.inf else range(int(times))

        def build(number: Pass) -> Any:
            # Whether Grain can reach any element is known when it is built.
            ds = self._build((*number, 0))
            if streams.is_indexed(ds):
                anew = not self._same_order
                return ds.repeat(None if times == math.inf else times, reseed_each_epoch=anew)
            return streams.chained(lambda: (self._build((*number, i)) for i in turns()))

        return self._then(lambda ds, _: ds, total, _build=build)

    def take(self, count: int, name: str | None = None) -> Dataset:
        """The first `count` elements; all for -1."""
        del name
        if count < 0:
            return self._then(lambda ds, _: ds, self._count)

        def step(ds: Any, _: Pass) -> Any:
            if count == 0:
                return grain.MapDataset.source([])
            if streams.is_indexed(ds):
                return ds.slice(slice(0, count))
            return grain.experimental.LimitIterDataset(ds, count)

        endless = self._count == math.inf
        total = count if endless or count == 0 else _each(self._count, lambda n: min(n, count))
        return self._then(step, total)

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """All but the first `count` elements; none for -1."""
        del name
        if count < 0:
            return self.take(0)

        def step(ds: Any, _: Pass) -> Any:
            if streams.is_indexed(ds):
                return ds.slice(slice(count, None))
            return streams.numbered(ds, lambda i: i >= count)

        total = _each(self._count, lambda n: max(n - count, 0))
        return self._then(step, total)

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Every `num_shards`th element, from number `index` on.

        Raises:
            ValueError: an index that is not below num_shards.
        """
        del name
        if not 0 <= index < num_shards:
            raise ValueError(
                f"Expected an index from 0 to {num_shards - 1} for num_shards={num_shards}. Got "
                f"{index}. Pass this worker's number, and how many there are."
            )

        def step(ds: Any, _: Pass) -> Any:
            if streams.is_indexed(ds):
                return ds.slice(slice(index, None, num_shards))
            return streams.numbered(ds, lambda i: i % num_shards == index)

        total = _each(self._count, lambda n: -(-(n - index) // num_shards))
        return self._then(step, total)

    def interleave(
        self, map_func: Callable[..., Any], cycle_length: int | None = None, block_length: int = 1,
        num_parallel_calls: Any = None, deterministic: bool | None = None, name: str | None = None,
    ) -> Dataset:  # fmt: skip
        """The elements of the datasets that `map_func` makes, in turns.

        Args:
            map_func: takes an element, returns a Dataset.
            cycle_length: datasets that are open at a time, 10 unless told.
            block_length: elements that one gives in its turn.
            num_parallel_calls: accepted.
            deterministic: accepted.
            name: ignored.
        """
        del num_parallel_calls, deterministic, name
        make = _spread(map_func)
        cycle = _CYCLE if cycle_length is None or cycle_length < 0 else cycle_length

        def step(ds: Any, number: Pass) -> Any:
            def datasets() -> Iterator[Any]:
                for index, element in enumerate(streams.streamed(ds)):
                    yield make(element)._build((*number, index))

            return streams.interleaved(datasets, cycle, block_length)

        return self._then(step, None, _same_rows=None)

    def flat_map(self, map_func: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements of the datasets that `map_func` makes, one dataset after the other."""
        return self.interleave(map_func, cycle_length=1, name=name)

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """The elements of this dataset, then those of another."""
        del name
        counts = (self._count, dataset._count)
        total = None if None in counts else counts[0] + counts[1]  # type: ignore[operator]

        def step(ds: Any, number: Pass) -> Any:
            return streams.chained(lambda: (ds, dataset._build(number)))

        return self._then(step, total)

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pairs of a number and an element."""
        del name
        return self._then(
            lambda ds, _: ds.map_with_index(lambda i, x: (np.int64(i + start), x)), self._count
        )

    def cache(self, filename: str = "", name: str | None = None) -> Dataset:
        """Keeps the elements of the first pass in memory, for the passes that follow.

        Raises:
            ValueError: a file to keep them in.
        """
        del name
        if filename:
            raise ValueError(
                f"Expected cache() in memory. Got the file {filename!r}. Leave it out, or write "
                "the elements to ArrayRecord files and read them with Grain."
            )
        kept: list[Any] = []

        def step(ds: Any, _: Pass) -> Any:
            if not kept:
                kept.append(list(streams.streamed(ds)))
            return grain.MapDataset.source(kept[0])

        return self._then(step, self._count)

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """Makes elements ahead of their use, in a thread; AUTOTUNE makes 2."""
        del name
        ahead = _AHEAD if buffer_size is None or buffer_size < 0 else int(buffer_size)
        return self._then(lambda ds, _: ds, self._count, _ahead=ahead)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """What a function makes of the dataset."""
        return transformation_func(self)


def _each(count: Count, change: Callable[[int], Count]) -> Count:
    """What a transformation makes of a count; what is unknown or without end stays so."""
    return count if count is None or math.isinf(count) else change(int(count))


def _spread(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    """`fn` of one element: a tuple becomes its arguments; lists of its result become tensors."""
    return lambda x: _arrays(fn(*x) if isinstance(x, tuple) else fn(x))


def _arrays(value: Any) -> Any:
    """A structure of tuples and dicts of arrays: a list is a tensor, as in TensorFlow."""
    if isinstance(value, dict):
        return type(value)((key, _arrays(item)) for key, item in value.items())
    if isinstance(value, tuple):
        items = [_arrays(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, (list, bool, int, float)):
        return stacked(value)
    return value if isinstance(value, (jax.Array, Dataset)) else np.asarray(value)


def _typed(element: Any, dtypes: Any) -> Any:
    """A copy of an element of a generator, in the dtypes that were declared, if any were."""
    if dtypes is None:
        return owned(_arrays(element))
    return jax.tree.map(
        lambda dtype, value: np.array(value, dtype),
        dtypes,
        element,
        is_leaf=lambda x: isinstance(x, np.dtype),
    )
