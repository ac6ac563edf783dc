"""The default strategy: what is current when nothing was entered. It distributes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem import context
from stratagem.collectives import NcclAllReduce
from stratagem.data import InputContext, ValueContext
from stratagem.step.execute import Executor
from stratagem.step.replica import ReplicaContext
from stratagem.strategies.abstract import Strategy
from stratagem.strategies.layout import canonical
from stratagem.strategies.reductions import reduce_leaf
from stratagem.values import ReduceOp, map_leaves


class DefaultStrategy(Strategy):
    """One replica, wherever JAX puts it. `get_strategy()` returns the only instance.

    It exists so that code written against a strategy runs, and can be tested, without one.
    """

    mesh: Any = None
    local_replicas = range(1)
    spans = False
    layouts = (None, None)

    def __init__(self) -> None:
        # No devices are asked for: importing stratagem must not start a backend.
        if context.has_default():
            raise RuntimeError(
                "Expected stratagem.get_strategy() for the default strategy. Got a call of its "
                "constructor. There is one instance."
            )
        self.cross_device_ops = NcclAllReduce()
        self._one = True
        self.replica_context = ReplicaContext(self, 0)
        self._run = Executor(self, self.replica_context)
        self._call = Executor(self, None)

    def place(self, value: Any) -> jax.Array:
        """Wherever JAX puts it."""
        return jnp.asarray(canonical(value))

    def place_stacked(self, stacked: Any) -> jax.Array:
        """Wherever JAX puts it."""
        return jnp.asarray(canonical(stacked))

    @property
    def num_replicas_in_sync(self) -> int:
        """One."""
        return 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Not available: the default strategy names no device."""
        raise RuntimeError(
            "Expected a strategy with devices. Got the default strategy, which leaves placement "
            "to JAX. Use stratagem.OneDeviceStrategy(device)."
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Does nothing, and does not count as a strategy being entered."""
        if context.has_strategy():
            raise RuntimeError(
                "Expected the default strategy's scope outside other scopes. Got it inside the "
                f"scope of {context.get_strategy()!r}. Leave that scope instead."
            )
        yield self

    def _check_may_enter(self, what: str) -> None:
        if context.has_strategy():
            super()._check_may_enter(what)

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None
    ) -> Any:
        """The value itself; with an axis, reduced over it."""
        op = ReduceOp.from_value(reduce_op)
        if axis is None:
            return value
        return map_leaves(lambda leaf: reduce_leaf(self, op, leaf, axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """The value itself."""
        del axis
        return value

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The dataset itself."""
        del options
        return dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Any:
        """What `dataset_fn(InputContext())` returns."""
        del options
        return dataset_fn(InputContext())

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(self, value_fn: Callable[[Any], Any]) -> Any:
        """`value_fn(ValueContext())`, bare."""
        return value_fn(ValueContext())

    def __repr__(self) -> str:
        return "<the default strategy>"
