"""What an all-reduce sends and how long it takes, by formula. Pure: imports no JAX.

The model is alpha-beta-gamma: a message of `n` bytes takes `alpha + n*beta` seconds (latency, and
one over the bandwidth of a link in one direction), combining two blocks of `n` bytes `n*gamma`.
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
IJHPCA 19(1), 2005 (their cost model). Throughout, `p` is the number of replicas, `n` the bytes on
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one all-reduce costs. Costs of all-reduces that follow one another add up.

    Args:
        rounds: messages that must follow one another (the factor of alpha).
        messages: `[replicas]`, messages that each replica sends.
        bytes_sent: `[replicas]`, bytes that each replica sends.
        serial_bytes: bytes on the longest chain of messages (the factor of beta).
        reduced_bytes: bytes that are combined on that chain (the factor of gamma).
    """

    rounds: int
    messages: tuple[int, ...]
    bytes_sent: tuple[int, ...]
    serial_bytes: int
    reduced_bytes: int

    @property
    def replicas(self) -> int:
        """How many replicas take part."""
        return len(self.messages)

    @property
    def max_messages(self) -> int:
        """Messages that the busiest replica sends."""
        return max(self.messages)

    @property
    def total_messages(self) -> int:
        """Messages that all replicas send together."""
        return sum(self.messages)

    @property
    def max_bytes(self) -> int:
        """Bytes that the busiest replica sends."""
        return max(self.bytes_sent)

    @property
    def total_bytes(self) -> int:
        """Bytes that all replicas send together."""
        return sum(self.bytes_sent)

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Predicts the time.

        Args:
            alpha: seconds for a message of no bytes.
            beta: seconds for each byte sent.
            gamma: seconds for each byte combined.

        Returns:
            `rounds*alpha + serial_bytes*beta + reduced_bytes*gamma`.
        """
        return self.rounds * alpha + self.serial_bytes * beta + self.reduced_bytes * gamma

    def __add__(self, other: Cost) -> Cost:
        if self.replicas != other.replicas:
            raise ValueError(
                f"Expected costs of all-reduces between the same replicas. Got {self.replicas} "
                f"and {other.replicas} replicas. Add costs of one program only."
            )
        return Cost(
            self.rounds + other.rounds,
            tuple(a + b for a, b in zip(self.messages, other.messages, strict=True)),
            tuple(a + b for a, b in zip(self.bytes_sent, other.bytes_sent, strict=True)),
            self.serial_bytes + other.serial_bytes,
            self.reduced_bytes + other.reduced_bytes,
        )


def nothing(replicas: int) -> Cost:
    """The cost of no communication, where sums of costs start."""
    _check(replicas, 0)
    return Cost(0, (0,) * replicas, (0,) * replicas, 0, 0)


def lower_bound(replicas: int, nbytes: int) -> Cost:
    """The least that any all-reduce needs, and what a library's own is credited with.

    Every replica sends `2(p-1)/p * n` bytes (rounded up), `2(p-1)` messages as in a ring. XLA's
    all-reduce leaves the algorithm to the platform (NCCL: rings or double trees; TPU: the torus;
    CPU: a shared-memory reduction), so these are not counted in a program, only estimated.
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    JPDC 69(2), 2009 (the lower bound).
    """
    _check(replicas, nbytes)
    steps = 2 * (replicas - 1)
    sent = -(-steps * nbytes // replicas)
    return Cost(
        steps,
        (steps,) * replicas,
        (sent,) * replicas,
        sent,
        -(-(replicas - 1) * nbytes // replicas),
    )


def star(replicas: int, nbytes: int, root: int = 0) -> Cost:
    """All replicas send to one, which combines and sends back.

    `2(p-1)(alpha + n*beta) + (p-1)*n*gamma`. The root sends `p-1` messages, every other one.
    The transfers are serial: they share the root's link.
    """
    _check(replicas, nbytes)
    if not 0 <= root < replicas:
        raise ValueError(f"Expected a root from 0 to {replicas - 1}. Got {root}.")
    others = replicas - 1
    messages = tuple(others if r == root else 1 for r in range(replicas))
    if others == 0:
        return nothing(1)
    return _whole_messages(2 * others, messages, nbytes, reductions=others)


def tree(replicas: int, nbytes: int) -> Cost:
    """A binomial tree reduces to replica 0, and the same tree sends back.

    `2*ceil(log2 p)*(alpha + n*beta) + ceil(log2 p)*n*gamma`. Replica 0 sends most:
    `ceil(log2 p)` messages; together `2(p-1)`.
    """
    _check(replicas, nbytes)
    depth = (replicas - 1).bit_length()

    def sent_by(rank: int) -> int:
        children = sum(rank % (2 << k) == 0 and rank + (1 << k) < replicas for k in range(depth))
        return children + (rank != 0)

    return _whole_messages(
        2 * depth, tuple(sent_by(r) for r in range(replicas)), nbytes, reductions=depth
    )


def doubling(replicas: int, nbytes: int) -> Cost:
    """Recursive doubling: replicas `2**k` apart exchange all they have, in round `k`.

    `log2(q)*(alpha + n*beta + n*gamma)` for `q`, the largest power of two up to `p`. The `p - q`
    others send theirs before and get the sum after: `2*(alpha + n*beta) + n*gamma` more.
    """
    _check(replicas, nbytes)
    rounds = replicas.bit_length() - 1
    rest = replicas - (1 << rounds)
    messages = tuple(1 if r >= 1 << rounds else rounds + (r < rest) for r in range(replicas))
    more = 1 if rest else 0
    return _whole_messages(rounds + 2 * more, messages, nbytes, reductions=rounds + more)


def ring(replicas: int, nbytes: int, itemsize: int = 1) -> Cost:
    """Reduce-scatter and all-gather around a ring, in `p` chunks of whole elements.

    `2(p-1)(alpha + c*beta) + (p-1)*c*gamma` where a chunk is `c = ceil(n/p)` rounded up to whole
    elements. Every replica sends `2(p-1)` messages of `c` bytes: the lower bound, but for padding.

    Args:
        replicas: `p`.
        nbytes: `n`.
        itemsize: bytes of an element.
    """
    _check(replicas, nbytes)
    if itemsize < 1 or nbytes % itemsize:
        raise ValueError(
            f"Expected nbytes in whole elements of itemsize. Got nbytes={nbytes}, "
            f"itemsize={itemsize}."
        )
    chunk = -(-(nbytes // itemsize) // replicas) * itemsize
    steps = 2 * (replicas - 1)
    return Cost(
        steps,
        (steps,) * replicas,
        (steps * chunk,) * replicas,
        steps * chunk,
        (replicas - 1) * chunk,
    )


def hierarchical(replicas: int, nbytes: int, group_size: int | None = None, pack: int = 0) -> Cost:
    """Groups reduce to their leaders, leaders to one of them, and the result goes back that way.

    With groups of `g` and `m = ceil(p/g)` of them:
    `2(g-1 + m-1)(alpha + n*beta) + (g-1 + m-1)*n*gamma`; the leader of leaders sends
    `m-1 + g-1` messages, other leaders `g`, the rest one; together `2(p-1)`.

    Args:
        replicas: `p`.
        nbytes: `n`.
        group_size: `g`; the last group may be smaller. None: `best_group_size(replicas)`.
        pack: which pack this is; packs take turns with the leaders.
    """
    _check(replicas, nbytes)
    groups = group_ranks(replicas, group_size)
    leaders = group_leaders(groups, pack)
    top = leaders[pack % len(groups)]
    messages = [1] * replicas
    for group, leader in zip(groups, leaders, strict=True):
        up = len(groups) - 1 if leader == top else 1
        messages[leader] = up + len(group) - 1
    rounds = len(groups[0]) - 1 + len(groups) - 1
    if rounds == 0:
        return nothing(1)
    return _whole_messages(2 * rounds, tuple(messages), nbytes, reductions=rounds)


def best_group_size(replicas: int) -> int:
    """The group size with the fewest rounds; among equals, even groups, then larger ones.

    About the square root of `replicas`: 2 for 4, 4 for 8 (the two halves of a DGX-1), 3 for 9.
    """
    _check(replicas, 0)

    def badness(size: int) -> tuple[int, bool, int]:
        return (size - 1) + (-(-replicas // size) - 1), replicas % size != 0, -size

    root = int(replicas**0.5)
    near = range(max(1, root // 2), min(replicas, 2 * root + 2) + 1)  # it is never further away
    return min(near, key=badness)


def group_ranks(replicas: int, group_size: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Neighbouring replicas in groups of `group_size`, the last one possibly smaller."""
    _check(replicas, 0)
    size = best_group_size(replicas) if group_size is None else group_size
    if not 1 <= size <= replicas:
        raise ValueError(f"Expected a group_size from 1 to {replicas} replicas. Got {size}.")
    return tuple(
        tuple(range(start, min(start + size, replicas))) for start in range(0, replicas, size)
    )


def group_leaders(groups: Sequence[Sequence[int]], pack: int = 0) -> tuple[int, ...]:
    """Each group's leader for that pack. They rotate, so that no replica carries all packs."""
    return tuple(group[pack % len(group)] for group in groups)


def bus_bandwidth(replicas: int, nbytes: int, seconds: float) -> float:
    """Bytes per second that an ideal ring would have to move over each link to be as fast.

    `n/t * 2(p-1)/p`: the one figure to compare with a link's speed that does not depend on `p`
    (NVIDIA, nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth").
    """
    _check(replicas, nbytes)
    if not seconds > 0:
        raise ValueError(f"Expected a positive time in seconds. Got {seconds}.")
    return nbytes / seconds * 2 * (replicas - 1) / replicas


def _whole_messages(rounds: int, messages: tuple[int, ...], nbytes: int, reductions: int) -> Cost:
    """The cost when every message carries all `nbytes`."""
    sent = tuple(count * nbytes for count in messages)
    return Cost(rounds, messages, sent, rounds * nbytes, reductions * nbytes)


def _check(replicas: int, nbytes: int) -> None:
    if replicas < 1 or nbytes < 0:
        raise ValueError(
            f"Expected at least one replica and no negative size. Got replicas={replicas}, "
            f"nbytes={nbytes}."
        )
