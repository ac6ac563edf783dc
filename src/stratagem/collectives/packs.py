"""Joins values of mixed shapes and dtypes into flat packs, so that few messages carry many."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.collectives.cost import Cost, nothing

_ALONE = 1 << 16  # bytes


@dataclass(frozen=True)
class _Group:
    """Values that travel as one flat array of shape `[bounds[-1]]`, cut at the bounds."""

    dtype: Any
    members: tuple[int, ...]
    bounds: tuple[int, ...]


class Packing:
    """How a list of values becomes flat packs and back; it follows from shapes and dtypes alone.

    Values of one dtype are joined in order and cut into `num_packs` packs of equal length, the
    last one taking the remainder. With `num_packs=0` every value is a pack of its own.

    Args:
        values: arrays, or anything with a `shape` and a `dtype`.
        num_packs: packs for each dtype.
    """

    def __init__(self, values: Sequence[Any], num_packs: int):
        self.avals = [(tuple(v.shape), jnp.dtype(v.dtype)) for v in values]
        by_key: dict[Any, list[int]] = {}
        for i, (shape, dtype) in enumerate(self.avals):
            if math.prod(shape) > 0:  # nothing to send for the others
                by_key.setdefault(i if num_packs == 0 else dtype, []).append(i)
        self._groups: list[_Group] = []
        for members in by_key.values():
            total = sum(math.prod(self.avals[i][0]) for i in members)
            packs = min(max(num_packs, 1), total)
            bounds = (*(k * (total // packs) for k in range(packs)), total)
            self._groups.append(_Group(self.avals[members[0]][1], tuple(members), bounds))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """For each pack, its number of elements and the bytes of an element."""
        return [
            (stop - start, group.dtype.itemsize)
            for group in self._groups
            for start, stop in zip(group.bounds, group.bounds[1:], strict=False)
        ]

    def flatten(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the packs, each `[elements]`."""
        packs = []
        for group in self._groups:
            flat = _join([jnp.ravel(values[i]) for i in group.members])
            for start, stop in zip(group.bounds, group.bounds[1:], strict=False):
                packs.append(jax.lax.slice(flat, (start,), (stop,)))
        return packs

    def unflatten(self, packs: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the values that the packs hold, in the order they came in."""
        values = [jnp.zeros(shape, dtype) for shape, dtype in self.avals]
        rest = list(packs)
        for group in self._groups:
            count = len(group.bounds) - 1
            flat, rest = _join(rest[:count]), rest[count:]
            start = 0
            for i in group.members:
                shape = self.avals[i][0]
                stop = start + math.prod(shape)
                values[i] = jnp.reshape(jax.lax.slice(flat, (start,), (stop,)), shape)
                start = stop
        return values


def cost_of_packs(
    values: Sequence[Any],
    num_packs: int,
    replicas: int,
    cost_flat: Callable[[int, int, int], Cost],
) -> Cost:
    """Adds up the costs of the packs of the values.

    Args:
        values: arrays, or anything with a `shape` and a `dtype`.
        num_packs: packs for each dtype; 0 for one a value.
        replicas: how many take part.
        cost_flat: from a pack's bytes, bytes of an element and position to its cost.
    """
    total = nothing(replicas)
    for i, (elements, itemsize) in enumerate(Packing(values, num_packs).sizes):
        total += cost_flat(elements * itemsize, itemsize, i)
    return total


class SmallJoined:
    """Values of which the small ones of a dtype travel in one array; see `by_size`.

    Args:
        values: arrays of any shapes.

    Attributes:
        sent: what to send instead of them.
    """

    def __init__(self, values: Sequence[jax.Array]):
        self._large, self._small = by_size(values)
        small = [values[i] for i in self._small]
        self._packing = Packing(small, 1)
        self._packs = self._packing.flatten(small)
        self.sent = [*self._packs, *(values[i] for i in self._large)]

    def parted(self, sums: Sequence[jax.Array]) -> list[jax.Array]:
        """The sums of the values, of the sums of what was sent."""
        count = len(self._packs)
        totals = dict(zip(self._small, self._packing.unflatten(sums[:count]), strict=True))
        totals |= zip(self._large, sums[count:], strict=True)
        return [totals[i] for i in range(len(totals))]


def by_size(values: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Positions of the values that had better travel by themselves, and of those that join.

    Every value of an all-reduce costs a fixed time (on CPU some 20 us between devices, 150 us
    between processes), joining one costs two copies of it.
    """
    large = [i for i, v in enumerate(values) if nbytes_of(v) >= _ALONE]
    return large, [i for i in range(len(values)) if nbytes_of(values[i]) < _ALONE]


def nbytes_of(value: Any) -> int:
    """Bytes of an array, or of anything with a `shape` and a `dtype`."""
    return math.prod(value.shape) * jnp.dtype(value.dtype).itemsize


def check_num_packs(num_packs: Any) -> int:
    """Returns `num_packs` if it is an integer from 0."""
    if isinstance(num_packs, bool) or not isinstance(num_packs, int):
        raise TypeError(
            f"Expected num_packs as an integer. Got {num_packs!r}. Pass 1 to send all values of "
            f"a dtype together, or 0 to send each on its own."
        )
    if num_packs < 0:
        raise ValueError(
            f"Expected num_packs of 0 or more. Got {num_packs}. Pass 1 to send all values of a "
            f"dtype together, or 0 to send each on its own."
        )
    return num_packs


def _join(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
