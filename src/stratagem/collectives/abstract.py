"""What every algorithm for combining values across replicas offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.collectives import eager
from stratagem.collectives.cost import Cost
from stratagem.values import DistributedValues, ReduceOp


class CrossDeviceOps:
    """How replicas combine their values; pass one to `MirroredStrategy(cross_device_ops=...)`.

    Inside a compiled step the strategy calls `all_reduce` and `all_gather`. Outside, anyone may
    call `reduce`, `batch_reduce` and `broadcast`, which run the same algorithm at once.

    To write an algorithm of your own, override `all_reduce`. A subclass that overrides only
    `reduce_implementation`, as `tf.distribute` has it, serves the calls outside a step.
    """

    def all_reduce(
        self, values: Sequence[jax.Array], axis_name: str, axis_size: int
    ) -> list[jax.Array]:
        """Sums each value over the replicas; called while a step is traced, inside `shard_map`.

        Args:
            values: this replica's arrays, of any shapes and numeric dtypes.
            axis_name: the mapped axis of the replicas.
            axis_size: the number of replicas on that axis.

        Returns:
            The sums, with the shapes and dtypes of `values` and the same bits on all replicas.

        Raises:
            TypeError: if a value has no sum (booleans and other non-numbers).
        """
        raise NotImplementedError(
            f"Expected {type(self).__name__} to define all_reduce(values, axis_name, axis_size), "
            f"which compiled steps call. Got a class that does not. Override it to use these ops "
            f"in a strategy; reduce_implementation serves direct calls of reduce only."
        )

    def all_gather(self, value: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
        """Stacks the replicas' values, inside `shard_map`.

        Args:
            value: this replica's array, of the same shape on all.
            axis_name: the mapped axis of the replicas.
            axis_size: the number of replicas on that axis.

        Returns:
            `[replicas, ...]`, the same on all replicas.
        """
        check_axis(self, axis_name, axis_size)
        if axis_size == 1:
            return jnp.expand_dims(value, 0)
        return jax.lax.all_gather(value, axis_name)

    def placed_on(self, devices: Sequence[jax.Device]) -> CrossDeviceOps:
        """Returns these ops for replicas on those devices, in replica order.

        A strategy calls it once, so that ops that name a device learn which replica it is.
        """
        del devices
        return self

    def cost(self, values: Sequence[Any], axis_size: int) -> Cost:
        """What `all_reduce` of such values costs between so many replicas.

        Args:
            values: arrays, or anything with a `shape` and a `dtype`.
            axis_size: the number of replicas.
        """
        raise NotImplementedError(
            f"Expected {type(self).__name__} to define cost(values, axis_size). Got a class that "
            f"does not. Override it with a formula of stratagem.collectives.cost."
        )

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """Combines the replicas' values and puts the result on the destinations.

        Args:
            reduce_op: `ReduceOp.SUM` or `MEAN`, or its name. The mean of integers is float32.
            per_replica_value: a PerReplica or Mirrored value of arrays with equal shapes or of
                IndexedSlices, or one array, which counts as one replica's.
            destinations: a distributed value (the result goes to the devices of its parts), a
                device string or a list of them, or an array or variable (to where it lives).
            options: passed to `reduce_implementation`; the ops of this package take none.

        Returns:
            Mirrored for a distributed value or several devices as destination, else an array.

        Raises:
            ValueError: if there are no destinations, or the shapes differ.
        """
        eager.check_destinations(destinations)
        return self.reduce_implementation(
            ReduceOp.from_value(reduce_op),
            eager.as_distributed(per_replica_value),
            destinations,
            options,
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Reduces many values, in one fused all-reduce.

        Args:
            reduce_op: as in `reduce`.
            value_destination_pairs: `(per_replica_value, destinations)`, each as in `reduce`.
            options: as in `reduce`.

        Returns:
            The results, in the order of the pairs.
        """
        op = ReduceOp.from_value(reduce_op)
        pairs = eager.check_pairs(value_destination_pairs)
        for _, destinations in pairs:
            eager.check_destinations(destinations)
        pairs = [(eager.as_distributed(value), destinations) for value, destinations in pairs]
        return self.batch_reduce_implementation(op, pairs, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies an array to the destinations.

        Args:
            tensor: an array, or what makes one.
            destinations: as in `reduce`.

        Returns:
            Mirrored for a distributed value or several devices as destination, else an array.
        """
        eager.check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Any,
        options: Any,
    ) -> Any:
        """Does the work of `reduce`, whose arguments it gets checked. May be overridden."""
        pairs = [(per_replica_value, destinations)]
        return eager.reduce_all(self, reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[DistributedValues, Any]],
        options: Any,
    ) -> list[Any]:
        """Does the work of `batch_reduce`, whose arguments it gets checked. May be overridden."""
        if type(self).reduce_implementation is not CrossDeviceOps.reduce_implementation:
            # A subclass in the manner of tf.distribute: one value at a time is all it can do.
            return [
                self.reduce_implementation(reduce_op, value, destinations, options)
                for value, destinations in value_destination_pairs
            ]
        return eager.reduce_all(self, reduce_op, value_destination_pairs, options)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Does the work of `broadcast`, whose arguments it gets checked. May be overridden."""
        return eager.place(jnp.asarray(tensor), destinations)


def check_all_reduce(
    ops: CrossDeviceOps, values: Sequence[jax.Array], axis_name: str, axis_size: int
) -> None:
    """Raises if values have no sum, or the axis is not as large as said."""
    check_axis(ops, axis_name, axis_size)
    wrong = [
        f"values[{i}]: {value.dtype}{list(value.shape)}"
        for i, value in enumerate(values)
        if not jnp.issubdtype(value.dtype, jnp.number)
    ]
    if wrong:
        raise TypeError(
            f"Expected numbers to sum across replicas. Got {', '.join(wrong)} in "
            f"{type(ops).__name__}.all_reduce. Cast booleans to an integer or float dtype first; "
            f"gather other values with all_gather."
        )


def check_axis(ops: CrossDeviceOps, axis_name: str, axis_size: int) -> None:
    """Raises if the axis is not as large as said: messages would miss replicas."""
    actual = jax.lax.axis_size(axis_name)
    if axis_size != actual:
        raise ValueError(
            f"Expected axis_size to be the size of axis {axis_name!r}, {actual}. Got {axis_size} "
            f"in {type(ops).__name__}. Pass the number of replicas on that axis."
        )
