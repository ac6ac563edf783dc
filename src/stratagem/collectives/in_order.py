"""Packs of a given size, one after the other: `CommunicationOptions.bytes_per_pack`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.collectives.abstract import CrossDeviceOps
from stratagem.collectives.cost import Cost, nothing
from stratagem.collectives.packs import nbytes_of


class PacksInOrder(CrossDeviceOps):
    """Makes one all-reduce of other ops for each pack of values, in order.

    The values are taken last first, as in TF: the gradients of the last layers are ready first. A
    value is never cut; a pack is closed once it holds `bytes_per_pack`. Each pack waits for the
    one before it, which also keeps XLA from joining them again.

    Args:
        ops: what reduces a pack.
        bytes_per_pack: at least 1.
    """

    def __init__(self, ops: CrossDeviceOps, bytes_per_pack: int):
        self.ops = ops
        self.bytes_per_pack = bytes_per_pack

    def placed_on(self, devices: Sequence[jax.Device]) -> CrossDeviceOps:
        return PacksInOrder(self.ops.placed_on(devices), self.bytes_per_pack)

    def all_reduce(
        self, values: Sequence[jax.Array], axis_name: str, axis_size: int
    ) -> list[jax.Array]:
        totals: list[Any] = [None] * len(values)
        before: jax.Array | None = None
        for pack in self._packs(values):
            sent = [values[i] for i in pack]
            sent = sent if before is None else [_after(before, value) for value in sent]
            sums = self.ops.all_reduce(sent, axis_name, axis_size)
            before = next((total for total in sums if total.size), before)
            for i, total in zip(pack, sums, strict=True):
                totals[i] = total
        return totals

    def all_gather(self, value: jax.Array, axis_name: str, axis_size: int) -> jax.Array:
        return self.ops.all_gather(value, axis_name, axis_size)

    def cost(self, values: Sequence[Any], axis_size: int) -> Cost:
        total = nothing(axis_size)
        for pack in self._packs(values):
            total += self.ops.cost([values[i] for i in pack], axis_size)
        return total

    def _packs(self, values: Sequence[Any]) -> list[list[int]]:
        """Positions of the values of each pack."""
        packs: list[list[int]] = []
        held = self.bytes_per_pack
        for i in reversed(range(len(values))):
            if held >= self.bytes_per_pack:
                packs.append([])
                held = 0
            packs[-1].append(i)
            held += nbytes_of(values[i])
        return packs


def _after(before: jax.Array, value: jax.Array) -> jax.Array:
    """The value, in a form that XLA cannot compute before a sum of the pack before it.

    XLA joins all-reduces that do not depend on each other, and drops its own barrier
    (`jax.lax.optimization_barrier`) before it does. So the dependency is one of data: a number
    that is always 0, which XLA does not know.
    """
    number = jnp.ravel(before)[0]
    zero = jax.lax.clamp(0, (number == number).astype(jnp.int32), 0)
    return jnp.where(zero == 0, value, jnp.zeros_like(value))
