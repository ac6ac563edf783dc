"""Sends an array from replica to replica, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Floats of fewer than four bytes travel as unsigned integers of the same width. XLA on CPU would
# widen bfloat16 to float32 on the way (twice the bytes), and any compiler that may keep such a
# float in a wider register could hold another value on the replica that computed it than on those
# that received it.
_BITS = {1: jnp.uint8, 2: jnp.uint16}


def as_bits(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns what to send for `x`, and the function that turns it into a value again."""
    dtype = x.dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize not in _BITS:
        return x, lambda received: received
    bits = jax.lax.bitcast_convert_type(x, _BITS[dtype.itemsize])
    return bits, lambda received: jax.lax.bitcast_convert_type(received, dtype)


def send(x: jax.Array, axis_name: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """One round of messages.

    Args:
        x: what this replica sends, if it is a source.
        axis_name: the mapped axis of the replicas.
        pairs: `(source, target)` replicas, each at most once a source and once a target.

    Returns:
        What this replica received, of the shape of `x`; zeros where it is no target.
    """
    bits, restore = as_bits(x)
    received: Any = jax.lax.ppermute(bits, axis_name, pairs)
    return restore(received)


def copy_down(
    x: jax.Array, axis_name: str, rounds: Sequence[Sequence[tuple[int, int]]]
) -> jax.Array:
    """Copies the value of the sources of the first round to all targets, round after round.

    Args:
        x: the value, right on the sources of the first round and of any shape on the others.
        axis_name: the mapped axis of the replicas.
        rounds: `(source, target)` pairs of each round. A target of one round may be a source of a
            later one.
    """
    bits, restore = as_bits(x)
    rank = jax.lax.axis_index(axis_name)
    for pairs in rounds:
        received = jax.lax.ppermute(bits, axis_name, pairs)
        bits = jnp.where(is_one_of(rank, [target for _, target in pairs]), received, bits)
    return restore(bits)


def is_one_of(rank: jax.Array, ranks: Sequence[int]) -> jax.Array:
    """Whether this replica is in the list."""
    hits = [rank == r for r in ranks]
    found = hits[0]
    for hit in hits[1:]:
        found = found | hit
    return found
