"""Recursive doubling: everyone exchanges with everyone in few rounds, and nobody waits for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.collectives import cost
from stratagem.collectives.abstract import CrossDeviceOps, check_all_reduce
from stratagem.collectives.packs import SmallJoined, by_size, cost_of_packs, nbytes_of
from stratagem.collectives.wire import as_bits, is_one_of, send


class DoublingAllReduce(CrossDeviceOps):
    """Replicas `2**k` apart exchange what they have, in round `k`. For few replicas.

    Cost with `p` replicas and `n` bytes each: `log2 p` rounds of messages of `n` bytes, which
    every replica sends (`cost.doubling`); where `p` is no power of two, the replicas beyond the
    largest one hand their values over before and get the sums after, in two more rounds. With two
    replicas no algorithm sends less or in fewer rounds. Thakur, Rabenseifner and Gropp,
    "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, section
    4.4.

    In each round both sides of an exchange add the same two numbers, so all replicas hold the same
    bits. Small values travel together, a large one by itself.
    """

    def all_reduce(
        self, values: Sequence[jax.Array], axis_name: str, axis_size: int
    ) -> list[jax.Array]:
        check_all_reduce(self, values, axis_name, axis_size)
        if axis_size == 1:
            return list(values)
        joined = SmallJoined(values)
        return joined.parted([doubling_sum(x, axis_name, axis_size) for x in joined.sent])

    def cost(self, values: Sequence[Any], axis_size: int) -> cost.Cost:
        large, small = by_size(values)
        total = cost_of_packs(
            [values[i] for i in small], 1, axis_size, lambda n, _, __: cost.doubling(axis_size, n)
        )
        for i in large:
            total += cost.doubling(axis_size, nbytes_of(values[i]))
        return total


def doubling_sum(x: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
    """Sums `x`, of any shape, over the replicas."""
    rounds = axis_size.bit_length() - 1
    core = 1 << rounds
    rest = range(core, axis_size)
    x = _settled(x)
    if rest:
        x = _settled(x + send(x, axis_name, [(r, r - core) for r in rest]))
    for k in range(rounds):
        pairs = [(r, r ^ (1 << k)) for r in range(core)]
        x = x + send(x, axis_name, pairs)
        x = _settled(x) if k + 1 < rounds else x
    if rest:
        bits, restore = as_bits(x)
        received = jax.lax.ppermute(bits, axis_name, [(r - core, r) for r in rest])
        late = is_one_of(jax.lax.axis_index(axis_name), list(rest))
        x = restore(jnp.where(late, received, bits))
    return x


def _settled(x: jax.Array) -> jax.Array:
    """The value as it travels, so that both sides of an exchange add the same two numbers.

    A compiler may hold a short float in more bits than it has, and may fuse the multiplication
    that made a value with the addition that follows, without rounding between. So short floats
    are rounded here, and long ones pass through a choice that the compiler cannot look through.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_settled(jnp.real(x)), _settled(jnp.imag(x)))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    info = jnp.finfo(x.dtype)
    if x.dtype.itemsize <= 2:
        return jax.lax.reduce_precision(x, info.nexp, info.nmant)
    return jnp.where(x == x, x, jnp.asarray(jnp.nan, x.dtype))
