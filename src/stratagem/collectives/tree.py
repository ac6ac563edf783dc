"""The binomial tree: the fewest rounds for values that are small."""

from __future__ import annotations

import jax

from stratagem.collectives import cost
from stratagem.collectives.packed import PackedAllReduce
from stratagem.collectives.wire import copy_down, send


class TreeAllReduce(PackedAllReduce):
    """Reduces along a binomial tree to replica 0 and copies back along it. For small values.

    Cost with `p` replicas and `n` bytes each: `2*ceil(log2 p)` rounds of messages of `n` bytes;
    replica 0 sends `ceil(log2 p)` of them, all together `2(p-1)` (`cost.tree`). Thakur,
    Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
    19(1), 2005 (binomial tree broadcast and reduce).

    Sums pairwise, so rounding errors grow with `log p`; the sum is computed once and copied.

    Args:
        num_packs: packs for each dtype, one after another; 0 for one a value.
    """

    def pack_sum(self, x: jax.Array, axis_name: str, axis_size: int, pack: int) -> jax.Array:
        return tree_sum(x, axis_name, axis_size)

    def pack_cost(self, axis_size: int, nbytes: int, itemsize: int, pack: int) -> cost.Cost:
        return cost.tree(axis_size, nbytes)


def tree_sum(x: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
    """Sums `x`, `[elements]`, over the replicas."""
    rounds = tree_rounds(axis_size)
    for pairs in rounds:
        x = x + send(x, axis_name, pairs)
    back = [[(parent, child) for child, parent in pairs] for pairs in reversed(rounds)]
    return copy_down(x, axis_name, back)


def tree_rounds(replicas: int) -> list[list[tuple[int, int]]]:
    """`(child, parent)` pairs of each round towards replica 0; `2**k` apart in round `k`."""
    depth = (replicas - 1).bit_length()
    return [
        [(r + (1 << k), r) for r in range(0, replicas, 2 << k) if r + (1 << k) < replicas]
        for k in range(depth)
    ]
