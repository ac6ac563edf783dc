"""XLA's own all-reduce, which is NCCL's on NVIDIA devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from stratagem.collectives import cost
from stratagem.collectives.abstract import CrossDeviceOps, check_all_reduce
from stratagem.collectives.packs import Packing, SmallJoined, check_num_packs, cost_of_packs


class NcclAllReduce(CrossDeviceOps):
    """All-reduces with `jax.lax.psum`; the platform chooses the algorithm. The default.

    Cost: at least `2(p-1)/p * n` bytes sent by each of `p` replicas that hold `n` bytes
    (`cost.lower_bound`). The program holds one all-reduce instruction for each dtype.

    Args:
        num_packs: 1 hands XLA all values at once, the small ones of a dtype joined in one array.
            `k > 1` copies the values of a dtype into `k` flat packs with one `psum` each; 0 is one
            `psum` for each value. XLA may join `psum`s that do not depend on each other into one
            all-reduce again (on CPU it always does), so a figure other than 1 is a wish, for
            platforms with a limit to it.

    Raises:
        ValueError: if `num_packs` is negative.
    """

    def __init__(self, num_packs: int = 1):
        self.num_packs = check_num_packs(num_packs)

    def all_reduce(
        self, values: Sequence[jax.Array], axis_name: str, axis_size: int
    ) -> list[jax.Array]:
        check_all_reduce(self, values, axis_name, axis_size)
        if axis_size == 1 or not values:
            return list(values)
        if self.num_packs == 0:
            return [jax.lax.psum(value, axis_name) for value in values]
        if self.num_packs == 1:
            joined = SmallJoined(values)
            return joined.parted(jax.lax.psum(joined.sent, axis_name))
        packing = Packing(values, self.num_packs)
        return packing.unflatten([jax.lax.psum(x, axis_name) for x in packing.flatten(values)])

    def cost(self, values: Sequence[Any], axis_size: int) -> cost.Cost:
        return cost_of_packs(
            values, self.num_packs, axis_size, lambda n, _, __: cost.lower_bound(axis_size, n)
        )
