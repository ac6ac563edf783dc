"""What the all-reduces share whose values travel in flat packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from stratagem.collectives.abstract import CrossDeviceOps, check_all_reduce
from stratagem.collectives.cost import Cost
from stratagem.collectives.packs import Packing, check_num_packs, cost_of_packs


class PackedAllReduce(CrossDeviceOps):
    """An all-reduce that joins the values of each dtype and sums the packs one after another.

    A subclass says how one pack is summed (`pack_sum`) and what that costs (`pack_cost`).

    Args:
        num_packs: packs for each dtype; 0 for one a value.

    Raises:
        ValueError: if `num_packs` is negative.
    """

    def __init__(self, num_packs: int = 1):
        self.num_packs = check_num_packs(num_packs)

    def all_reduce(
        self, values: Sequence[jax.Array], axis_name: str, axis_size: int
    ) -> list[jax.Array]:
        check_all_reduce(self, values, axis_name, axis_size)
        if axis_size == 1:
            return list(values)
        packing = Packing(values, self.num_packs)
        packs = enumerate(packing.flatten(values))
        return packing.unflatten([self.pack_sum(x, axis_name, axis_size, i) for i, x in packs])

    def cost(self, values: Sequence[Any], axis_size: int) -> Cost:
        return cost_of_packs(
            values,
            self.num_packs,
            axis_size,
            lambda nbytes, itemsize, pack: self.pack_cost(axis_size, nbytes, itemsize, pack),
        )

    def pack_sum(self, x: jax.Array, axis_name: str, axis_size: int, pack: int) -> jax.Array:
        """Sums pack number `pack`, `[elements]`, over the replicas."""
        raise NotImplementedError(f"Expected {type(self).__name__} to define pack_sum. Got none.")

    def pack_cost(self, axis_size: int, nbytes: int, itemsize: int, pack: int) -> Cost:
        """What `pack_sum` costs for a pack of `nbytes`."""
        raise NotImplementedError(f"Expected {type(self).__name__} to define pack_cost. Got none.")
