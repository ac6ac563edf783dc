"""Ids of a table without a preset size, in a traced step.

A step computes with row numbers of 32 bits; ids are any 64 bits. So a step never sees an id as a
number: it looks rows up at what `row_number` gives, and the worker, which has the ids themselves,
puts the places of their rows in.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

ROWS = (1 << 31) - 1
"""Nominal rows of such a table."""

# Operand `[..., 1]` (int32) or `[..., 2]` (uint32, high and low halves) to `[..., 1]`, int32.
row_number_p = Primitive("row_number")


def lookup(table: Any, ids: Any) -> jax.Array:
    """Rows `[..., dim]` of a table `[ROWS, dim]` in a traced step.

    Args:
        table: the step's value of the variable.
        ids: integers `[...]`, or uint32 `[..., 2]`: the halves of 64 bits, see `halves`.
    """
    wide = is_wide(ids)
    operand = ids if wide else ids.astype(jnp.int32)[..., None]
    numbers = row_number_p.bind(operand)
    dims = jax.lax.GatherDimensionNumbers(
        offset_dims=(numbers.ndim - 1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return jax.lax.gather(
        table, numbers, dims, (1, table.shape[1]),
        mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )  # fmt: skip


def is_wide(ids: Any) -> bool:
    """Whether these are halves of ids."""
    return bool(ids.dtype == np.uint32 and ids.ndim and ids.shape[-1] == 2)


def halves(ids: Any) -> np.ndarray:
    """int64 ids `[...]` as uint32 `[..., 2]`: the high and the low half of each."""
    bits = np.asarray(ids, np.int64).view(np.uint64)
    return np.stack([bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)], -1).astype(np.uint32)


def whole(operand: np.ndarray) -> np.ndarray:
    """int64 ids `[...]` of what `row_number` was given."""
    if operand.shape[-1] == 1:
        return operand[..., 0].astype(np.int64)
    bits = operand.astype(np.uint64)
    return ((bits[..., 0] << np.uint64(32)) | bits[..., 1]).view(np.int64)


@row_number_p.def_abstract_eval
def _abstract(aval: Any) -> Any:
    return jax.core.ShapedArray((*aval.shape[:-1], 1), jnp.dtype("int32"))
