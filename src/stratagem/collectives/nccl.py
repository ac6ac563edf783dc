"""XLA's own all-reduce, which is NCCL's on NVIDIA devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from stratagem.collectives import cost
from stratagem.collectives.abstract import check_all_reduce
from stratagem.collectives.packed import PackedAllReduce
from stratagem.collectives.packs import SmallJoined


class NcclAllReduce(PackedAllReduce):
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

    def all_reduce(
        self, values: Sequence[jax.Array], axis_name: str, axis_size: int
    ) -> list[jax.Array]:
        if self.num_packs > 1:
            return super().all_reduce(values, axis_name, axis_size)
        check_all_reduce(self, values, axis_name, axis_size)
        if axis_size == 1 or not values:
            return list(values)
        if self.num_packs == 0:
            return [jax.lax.psum(value, axis_name) for value in values]
        joined = SmallJoined(values)
        return joined.parted(jax.lax.psum(joined.sent, axis_name))

    def pack_sum(self, x: jax.Array, axis_name: str, axis_size: int, pack: int) -> jax.Array:
        return jax.lax.psum(x, axis_name)

    def pack_cost(self, axis_size: int, nbytes: int, itemsize: int, pack: int) -> cost.Cost:
        return cost.lower_bound(axis_size, nbytes)
