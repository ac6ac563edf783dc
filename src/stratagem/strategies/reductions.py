"""`strategy.reduce` and `strategy.gather`, outside a program and inside a traced one."""

from __future__ import annotations

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
from stratagem.values import IndexedSlices, Mirrored, PerReplica, ReduceOp
from stratagem.variables import is_on_read

Axis = int | Sequence[int] | None


def reduce_leaf(strategy: Any, op: ReduceOp, value: Any, axis: Axis) -> Any:
    """Reduces one value over the replicas, and over `axis` of each part when it is given."""
    if isinstance(value, keras.Variable):
        value = _variable_value(strategy, value)
    if isinstance(value, LocalValue):
        return _reduce_traced(op, value.local, axis)
    if isinstance(value, PerReplica):
        return _reduce_parts(op, value, axis)
    if isinstance(value, Mirrored):
        return _reduce_same(strategy, op, value.value, axis, "Mirrored value")
    return _reduce_same(strategy, op, value, axis, f"{type(value).__name__}")


def _variable_value(strategy: Any, variable: Any) -> Any:
    if is_on_read(variable) and strategy.num_replicas_in_sync > 1:
        return PerReplica.from_stacked(variable.components)
    return Mirrored((variable.value,) * strategy.num_replicas_in_sync)


def _reduce_same(strategy: Any, op: ReduceOp, value: Any, axis: Axis, what: str) -> Any:
    """A value that all replicas share: as if each of them held it."""
    replicas = strategy.num_replicas_in_sync
    if axis is not None:
        array = jnp.asarray(value)
        axes = _axes(array.ndim, axis)
        total = jnp.sum(array, axis=axes)
        if op is ReduceOp.SUM:
            return total * jnp.asarray(replicas, total.dtype)
        return divide(total, _count(array.shape, axes))
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
    if axis is None:
        (total,) = all_reduce([local], op, frame)
        return total
    axes = _axes(local.ndim, axis)
    (total,) = all_reduce([jnp.sum(local, axis=axes)], ReduceOp.SUM, frame)
    if op is ReduceOp.SUM:
        return total
    return divide(total, sum(frame.trace.exchange(_count(local.shape, axes))))


def _reduce_parts(op: ReduceOp, value: PerReplica, axis: Axis) -> Any:
    if value.stacked is not None:
        ndim = value.stacked.ndim - 1
        axes = None if axis is None else tuple(a + 1 for a in _axes(ndim, axis))
        return _reduce_stacked(value.stacked, op is ReduceOp.MEAN, axes)
    parts = [_dense(p) for p in value.values]
    if axis is None:
        _check_same_shapes(parts)
        return _reduce_stacked(np.stack(parts), op is ReduceOp.MEAN, None)
    sums, count = [], 0
    for part in parts:
        axes = _axes(part.ndim, axis)
        sums.append(part.sum(axis=axes, dtype=part.dtype))
        count += _count(part.shape, axes)
    _check_same_shapes(sums)
    total = jnp.sum(jnp.stack([jnp.asarray(s) for s in sums]), axis=0, dtype=sums[0].dtype)
    return total if op is ReduceOp.SUM else divide(total, count)


def _dense(part: Any) -> np.ndarray:
    array = np.asarray(part.to_dense() if isinstance(part, IndexedSlices) else part)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


@jax.jit(static_argnums=(1, 2))
def _reduce_stacked(stacked: Any, mean: bool, axes: Any) -> Any:
    """Sum or mean of `[replicas, ...]` over replicas and further axes."""
    over = (0, *(axes or ()))
    total = jnp.sum(stacked, axis=over, dtype=stacked.dtype)
    if not mean:
        return total
    return divide(total, _count(stacked.shape, over))


def _axes(ndim: int, axis: int | Sequence[int]) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
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


def _check_same_shapes(parts: Sequence[Any]) -> None:
    if len({p.shape for p in parts}) > 1:
        raise UnevenShapesError(
            "Expected parts of the same shape on all replicas. Got "
            + ", ".join(f"replica {i}: {p.shape}" for i, p in enumerate(parts))
            + ". Pass the axis along which they differ (axis=0 for rows), or gather them."
        )


def gather_leaf(strategy: Any, value: Any, axis: int) -> Any:
    """Concatenates one value's parts along `axis`, in replica order."""
    if isinstance(value, keras.Variable):
        value = _variable_value(strategy, value)
    if isinstance(value, LocalValue):
        return all_gather(value.local, axis, context.current())
    if isinstance(value, Mirrored):
        value = PerReplica(value.values)
    if not isinstance(value, PerReplica):
        return value
    parts = value.values
    if any(isinstance(p, IndexedSlices) for p in parts):
        raise NotImplementedError(
            "Expected dense tensors to gather. Got IndexedSlices. Call to_dense() first, or use "
            "all_reduce, which joins their rows."
        )
    arrays = [np.asarray(p) for p in parts]
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
