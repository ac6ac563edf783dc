"""Equations that take or change whole rows, the first dimension of their operand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import Literal

from stratagem.step.flatten import Equation

_AS_IT_IS = ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type")  # it keeps numbers


def keeps_rows(eqn: Equation) -> bool:
    """True for a change of shape that leaves the first dimension what it is."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if before[:1] != after[:1] or len(eqn.invars) != 1:
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return eqn.params["broadcast_dimensions"][:1] == (0,)
    return eqn.params.get("dimensions") is None and np.prod(before[1:]) == np.prod(after[1:])


def gathers_rows(eqn: Equation) -> bool:
    """True for a gather of whole rows, by row numbers `[..., 1]`."""
    table, ids = eqn.invars[0].aval, eqn.invars[1].aval
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    return (
        numbers.start_index_map == (0,)
        and numbers.collapsed_slice_dims == (0,)
        and not numbers.operand_batching_dims
        and tuple(sizes) == (1, *table.shape[1:])
        and ids.shape[-1:] == (1,)
    )


def scatters_rows(eqn: Equation) -> bool:
    """True for a scatter-add of whole rows."""
    numbers = eqn.params["dimension_numbers"]
    return (
        numbers.scatter_dims_to_operand_dims == (0,)
        and numbers.inserted_window_dims == (0,)
        and not numbers.operand_batching_dims
    )


def gather(eqn: Equation, rows: Any, where: Any) -> Any:
    """The gather from other rows, at other places `[..., 1]`, which are in bounds."""
    p = eqn.params
    return lax.gather(
        rows, where, p["dimension_numbers"], p["slice_sizes"],
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )  # fmt: skip


def scatter(eqn: Equation, rows: Any, where: Any, updates: Any) -> Any:
    """The scatter-add to other rows, at other places `[..., 1]`, which are in bounds."""
    return lax.scatter_add(
        rows, where, updates, eqn.params["dimension_numbers"],
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )  # fmt: skip


def counts_from_end(ids: Any, producer: Mapping[Any, Equation]) -> bool:
    """True for row numbers of which the negative ones had the number of rows added to them.

    That is `select_n(n < 0, n, n + rows)`, as JAX indexes, in another shape or dtype perhaps.
    """
    eqn = producer.get(ids)
    while eqn is not None and eqn.primitive.name in _AS_IT_IS:
        eqn = producer.get(eqn.invars[0])
    if eqn is None or eqn.primitive.name != "select_n":
        return False
    negative, number, added = eqn.invars
    test, total = producer.get(negative), producer.get(added)
    if test is None or total is None:
        return False
    return (
        (test.primitive.name, total.primitive.name) == ("lt", "add")
        and test.invars[0] is number is total.invars[0]
        and isinstance(test.invars[1], Literal)
        and not np.any(test.invars[1].val)
    )
