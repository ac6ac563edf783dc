"""ReplicaContext: what a replica function may ask of the other replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem import context
from stratagem.step import primitives
from stratagem.step.trace import LocalValue, replica_id
from stratagem.values import IndexedSlices, ReduceOp, is_distributed


class ReplicaContext:
    """The view from inside `strategy.run`, on one replica. Get it by `get_replica_context()`."""

    def __init__(self, strategy: Any, replica_id_in_sync_group: Any = None):
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group

    @property
    def strategy(self) -> Any:
        """The strategy whose `run` made this context."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part in each step."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's id, int32 scalar tensor (0 as a Python int in the default context)."""
        frame = self._frame("replica_id_in_sync_group")
        return replica_id(frame) if self._replica_id is None else self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of the device that computes, where it is one; deprecated in TF.

        Raises:
            NotImplementedError: there are several replicas.
        """
        names = self._frame("devices").strategy.worker_devices
        if self.num_replicas_in_sync > 1:
            raise NotImplementedError(
                "ReplicaContext.devices: expected a strategy of one replica, since the same "
                f"program runs on all. Got {self.num_replicas_in_sync} replicas. Use "
                "replica_id_in_sync_group, or strategy.extended.worker_devices for all names."
            )
        return names

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Combines each tensor of a structure over all replicas; every replica gets the result.

        All replicas must call it, in the same order. It is differentiable: the gradient of an
        all-reduce is the same all-reduce of the incoming gradient.

        Args:
            reduce_op: ReduceOp.SUM or MEAN, or its name.
            value: nested structure of tensors of the same shape on every replica; IndexedSlices
                are joined, with their duplicates.
            options: accepted for TF's sake; the strategy's cross-device ops decide.

        Returns:
            The structure with reduced tensors; MEAN of integers is float32.
        """
        del options
        op = ReduceOp.from_value(reduce_op)
        frame = self._frame("all_reduce")
        leaves, tree = jax.tree.flatten(value, is_leaf=lambda x: isinstance(x, IndexedSlices))
        dense = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, IndexedSlices)]
        arrays = [_summable(leaves[i]) for i in dense]
        for i, total in zip(dense, all_reduce(arrays, op, frame), strict=True):
            leaves[i] = total
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, IndexedSlices):
                leaves[i] = self._all_reduce_slices(op, leaf)
        return jax.tree.unflatten(tree, leaves)

    def _all_reduce_slices(self, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
        values, indices = self.all_gather((slices.values, slices.indices), axis=0)
        if op is ReduceOp.MEAN:
            values = primitives.divide(values, self.num_replicas_in_sync)
        return IndexedSlices(values, indices, slices.dense_shape)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates each tensor of a structure over all replicas along `axis`.

        All replicas must call it, in the same order; their sizes along `axis` may differ. The
        gradient sums the incoming gradients and gives each replica its own slice.

        Raises:
            ValueError: a leaf is a scalar or has no such axis.
        """
        del options
        frame = self._frame("all_gather")
        return jax.tree.map(lambda leaf: all_gather(jnp.asarray(leaf), axis, frame), value)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls `merge_fn(strategy, *args)` once, in cross-replica context.

        Tensors among the arguments arrive as PerReplica values; a PerReplica result gives each
        replica its own part, any other result goes to all.
        """
        frame = self._frame("merge_call")

        def wrap(leaf: Any) -> Any:
            return LocalValue(leaf) if isinstance(leaf, jax.Array) else leaf

        if frame.trace is None or self.num_replicas_in_sync == 1:
            wrap = lambda leaf: leaf  # noqa: E731
        merged_args, merged_kwargs = jax.tree.map(wrap, (tuple(args), dict(kwargs or {})))
        with context.entered(dataclasses.replace(frame, replica=None)):
            result = merge_fn(self._strategy, *merged_args, **merged_kwargs)
        return jax.tree.map(
            lambda leaf: leaf.local if isinstance(leaf, LocalValue) else leaf,
            result,
            is_leaf=is_distributed,
        )

    def _frame(self, what: str) -> context.Frame:
        frame = context.current()
        if frame.replica is not self:
            raise RuntimeError(
                f"Expected {what} on the current replica context. Got a context that is not "
                "current here. Call stratagem.get_replica_context() inside the function that "
                "strategy.run calls."
            )
        return frame

    def __repr__(self) -> str:
        return f"ReplicaContext(strategy={self._strategy!r})"


def all_reduce(arrays: list[Any], op: ReduceOp, frame: context.Frame) -> list[Any]:
    """Combines arrays over the replicas of a frame's strategy."""
    if frame.trace is None or frame.strategy.num_replicas_in_sync == 1:
        # Without a trace Keras infers shapes: no values are there, nor other replicas.
        return [primitives.divide(a, 1) if op is ReduceOp.MEAN else a for a in arrays]
    return primitives.all_reduce(arrays, [op.value.lower()] * len(arrays), frame)


def all_gather(value: Any, axis: int, frame: context.Frame) -> Any:
    """Concatenates one array over the replicas of a frame's strategy along `axis`."""
    if not -value.ndim <= axis < value.ndim:
        raise ValueError(
            f"Expected a tensor with an axis {axis} to gather along. Got shape {value.shape}. "
            "Add an axis first, for example with keras.ops.expand_dims."
        )
    if frame.strategy.num_replicas_in_sync == 1:
        return value
    if frame.trace is None:
        return jnp.concatenate([value] * frame.strategy.num_replicas_in_sync, axis)
    rows = jnp.moveaxis(value, axis, 0)
    sizes = frame.trace.exchange(rows.shape[0])
    gathered = primitives.all_gather_p.bind(
        rows,
        sizes=sizes,
        via=frame.strategy.cross_device_ops,
        weight=primitives.cotangent_weight(frame),
    )
    return jnp.moveaxis(gathered, 0, axis)


def _summable(leaf: Any) -> jax.Array:
    array = jnp.asarray(leaf)
    if array.dtype == jnp.bool_:
        raise TypeError(
            "Expected tensors of numbers to reduce. Got dtype bool. Cast to int32 first."
        )
    return array
