"""Everything to one replica, folded there, and back."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem import config
from stratagem.collectives import cost
from stratagem.collectives.abstract import CrossDeviceOps, check_all_reduce
from stratagem.collectives.packs import Packing, cost_of_packs
from stratagem.collectives.wire import copy_down, send


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one replica, folds them there in replica order, and copies back.

    Cost with `p` replicas and `n` bytes each: `2(p-1)` rounds of messages of `n` bytes; the root
    sends `p-1` of them and every other replica one (`cost.star`). The only algorithm that can
    fold with any function, and that adds in replica order.

    Args:
        reduce_to_device: where to fold: a replica's index, or a device ("/gpu:1", or a
            `jax.Device`), which must be one of the replicas'. None: replica 0.
        accumulation_fn: from the list of a value's arrays, one a replica, to one array of that
            shape and dtype. None: their sum. It runs on the root only, so it must not
            communicate.

    Raises:
        TypeError: if `accumulation_fn` cannot be called.
    """

    def __init__(
        self,
        reduce_to_device: int | str | jax.Device | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ):
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                f"Expected accumulation_fn as a function from a list of arrays to one array. "
                f"Got {accumulation_fn!r}."
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def placed_on(self, devices: Sequence[jax.Device]) -> ReductionToOneDevice:
        """Returns these ops with the device to reduce to as the index of its replica."""
        if self.reduce_to_device is None or isinstance(self.reduce_to_device, int):
            return self
        device = config.resolve_device(self.reduce_to_device)
        if device not in devices:
            raise ValueError(
                f"Expected reduce_to_device to be the device of a replica: one of "
                f"{[config.device_name(d) for d in devices]}. Got "
                f"{self.reduce_to_device!r}. Name one of those, or leave it out to reduce to the "
                f"first."
            )
        placed = copy.copy(self)
        placed.reduce_to_device = list(devices).index(device)
        return placed

    def all_reduce(
        self, values: Sequence[jax.Array], axis_name: str, axis_size: int
    ) -> list[jax.Array]:
        check_all_reduce(self, values, axis_name, axis_size)
        root = self._root(axis_size)
        if axis_size == 1:
            return list(values)
        packing = Packing(values, num_packs=1)
        own = packing.flatten(values)
        others = [r for r in range(axis_size) if r != root]
        columns = {root: own}
        for r in others:
            columns[r] = [send(pack, axis_name, [(r, root)]) for pack in own]

        def fold() -> list[jax.Array]:
            by_replica = [packing.unflatten(columns[r]) for r in range(axis_size)]
            by_value = zip(*by_replica, strict=True)
            return packing.flatten([self._accumulate(list(parts)) for parts in by_value])

        # Only the root computes: elsewhere the parts have not arrived.
        is_root = jax.lax.axis_index(axis_name) == root
        folded = jax.lax.cond(is_root, fold, lambda: [jnp.zeros_like(pack) for pack in own])
        back = [[(root, r)] for r in others]
        return packing.unflatten([copy_down(pack, axis_name, back) for pack in folded])

    def cost(self, values: Sequence[Any], axis_size: int) -> cost.Cost:
        root = self._root(axis_size)
        return cost_of_packs(values, 1, axis_size, lambda n, _, __: cost.star(axis_size, n, root))

    def _root(self, axis_size: int) -> int:
        root = 0 if self.reduce_to_device is None else self.reduce_to_device
        if not isinstance(root, int):
            raise ValueError(
                f"Expected reduce_to_device as the index of a replica. Got {root!r}, a device, "
                f"which only a strategy can place. Pass these ops to a strategy, or call "
                f"placed_on(devices) with the replicas' devices."
            )
        if not 0 <= root < axis_size:
            raise ValueError(
                f"Expected reduce_to_device to be a replica, 0 to {axis_size - 1}. Got {root}."
            )
        return root

    def _accumulate(self, parts: list[jax.Array]) -> jax.Array:
        if self.accumulation_fn is None:
            return functools.reduce(operator.add, parts)
        result = jnp.asarray(self.accumulation_fn(parts))
        if result.shape != parts[0].shape or result.dtype != parts[0].dtype:
            raise ValueError(
                f"Expected accumulation_fn to return an array like those it gets, "
                f"{parts[0].dtype}{list(parts[0].shape)}. Got {result.dtype}"
                f"{list(result.shape)} from {self.accumulation_fn!r}. Fold the list over its "
                f"replicas, and keep shape and dtype."
            )
        return result
