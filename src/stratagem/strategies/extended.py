"""What TF keeps in `strategy.extended`: changing variables and reducing to a destination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem import context, variables
from stratagem.collectives.eager import check_destinations, check_pairs, place
from stratagem.errors import ReplicaDependentWriteError
from stratagem.step.trace import LocalValue, synchronized
from stratagem.values import Mirrored, PerReplica, ReduceOp, is_distributed, map_leaves


class Extended:
    """Methods of every strategy that few programs need; `strategy.extended` is the strategy.

    Mixed into Strategy alone, which has what `self` is asked for here.
    """

    def variable_created_in_scope(self: Any, variable: Any) -> bool:
        """True when the variable belongs to this strategy."""
        where = variables.home(variable)
        return where is not None and where.strategy is self

    def update(
        self: Any, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None,
        group: bool = True,
    ) -> Any:  # fmt: skip
        """Calls `fn(var, *args)` to change a variable alike on all replicas.

        Args:
            var: a variable of this strategy.
            fn: changes it.
            args: Mirrored values, or PerReplica values whose parts are equal.
            kwargs: likewise.
            group: True returns one Mirrored result, False one result a replica.

        Raises:
            ReplicaDependentWriteError: the parts of an argument differ.
            StrategyMismatchError: the variable belongs to another strategy.
            ValueError: the variable synchronises on read.
        """
        self._check_may_enter("update")
        self._check_may_update(var)
        args, kwargs = map_leaves(lambda x: _same_part(x, var), (tuple(args), dict(kwargs or {})))
        frame = context.current()
        if frame.trace is not None:
            with synchronized(frame):
                return fn(var, *args, **kwargs)
        result = fn(var, *args, **kwargs)
        if self.central:  # one variable, one update
            return result if group else (result,)
        parts = (result,) * self.num_replicas_in_sync
        return Mirrored(parts) if group and not self._one else parts if not group else result

    def _check_may_update(self: Any, var: Any) -> None:
        if not isinstance(var, keras.Variable):
            raise TypeError(
                f"Expected a keras.Variable to update. Got {type(var).__name__}. Pass the "
                "variable, not its value."
            )
        if context.current().trace is None:  # else the finished trace sees to it
            variables.adopt_all([var], self)
        if variables.is_on_read(var) and not self._one and not self.central:
            raise ValueError(
                f"Expected a mirrored variable to update. Got {variables.describe(var)}, whose "
                "components need not be equal. Write it inside strategy.run, or assign its "
                "aggregate."
            )

    def reduce_to(
        self: Any, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Reduces a PerReplica value to where `destinations` lives.

        Args:
            reduce_op: SUM or MEAN.
            value: PerReplica.
            destinations: a variable or distributed value (gives a Mirrored result), or an array,
                a device string or a list of them (gives a tensor, of several devices Mirrored).
            options: accepted for TF's sake.
        """
        del options
        check_destinations(destinations)
        total = self.reduce(reduce_op, value, axis=None)
        if context.current().trace is not None:
            return total
        if is_replicated(destinations):
            return total if self._one else map_leaves(self._mirror, total)
        return map_leaves(lambda leaf: place(leaf, destinations), total)

    def _mirror(self: Any, value: Any) -> Mirrored:
        return Mirrored([jax.device_put(value, d) for d in self._devices])

    def batch_reduce_to(
        self: Any, reduce_op: ReduceOp | str, value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:  # fmt: skip
        """`reduce_to` for several `(value, destinations)` pairs."""
        pairs = check_pairs(value_destination_pairs)
        return [self.reduce_to(reduce_op, v, d, options) for v, d in pairs]


def is_replicated(value: Any) -> bool:
    """True for what has a part on each replica: distributed values and variables."""
    return is_distributed(value) or isinstance(value, keras.Variable)


def _same_part(leaf: Any, var: Any) -> Any:
    if isinstance(leaf, LocalValue):
        return leaf.local
    if isinstance(leaf, Mirrored):
        return leaf.value
    if isinstance(leaf, PerReplica):
        first, *rest = (np.asarray(v) for v in leaf.values)
        if any(not np.array_equal(first, other, equal_nan=True) for other in rest):
            raise ReplicaDependentWriteError(
                f"Expected the same value on all replicas to update {variables.describe(var)}. "
                f"Got {leaf!r}. Reduce it first: strategy.reduce('SUM', value, axis=None)."
            )
        return jnp.asarray(first)
    return leaf
