"""Groups of near replicas first, then between the groups."""

from __future__ import annotations

from itertools import zip_longest

import jax

from stratagem.collectives import cost
from stratagem.collectives.packed import PackedAllReduce
from stratagem.collectives.wire import copy_down, send


class HierarchicalCopyAllReduce(PackedAllReduce):
    """Reduces in groups of neighbours, then between groups, and copies back the same way.

    For machines whose near devices have faster links than far ones: of the `2(p-1)` messages only
    `2(m-1)` cross groups. Cost with `p` replicas in `m` groups of `g`, `n` bytes each:
    `2(g-1 + m-1)` rounds of messages of `n` bytes, of which the busiest replica sends half
    (`cost.hierarchical`). Two levels of a star (`cost.star`), as `tf.distribute` does it on a
    DGX-1; groups are about `sqrt(p)` large (`cost.best_group_size`), for any `p`.

    The sum is computed once, in replica order within a group, and copied.

    Args:
        num_packs: packs for each dtype; 0 for one a value. Packs take turns with the leaders of
            the groups, so that several packs spread the load over the replicas.

    Raises:
        ValueError: if `num_packs` is negative.
    """

    def pack_sum(self, x: jax.Array, axis_name: str, axis_size: int, pack: int) -> jax.Array:
        return _sum(x, axis_name, axis_size, pack)

    def pack_cost(self, axis_size: int, nbytes: int, itemsize: int, pack: int) -> cost.Cost:
        return cost.hierarchical(axis_size, nbytes, pack=pack)


def _sum(x: jax.Array, axis_name: str, axis_size: int, pack: int) -> jax.Array:
    """Sums `x`, `[elements]`, over the replicas."""
    within, across = hierarchical_rounds(axis_size, pack)
    own = x
    for pairs in within:
        x = x + send(own, axis_name, pairs)
    group_sum = x
    for pairs in across:
        x = x + send(group_sum, axis_name, pairs)
    back = [[(parent, child) for child, parent in pairs] for pairs in (*across, *within)]
    return copy_down(x, axis_name, back)


def hierarchical_rounds(
    replicas: int, pack: int = 0
) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]:
    """`(member, leader)` pairs of each round within the groups, and across them."""
    groups = cost.group_ranks(replicas)
    leaders = cost.group_leaders(groups, pack)
    top = leaders[pack % len(groups)]
    # One column a group: its members but the leader, who can receive from one of them a round.
    columns = [
        [(member, leader) for member in group if member != leader]
        for group, leader in zip(groups, leaders, strict=True)
    ]
    within = [[pair for pair in row if pair] for row in zip_longest(*columns)]
    across = [[(leader, top)] for leader in leaders if leader != top]
    return within, across
