"""`strategy.reduce` and `strategy.gather`, outside a program and inside a traced one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem import context
from stratagem.errors import UnevenShapesError
from stratagem.step.primitives import divide
from stratagem.step.replica import all_gather, all_reduce
from stratagem.step.trace import LocalValue
from stratagem.values import IndexedSlices, Mirrored, PerReplica, ReduceOp, as_array, check_count
from stratagem.variables import has_components

Axis = int | Sequence[int] | None


def reduce_leaf(strategy: Any, op: ReduceOp, value: Any, axis: Axis) -> Any:
    """Reduces one value over the replicas, and over `axis` of each part when it is given."""
    if isinstance(value, keras.Variable):
        value = variable_value(strategy, value)
    if isinstance(value, IndexedSlices):
        value = _dense_slices(value)
    if isinstance(value, LocalValue):
        return _reduce_traced(op, value.local, axis)
    if isinstance(value, PerReplica):
        check_count(value, strategy)
        return _reduce_parts(strategy, op, value, axis)
    if isinstance(value, Mirrored):
        return _reduce_same(strategy, op, value.value, axis, "Mirrored value")
    if (workers := strategy.worker_parts(value)) is not None:
        return _reduce_list(op, workers.values, axis)
    return _reduce_same(strategy, op, value, axis, f"{type(value).__name__}")


def variable_value(strategy: Any, variable: Any) -> Any:
    """A variable as a distributed value: its components, or its value on each replica."""
    if has_components(variable) and strategy.num_replicas_in_sync > 1:
        return PerReplica.from_stacked(variable.components)
    return Mirrored((variable.value,) * strategy.num_replicas_in_sync)


def _reduce_same(strategy: Any, op: ReduceOp, value: Any, axis: Axis, what: str) -> Any:
    """A value that all replicas share: as if each of them held it."""
    replicas = strategy.num_replicas_in_sync
    if axis is not None:
        array = jnp.asarray(value)
        _check_numbers(array.dtype)
        axes = _axes(array.ndim, axis)
        total = _sum(array, op, axes)
        if op is ReduceOp.SUM:
            return total * jnp.asarray(replicas, total.dtype)
        return divide(total, _count(array.shape, axes)).astype(_mean_dtype(array.dtype))
    if op is ReduceOp.MEAN or replicas == 1 or _is_zero(value):
        return value
    raise ValueError(
        f"Expected a PerReplica value to sum over {replicas} replicas. Got a {what}, which is the "
        "same on all of them. Return the value from strategy.run, use ReduceOp.MEAN, or multiply "
        "it by num_replicas_in_sync if that is what you mean."
    )


def _is_zero(value: Any) -> bool:
    return isinstance(value, (np.ndarray, int, float)) and not np.any(value)


def _reduce_traced(op: ReduceOp, local: Any, axis: Axis) -> Any:
    frame = context.current()
    _check_numbers(local.dtype)
    if axis is None:
        (total,) = all_reduce([local], op, frame)
        return total
    axes = _axes(local.ndim, axis)
    (total,) = all_reduce([_sum(local, op, axes)], ReduceOp.SUM, frame)
    if op is ReduceOp.SUM:
        return total
    count = sum(frame.trace.exchange(_count(local.shape, axes)))
    return divide(total, count).astype(_mean_dtype(local.dtype))


def _reduce_parts(strategy: Any, op: ReduceOp, value: PerReplica, axis: Axis) -> Any:
    if value.stacked is None:
        return _reduce_list(op, strategy.all_parts(value), axis)
    _check_numbers(value.stacked.dtype)
    ndim = value.stacked.ndim - 1
    axes = None if axis is None else tuple(a + 1 for a in _axes(ndim, axis))
    if strategy.spans:
        reduce = _reduce_spanning(strategy.home, op is ReduceOp.MEAN, axes)
        return strategy.local_view(strategy.execute(reduce, value.stacked))
    return _reduce_stacked(value.stacked, op is ReduceOp.MEAN, axes)


def _reduce_list(op: ReduceOp, values: Sequence[Any], axis: Axis) -> Any:
    """Of one value a replica, all at hand."""
    parts = [dense(p) for p in values]
    _check_numbers(*(p.dtype for p in parts))
    if axis is None:
        _check_alike(parts)
        return _reduce_stacked(np.stack(parts), op is ReduceOp.MEAN, None)
    sums, count = [], 0
    for part in parts:
        axes = _axes(part.ndim, axis)
        sums.append(_sum(jnp.asarray(part), op, axes))
        count += _count(part.shape, axes)
    _check_alike(sums)
    total = _sum(jnp.stack(sums), op, (0,))
    return total if op is ReduceOp.SUM else divide(total, count).astype(_mean_dtype(parts[0].dtype))


def dense(part: Any) -> np.ndarray:
    """A part on the host, in the dtype that JAX keeps; IndexedSlices as the tensor they are of."""
    return as_array(part.to_dense() if isinstance(part, IndexedSlices) else part)


def _dense_slices(slices: IndexedSlices) -> Any:
    """One tensor for IndexedSlices; inside a program their fields are values of this replica."""
    fields = (slices.values, slices.indices)
    local = [f.local if isinstance(f, LocalValue) else f for f in fields]
    dense = IndexedSlices(local[0], local[1], slices.dense_shape).to_dense()
    return LocalValue(dense) if any(isinstance(f, LocalValue) for f in fields) else dense


def _sum_or_mean(stacked: Any, mean: bool, axes: Any) -> Any:
    """Sum or mean of `[replicas, ...]` over replicas and further axes."""
    over = (0, *(axes or ()))
    if not mean:
        return _sum(stacked, ReduceOp.SUM, over)
    total = _sum(stacked, ReduceOp.MEAN, over)
    return divide(total, _count(stacked.shape, over)).astype(_mean_dtype(stacked.dtype))


_reduce_stacked = jax.jit(_sum_or_mean, static_argnums=(1, 2))


@functools.lru_cache
def _reduce_spanning(home: Any, mean: bool, axes: Any) -> Any:
    """The same over several processes, of which each gets the result."""
    return jax.jit(lambda stacked: _sum_or_mean(stacked, mean, axes), out_shardings=home)


def _sum(array: Any, op: ReduceOp, axes: tuple[int, ...]) -> jax.Array:
    """Sums in the array's dtype; on the way to a mean at least in float32.

    Half-precision sums, and the count they are divided by, overflow long before the mean does.
    """
    dtype = array.dtype
    if op is ReduceOp.MEAN and jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.promote_types(dtype, jnp.float32)
    return jnp.sum(array, axis=axes, dtype=dtype)


def _mean_dtype(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype("float32")


def _check_numbers(*dtypes: Any) -> None:
    if any(dtype == jnp.bool_ for dtype in dtypes):
        raise TypeError(
            "Expected tensors of numbers to reduce. Got dtype bool. Cast to int32 to count, or to "
            "float32 for a share."
        )


def _axes(ndim: int, axis: int | Sequence[int]) -> tuple[int, ...]:
    axes = tuple(map(operator.index, axis if isinstance(axis, (list, tuple)) else (axis,)))
    if any(not -ndim <= a < ndim for a in axes):
        raise ValueError(
            f"Expected axis between {-ndim} and {ndim - 1} for parts of rank {ndim}. Got "
            f"axis={axis}. Pass axis=None to reduce over replicas alone."
        )
    return tuple(a % ndim for a in axes)


def _count(shape: Sequence[int], axes: Sequence[int]) -> int:
    count = 1
    for a in axes:
        count *= shape[a]
    return count


def _check_alike(parts: Sequence[Any]) -> None:
    if len({(p.shape, p.dtype) for p in parts}) > 1:
        raise UnevenShapesError(
            "Expected parts of the same shape and dtype on all replicas. Got "
            + ", ".join(f"replica {i}: {p.shape} {p.dtype}" for i, p in enumerate(parts))
            + ". Pass the axis along which they differ (axis=0 for rows), or gather them."
        )


def gather_leaf(strategy: Any, value: Any, axis: int) -> Any:
    """Concatenates one value's parts along `axis`, in replica order."""
    if isinstance(value, keras.Variable):
        value = variable_value(strategy, value)
    if isinstance(value, LocalValue):
        return all_gather(value.local, axis, context.current())
    if isinstance(value, Mirrored):
        value = PerReplica(value.values)
    parts = value.values if isinstance(value, PerReplica) else (value,)
    if any(isinstance(p, IndexedSlices) for p in parts):
        raise NotImplementedError(
            "Expected dense tensors to gather. Got IndexedSlices. Call to_dense() first, or use "
            "all_reduce, which joins their rows."
        )
    if not isinstance(value, PerReplica):
        return value
    check_count(value, strategy)
    arrays = [np.asarray(p) for p in strategy.all_parts(value)]
    for i, array in enumerate(arrays):
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"Expected tensors with an axis {axis} to gather along. Got shape {array.shape} "
                f"on replica {i}. Return at least a vector, for example value[None]."
            )
    rest = {np.delete(a.shape, axis % a.ndim).tobytes() for a in arrays}
    if len(rest) > 1 or len({a.ndim for a in arrays}) > 1:
        raise UnevenShapesError(
            f"Expected parts that agree in all axes but axis {axis}. Got shapes "
            + ", ".join(f"replica {i}: {a.shape}" for i, a in enumerate(arrays))
            + "."
        )
    return jnp.concatenate([jnp.asarray(a) for a in arrays], axis=axis)
