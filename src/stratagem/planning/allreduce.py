"""How long an all-reduce takes over levels of links, by formula, for each cross-device op.

Alpha-beta: a message of `n` bytes takes `alpha + n/bandwidth` seconds. On one level of equal links
the formulas are those of `collectives/cost.py`. Over several, a message takes the links that its
ends are joined by. Combining is not counted: devices add faster than links deliver; where they do
not (CPUs), calibration measures both together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stratagem.collectives import cost
from stratagem.planning.topology import Level

Levels = Sequence[Level]


def platform(levels: Levels, nbytes: float) -> float:
    """`NcclAllReduce`: what NCCL and the TPU's runtime do, at their best.

    Reduce-scatter inside, all-reduce outside, all-gather inside. A group sends `2(m-1)/m*n` bytes
    over all its links at once; each level is a ring or a pair of pipelined trees, whichever is
    faster: `2(m-1)*alpha + 2(m-1)/m*n/B`, or `2*ceil(log2 m)*alpha + 2n/B`.

    P. Patarasuk, X. Yuan, JPDC 69(2), 2009 (rings); P. Sanders, J. Speck, J. L. Traeff, Parallel
    Computing 35(12), 2009 (two trees), which NCCL has since 2.4.
    """
    return sum(_ring_or_trees(level, nbytes) for level in levels)


def _ring_or_trees(level: Level, nbytes: float) -> float:
    full = 2 * nbytes / level.bandwidth
    ring = level.rounds * level.alpha + full * (level.members - 1) / level.members
    return min(ring, 2 * _log2(level.members) * level.alpha + full)


def ring(levels: Levels, nbytes: float) -> float:
    """`RingAllReduce`: one ring through all devices, as slow as its slowest message.

    `2(p-1) * (alpha + n/(p*b))`, `b` what one pair of devices can use.
    """
    devices = _devices(levels)
    if devices == 1:
        return 0.0
    slowest = max(_message(level, nbytes / devices) for level in levels)
    return 2 * (devices - 1) * slowest


def tree(levels: Levels, nbytes: float) -> float:
    """`TreeAllReduce`: `2*ceil(log2 m) * (alpha + n/b)` on each level."""
    return sum(2 * _log2(level.members) * _message(level, nbytes) for level in levels)


def doubling(levels: Levels, nbytes: float) -> float:
    """`DoublingAllReduce`: `log2 m` exchanges of all `n` bytes, by all devices at once.

    Devices of a group share its links: `max(n/b, g*n/B)` a round. Two rounds more where `m` is no
    power of two.
    """
    total, inside = 0.0, 1
    for level in levels:
        seconds = level.alpha + max(nbytes / level.stream, inside * nbytes / level.bandwidth)
        floor = level.members.bit_length() - 1
        extra = 2 if level.members != 1 << floor else 0
        total += (floor + extra) * seconds
        inside *= level.members
    return total


def hierarchical(levels: Levels, nbytes: float) -> float:
    """`HierarchicalCopyAllReduce`: leaders of groups collect, `2(g-1 + m-1) * (alpha + n/b)`.

    The groups are the machines; of a single level, groups of about its square root.
    """
    if len(levels) == 1:
        (level,) = levels
        size = cost.best_group_size(level.members)
        steps = size - 1 + -(-level.members // size) - 1
        return 2 * steps * _message(level, nbytes)
    return sum(2 * (level.members - 1) * _message(level, nbytes) for level in levels)


def star(levels: Levels, nbytes: float) -> float:
    """`ReductionToOneDevice`: one device hears all and answers all, `2(p-1) * (alpha + n/b)`."""
    total, inside = 0.0, 1
    for level in levels:
        total += 2 * (level.members - 1) * inside * _message(level, nbytes)
        inside *= level.members
    return total


PLATFORM = "NcclAllReduce"
OPS: dict[str, Callable[[Levels, float], float]] = {
    PLATFORM: platform,
    "RingAllReduce": ring,
    "TreeAllReduce": tree,
    "DoublingAllReduce": doubling,
    "HierarchicalCopyAllReduce": hierarchical,
    "ReductionToOneDevice": star,
}


def _message(level: Level, nbytes: float) -> float:
    return level.alpha + nbytes / level.stream


def _devices(levels: Levels) -> int:
    return math.prod(level.members for level in levels)


def _log2(members: int) -> int:
    return (members - 1).bit_length()
