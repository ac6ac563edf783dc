"""One row of an array, `table[i]`, as a lookup of one row number, which is what tables allow.

JAX traces it as a slice that begins at a computed place, and its gradient as zeros of which a slice
is set. Both clamp the place. So does XLA where a gather promises to be in bounds, as JAX does for
`table[ids]`: of a table that is pulled by row, a number outside of it is an error for both alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

_MODE = lax.GatherScatterMode


def as_lookup(
    eqn: Any, values: list[Any], zeros: set[Any], number: Callable[[Any], Any]
) -> list[Any] | None:
    """What an equation computes, by a gather or a scatter-add; None where it is not of one row.

    Args:
        eqn: of a program.
        values: of its operands.
        zeros: variables of that program that are zero everywhere.
        number: makes a row number `[1]` of an index, the same one each time.
    """
    name = eqn.primitive.name
    if name not in ("dynamic_slice", "dynamic_update_slice"):
        return None
    whole, part = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name == "dynamic_update_slice":
        part = eqn.invars[1].aval.shape
    if not whole or part != (1, *whole[1:]):
        return None
    inner = tuple(range(len(whole) - 1))
    if name == "dynamic_slice":
        gathers = lax.GatherDimensionNumbers(inner, (0,), (0,))
        row = lax.gather(values[0], number(values[1]), gathers, part, mode=_MODE.PROMISE_IN_BOUNDS)
        return [jnp.reshape(row, part)]
    if eqn.invars[0] not in zeros:
        return None
    scatters = lax.ScatterDimensionNumbers(inner, (0,), (0,))
    row = jnp.reshape(values[1], whole[1:])
    return [lax.scatter_add(values[0], number(values[2]), row, scatters, mode=_MODE.CLIP)]


def is_zeros(eqn: Any) -> bool:
    """True for an equation that makes zeros."""
    start = eqn.invars[0] if eqn.invars else None
    return (
        eqn.primitive.name == "broadcast_in_dim"
        and isinstance(start, Literal)
        and not bool(start.val)
    )
