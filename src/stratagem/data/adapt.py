"""Makes any iterable of batches a `Source`, which says how often and how long it can be read."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from stratagem.data.policy import AutoShardPolicy, DatasetWithOptions
from stratagem.data.spec import TensorSpec

ACCEPTED = (
    "a list of batches, a generator or generator function, a keras.utils.PyDataset, a Grain "
    "MapDataset, IterDataset or DataLoader, a torch DataLoader, a tf.data.Dataset, or any other "
    "iterable of batches"
)


class Source:
    """A dataset of any library, seen as passes over its elements.

    Args:
        kind: what it is, for errors.
        open_pass: starts a pass over the elements.
        one_shot: whether only one pass is possible.
        cardinality: elements of a pass; `math.inf` when endless, None when unknown.
        policy: the shard policy that the dataset carries, if any.
        spec: structure of `TensorSpec` of the elements when the library declares it.
        static_rows: whether the library promises the same row count for all elements.
        get_spec: makes the spec, where that costs something.
        open_rows: starts a pass over `Rows` in place of elements, so that each worker reads its
            own rows only.
        peek: the first element, where a pass should not be begun for it.
    """

    def __init__(
        self,
        kind: str,
        open_pass: Callable[[], Iterator[Any]],
        *,
        one_shot: bool = False,
        cardinality: int | float | None = None,
        policy: AutoShardPolicy | None = None,
        spec: Any = None,
        static_rows: bool = False,
        get_spec: Callable[[], Any] | None = None,
        open_rows: Callable[[], Iterator[Any]] | None = None,
        peek: Callable[[], Any] | None = None,
    ):
        self.kind = kind
        self.cardinality = cardinality
        self.policy = policy
        self.open_rows = open_rows
        self._spec = spec
        self._get_spec = get_spec
        self._peek = peek
        self.static_rows = static_rows
        self._open_pass = open_pass
        self._one_shot = one_shot
        self._spent = False
        self._peeked: Iterator[Any] | None = None

    @property
    def spec(self) -> Any:
        """Structure of `TensorSpec` of the elements when it is known without reading them."""
        if self._spec is None and self._get_spec is not None:
            self._spec = self._get_spec()
        return self._spec

    def open(self) -> Iterator[Any]:
        """Starts a pass.

        Raises:
            RuntimeError: a second pass over something that can be read once.
        """
        if self._one_shot and self._spent:
            raise RuntimeError(
                f"Expected a dataset that can be iterated again. Got {self.kind}, which gives its "
                "elements once and was iterated before. Pass the generator function instead of "
                "the generator, or a list."
            )
        self._spent = True
        if self._peeked is not None:
            elements, self._peeked = self._peeked, None
            return elements
        return self._open_pass()

    def first(self) -> Any:
        """The first element, which a later pass still gives.

        Raises:
            RuntimeError: a one-shot source that was already iterated.
            ValueError: there is none.
        """
        if self._peek is not None:
            return self._peek()
        if not self._one_shot:
            elements = self._open_pass()
        else:
            elements = self.open()
        try:
            element = next(elements)
        except StopIteration:
            raise self.empty() from None
        if self._one_shot:
            self._peeked = itertools.chain([element], elements)
            self._spent = False
        return element

    def empty(self) -> ValueError:
        """The error for a dataset without elements."""
        hint = ", or one that was already used up" if self._one_shot else ""
        return ValueError(
            f"Expected at least one batch. Got an empty dataset ({self.kind}{hint}). Check the "
            "files and filters it reads from, and drop_remainder."
        )


class SelfDescribed:
    """A dataset of this package that makes its own Source: `as_source()`."""

    def as_source(self) -> Source:
        """How it is read."""
        raise NotImplementedError


def adapt(dataset: Any) -> Source:
    """Recognises a dataset. No library is imported for it that the caller has not imported.

    Args:
        dataset: what the caller passed.

    Raises:
        TypeError: it is not iterable, or it is one array or structure of arrays, which does not
            say what the batches are.
    """
    if isinstance(dataset, SelfDescribed):
        return dataset.as_source()
    if isinstance(dataset, DatasetWithOptions):
        source = adapt(dataset.dataset)
        source.policy = dataset.options.auto_shard_policy
        return source
    if hasattr(dataset, "__array__") or isinstance(dataset, (tuple, Mapping)):
        raise TypeError(
            f"Expected an iterable of batches. Got {_describe_arrays(dataset)}, which does not say "
            "what one batch is. Use stratagem.data.batches(arrays, batch_size=...), or put it in a "
            "list if it is one batch."
        )
    if isinstance(dataset, (str, bytes, type)):
        raise _unknown(dataset)
    if _is_a(dataset, "tensorflow", "data.Dataset"):
        return _from_tf_data(dataset)
    if _is_a(dataset, "keras", "utils.PyDataset"):
        return _from_py_dataset(dataset)
    kind = f"a {type(dataset).__name__}"
    if isinstance(dataset, Iterator):
        return Source(kind, lambda: iter(dataset), one_shot=True)
    if isinstance(dataset, Iterable):  # lists, Grain, torch and whatever else has __iter__
        return Source(kind, lambda: iter(dataset), cardinality=_length(dataset))
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return Source(
            kind,
            lambda: (dataset[i] for i in range(len(dataset))),
            cardinality=_length(dataset),
        )
    if callable(dataset):
        return Source(f"a function ({_name(dataset)})", lambda: _call(dataset))
    raise _unknown(dataset)


def _from_tf_data(dataset: Any) -> Source:
    def to_spec(spec: Any) -> TensorSpec:
        # Without a known rank the row axis is all that is known.
        shape = (None,) if spec.shape.rank is None else tuple(spec.shape.as_list())
        return TensorSpec(shape, jax.numpy.dtype(spec.dtype.as_numpy_dtype))

    spec = jax.tree.map(to_spec, dataset.element_spec)
    count = int(dataset.cardinality())
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return Source(
        "a tf.data.Dataset",
        dataset.as_numpy_iterator,
        cardinality={-1: math.inf, -2: None}.get(count, count),
        policy=AutoShardPolicy(int(policy)),
        spec=spec,
        static_rows=all(None not in leaf.shape for leaf in jax.tree.leaves(spec)),
    )


def _from_py_dataset(dataset: Any) -> Source:
    # Its workers and prefetching belong to Keras' fit; here batches are made one after the other.
    def one_pass() -> Iterator[Any]:
        dataset.on_epoch_begin()
        count = dataset.num_batches
        for index in itertools.count() if count is None else range(count):
            yield dataset[index]
        dataset.on_epoch_end()

    count = dataset.num_batches
    return Source("a PyDataset", one_pass, cardinality=math.inf if count is None else count)


def _is_a(value: Any, module: str, path: str) -> bool:
    """Whether `value` is of a library's class; false when nobody imported the library."""
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return isinstance(found, type) and isinstance(value, found)


def _length(dataset: Any) -> int | float | None:
    try:
        length = len(dataset)
    except TypeError:  # none, or (torch) a loader over a stream
        return None
    return math.inf if length == sys.maxsize else length  # Grain's repeat() without a count


def _call(function: Callable[[], Any]) -> Iterator[Any]:
    result = function()
    if not isinstance(result, Iterable):
        raise TypeError(
            f"Expected {_name(function)}() to return an iterable of batches. Got "
            f"{type(result).__name__}. Yield the batches, or return a list of them."
        )
    return iter(result)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _unknown(dataset: Any) -> TypeError:
    got = f"the class {dataset.__name__}" if inspect.isclass(dataset) else type(dataset).__name__
    return TypeError(f"Expected {ACCEPTED}. Got {got}. Pass an object of one of these kinds.")


def _describe_arrays(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {sorted(map(str, value))}"
    if isinstance(value, tuple):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"one array ({type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))})"
