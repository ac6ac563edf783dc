"""Values that differ (PerReplica) or agree (Mirrored) between replicas, and how they reduce."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.errors import StrategyMismatchError


class ReduceOp(enum.Enum):
    """How the values of the replicas combine into one."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def from_value(cls, value: ReduceOp | str) -> ReduceOp:
        """Returns the member for a member or its name in any case, as TF accepts both."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(
            f"Expected a reduce_op of ReduceOp.SUM, ReduceOp.MEAN, 'SUM' or 'MEAN'. "
            f"Got {value!r}. For other reductions, gather the values and reduce the result."
        )


class DistributedValues:
    """One value a replica. `values[i]` is replica i's, `len(values)` the number of replicas."""

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[Any]):
        if not values:
            raise ValueError(
                "Expected one value a replica, for at least one replica. Got none. Pass a list "
                "with the value of each replica."
            )
        self._values: Any = tuple(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """Each replica's value, in replica order."""
        return self._values

    @property
    def num_replicas(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        parts = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{parts}\n}}"


class PerReplica(DistributedValues):
    """A value that may differ, also in shape, between replicas.

    It holds either the `values` of the replicas or, without a copy, one array `stacked` of
    shape `[replicas, ...]` whose first axis is laid out over the replicas' devices; each form is
    made from the other when it is asked for.

    In a job of several processes `values` are those of this process's replicas. The others' are
    known by their `shapes` alone, where everyone knows them.
    """

    __slots__ = ("_shapes", "_stacked", "dealt")

    def __init__(self, values: Sequence[Any], shapes: Sequence[tuple[int, ...]] | None = None):
        super().__init__(values)
        self._stacked: Any = None
        self.dealt: Any = None  # how to deal it to other replicas, where that is known
        self._shapes = None if shapes is None else tuple(shapes)

    @classmethod
    def from_stacked(cls, stacked: jax.Array) -> PerReplica:
        """Wraps an array of shape `[replicas, ...]`."""
        self = cls.__new__(cls)
        self._values = None
        self._stacked = stacked
        self._shapes = None
        self.dealt = None
        return self

    @property
    def stacked(self) -> jax.Array | None:
        """The array `[replicas, ...]` that this value was made from, if it was."""
        return self._stacked

    @property
    def values(self) -> tuple[Any, ...]:
        """Each replica's value, in replica order."""
        if self._values is None:
            self._values = unstack(self._stacked)  # one of the two forms is always there
        return self._values

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each replica's value, also of those of other processes."""
        if self._stacked is not None:
            return (self._stacked.shape[1:],) * self._stacked.shape[0]
        if self._shapes is None:
            return tuple(tuple(np.shape(value)) for value in self.values)
        return self._shapes

    @property
    def num_replicas(self) -> int:
        if self._stacked is not None:
            return self._stacked.shape[0]
        return len(self.values if self._shapes is None else self._shapes)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "Expected one tensor. Got a PerReplica value, which is one tensor for each replica. "
            "Inside strategy.run each replica sees its own part; outside, combine the parts with "
            "strategy.reduce or strategy.gather, or list them with "
            "strategy.experimental_local_results."
        )

    # Conversions would otherwise silently stack or drop parts, or fail without advice.
    __array__ = _refuse
    __jax_array__ = _refuse
    __float__ = _refuse
    __int__ = _refuse


class Mirrored(DistributedValues):
    """A value that is the same on every replica. It converts to a tensor of that value."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The common value."""
        return self.values[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def numpy(self) -> np.ndarray:
        """The common value as a NumPy array."""
        return np.asarray(self.value)


class IndexedSlices:
    """Rows of a tensor: `values[i]` belongs to row `indices[i]`; an index may repeat.

    Args:
        values: `[rows, ...]`.
        indices: `[rows]`, integers.
        dense_shape: shape of the tensor the rows belong to, or None when unknown.
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None):
        self.values = values
        self.indices = indices
        self.dense_shape = None if dense_shape is None else tuple(int(d) for d in dense_shape)

    def to_dense(self) -> jax.Array:
        """The tensor itself, `dense_shape`, rows with the same index added up."""
        if self.dense_shape is None:
            raise ValueError(
                "Expected IndexedSlices with a dense_shape. Got dense_shape=None. "
                "Pass dense_shape=(rows, ...) when you create them."
            )
        values = jnp.asarray(self.values)
        zeros = jnp.zeros(self.dense_shape, values.dtype)
        return zeros.at[jnp.asarray(self.indices)].add(values)

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, "
            f"dense_shape={self.dense_shape!r})"
        )


jax.tree_util.register_pytree_node(
    IndexedSlices,
    lambda s: ((s.values, s.indices), s.dense_shape),
    lambda shape, children: IndexedSlices(children[0], children[1], shape),
)


def unstack(stacked: jax.Array) -> tuple[jax.Array, ...]:
    """The parts of `[replicas, ...]` in this process, each left on the device that holds it."""
    parts: dict[int, jax.Array] = {}
    for shard in stacked.addressable_shards:
        rows = shard.index[0]
        start = rows.start or 0
        for offset in range(shard.data.shape[0]):
            parts.setdefault(start + offset, shard.data[offset])
    return tuple(parts[i] for i in sorted(parts))


def padded(parts: Sequence[Any], shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Parts as `[parts, *shape]`, with zeros behind those that are smaller."""
    stacked = np.zeros((len(parts), *shape), dtype)
    for i, part in enumerate(parts):
        window: tuple[Any, ...] = (i, *(slice(0, n) for n in part.shape))
        stacked[window] = part
    return stacked


def cut(value: Any, shape: tuple[int, ...]) -> Any:
    """A padded value in the shape that it had."""
    return value if value.shape == shape else value[tuple(slice(0, n) for n in shape)]


def as_array(leaf: Any, kept: bool = False) -> np.ndarray:
    """A leaf as the array that a program takes: JAX computes with 32 bits unless told otherwise.

    Args:
        leaf: an array or a number.
        kept: whether the array is to stay as it is when `leaf` changes.

    Raises:
        ValueError: integers that those do not hold.
    """
    array = np.asarray(leaf)
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(array.dtype))
    if dtype.kind in "iu":
        check_integers(array, dtype)
    return np.array(array, dtype, copy=True if kept and not isinstance(leaf, jax.Array) else None)


def check_integers(array: np.ndarray, dtype: Any) -> None:
    """Raises ValueError for integers that a dtype of integers does not hold."""
    if array.dtype.kind not in "iu" or np.can_cast(array.dtype, dtype) or not array.size:
        return
    low, high = array.min(), array.max()
    bounds = np.iinfo(dtype)
    if low < bounds.min or high > bounds.max:
        raise ValueError(
            f"Expected integers that {dtype} holds, since JAX computes with 32 bits. Got "
            f"{array.dtype} from {low} to {high}. Pass 64-bit ids as DynamicTable.halves(ids) "
            "to a DynamicTable, or hash them to a smaller range."
        )


def is_distributed(value: Any) -> bool:
    """True for PerReplica and Mirrored: the leaves that `run` takes apart."""
    return isinstance(value, DistributedValues)


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` that keeps distributed values whole."""
    return jax.tree.map(fn, tree, *rest, is_leaf=is_distributed)


def check_count(value: DistributedValues, strategy: Any) -> None:
    """Refuses a value that has not one part for each replica of a strategy.

    Raises:
        StrategyMismatchError: it has more or fewer.
    """
    if value.num_replicas not in (strategy.num_replicas_in_sync, len(strategy.local_replicas)):
        raise StrategyMismatchError(
            f"Expected a value with one part for each of the {strategy.num_replicas_in_sync} "
            f"replica(s) of {strategy!r}. Got {value.num_replicas} part(s). Use the strategy that "
            "the value was made with."
        )


def is_whole(value: Any) -> bool:
    """True for what counts as one value over the replicas: distributed values, IndexedSlices."""
    return isinstance(value, (DistributedValues, IndexedSlices))


def regroup(parts: Sequence[Any], is_leaf: Callable[[Any], bool] | None = is_whole) -> Any:
    """Joins one structure a replica, `[replicas]`, into one structure of PerReplica values.

    Args:
        parts: structures, by replica.
        is_leaf: what to keep whole in them.

    Raises:
        ValueError: the structures differ.
    """
    flat = [jax.tree.flatten(part, is_leaf=is_leaf) for part in parts]
    trees: list[Any] = [tree for _, tree in flat]
    if any(tree != trees[0] for tree in trees):
        raise ValueError(
            "Expected values of one structure on all replicas. Got "
            + ", ".join(f"replica {i}: {tree}" for i, tree in enumerate(trees))
            + ". Make every replica's value with the same keys and lengths."
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(trees[0], [PerReplica(column) for column in columns])


def open_parts(value: Any) -> Any:
    """A distributed value whose parts are structures, as a structure of distributed values."""
    if isinstance(value, Mirrored):
        return value.value
    return regroup(value.values, is_leaf=None)
