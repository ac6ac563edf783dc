"""The ring: every replica sends the least bytes there can be."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from stratagem.collectives import cost
from stratagem.collectives.packed import PackedAllReduce
from stratagem.collectives.wire import as_bits, send


class RingAllReduce(PackedAllReduce):
    """Reduce-scatter, then all-gather, between neighbours on a ring. For large values.

    Cost with `p` replicas and `n` bytes each: every replica sends `2(p-1)` messages of
    `ceil(n/p)` bytes in as many rounds (`cost.ring`); no algorithm sends less. Patarasuk and
    Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.

    Chunk `c` is summed in the order of replicas `c, c+1, ..., c-1` on its way around, once, and
    then copied: all replicas hold the same bits.

    Values and sums share one buffer, so that a step holds about `n + 3n/p` bytes besides. Between
    processes on CPUs that matters: the C library gives large buffers (from some 30 MB on) back to
    the system after each step, and every page of the next one is a fault. As a multiple of the
    time of XLA's own, from `stratagem run --workers 3 benchmarks/crossover.py --small 8 --mb 3 8
    16 32 --turns 9` on two cores that were busy with other things too (medians): 1.1, 1.3, 1.4,
    1.9. With two buffers 16 MB took 3.2.

    Args:
        num_packs: packs for each dtype that go around one after another; 0 for one a value.
    """

    def pack_sum(self, x: jax.Array, axis_name: str, axis_size: int, pack: int) -> jax.Array:
        return ring_sum(x, axis_name, axis_size)

    def pack_cost(self, axis_size: int, nbytes: int, itemsize: int, pack: int) -> cost.Cost:
        return cost.ring(axis_size, nbytes, itemsize)


def ring_sum(x: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
    """Sums `x`, `[elements]`, over the replicas."""
    length = -(-x.shape[0] // axis_size)
    padded = jnp.pad(x, (0, axis_size * length - x.shape[0]))
    rank = jax.lax.axis_index(axis_name)
    onward = [(r, (r + 1) % axis_size) for r in range(axis_size)]

    def offset(chunk: jax.Array) -> jax.Array:
        return (chunk % axis_size) * length

    # Reduce-scatter: a partial sum travels around, and each replica adds its own chunk to it.
    partial = jax.lax.dynamic_slice(padded, (offset(rank),), (length,))
    for step in range(1, axis_size):
        own = jax.lax.dynamic_slice(padded, (offset(rank - step),), (length,))
        partial = send(partial, axis_name, onward) + own

    # All-gather: the finished chunks travel around, and take the places of the values they sum.
    block, restore = as_bits(partial)
    total, _ = as_bits(padded)
    total = jax.lax.dynamic_update_slice(total, block, (offset(rank + 1),))
    for step in range(axis_size - 1):
        block = jax.lax.ppermute(block, axis_name, onward)
        total = jax.lax.dynamic_update_slice(total, block, (offset(rank - step),))
    return restore(jax.lax.slice(total, (0,), (x.shape[0],)))
