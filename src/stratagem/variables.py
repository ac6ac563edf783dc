"""Where a Keras variable lives under a strategy, and what its value is on each replica.

A mirrored variable is one `jax.Array`, replicated over the strategy's devices, in Keras' own
slot. A variable that synchronises on read has one component a replica, kept as one array
`[replicas, ...]`; what Keras sees as its value is the aggregate of the components.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import context
from stratagem.errors import StrategyMismatchError
from stratagem.values import PerReplica


class VariableAggregation(enum.Enum):
    """How the values that replicas write to one variable combine (tf.VariableAggregation)."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3

    @property
    def keras_name(self) -> str:
        """The name that `keras.Variable(aggregation=...)` takes."""
        return self.name.lower()


class VariableSynchronization(enum.Enum):
    """When the components of a variable combine (tf.VariableSynchronization)."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3

    @property
    def keras_name(self) -> str:
        """The name that `keras.Variable(synchronization=...)` takes."""
        return self.name.lower()


@dataclasses.dataclass(frozen=True)
class Home:
    """The strategy that a variable belongs to, and the user's line that put it there."""

    strategy: Any
    made_at: str


def home(variable: Any) -> Home | None:
    """The variable's home, None when it never met a strategy."""
    return getattr(variable, "_stratagem_home", None)


def is_on_read(variable: Any) -> bool:
    """True when each replica keeps a component of its own, if only within a step.

    A central variable that nothing aggregates is one value, which no component can change.
    """
    if variable.synchronization != "on_read":
        return False
    where = home(variable)
    return where is None or not where.strategy.central or variable.aggregation != "none"


def is_statistic(variable: Any) -> bool:
    """True for the float statistics of Keras layers (BatchNormalization), averaged on write."""
    return getattr(variable, "_stratagem_statistic", False)


def mark_statistic(variable: Any) -> None:
    """Declares a layer's non-trainable float weight without an aggregation a statistic."""
    is_float = jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating)
    if is_float and not variable.trainable and variable.aggregation == "none":
        variable._stratagem_statistic = True


def is_replicated_metric(variable: Any) -> bool:
    """True for the state of a metric that every replica updates alike with the whole batch."""
    return getattr(variable, "_stratagem_replicated", False)


def mark_replicated_metric(variable: Any) -> None:
    """Declares an on-read variable's components equal; its value stays. Outside any trace."""
    value = variable._value
    variable._stratagem_replicated = True
    variable._value = value


def read_aggregation(variable: Any) -> str:
    """How the components of an on-read variable combine when it is read."""
    return "only_first_replica" if is_replicated_metric(variable) else variable.aggregation


def refuse_shards(found: Iterable[Any]) -> None:
    """Raises TypeError for parts of a variable (`ShardedVariable.variables`) where it is needed."""
    for part in found:
        if (whole := getattr(part, "part_of", None)) is not None:
            raise TypeError(
                f"Expected variables. Got {part.name!r}, the rows {part.start} to {part.stop - 1} "
                f"of the variable {whole.path!r}. Pass the variable itself: it has one gradient, "
                "and an optimizer's servers change the rows that each of them has."
            )


def check_declaration(variable: Any) -> None:
    """Refuses what TF refuses when a variable is created in a strategy's scope.

    Raises:
        ValueError: synchronization NONE, or MEAN of an integer variable.
    """
    if variable.synchronization == "none":
        raise ValueError(
            f"Expected synchronization 'auto', 'on_write' or 'on_read' for variable "
            f"{variable.path!r} in a strategy's scope. Got 'none'. Create it outside the scope if "
            "the strategy shall not manage it."
        )
    if variable.aggregation == "mean" and not jnp.issubdtype(
        jnp.dtype(variable.dtype), jnp.inexact
    ):
        raise ValueError(
            f"Expected a float dtype for variable {variable.path!r} with aggregation 'mean'. Got "
            f"{variable.dtype}. Use aggregation 'sum' or 'only_first_replica', or a float dtype."
        )


def adopt(variable: Any, strategy: Any, *, created: bool) -> None:
    """Gives a variable its home and lays its value out there.

    Args:
        variable: without a home.
        strategy: its home from now on.
        created: True when it is being created in the strategy's scope: then, as in TF, each
            component of an on-read variable starts with the initial value; otherwise the value is
            the aggregate that the components must keep.
    """
    variable._stratagem_home = Home(strategy, user_line())
    if strategy.served:
        strategy.take(variable)
        return
    value = variable._value
    several = strategy.num_replicas_in_sync > 1 or strategy.keeps_state  # others may join
    if is_on_read(variable) and several and not strategy.central:
        variable.__dict__.pop("_value")
        variable.__class__ = _on_read_class(variable.__class__)
        if value is not None and created:
            replicas = strategy.num_replicas_in_sync
            first = np.asarray(strategy.local_view(strategy.place_first(value)))
            variable.components = strategy.place_stacked(
                np.broadcast_to(first, (replicas, *first.shape))
            )
        else:
            variable._value = None if value is None else strategy.place_first(value)
    elif value is not None:
        variable._value = strategy.place_first(value)


def adopt_all(found: Iterable[Any], strategy: Any) -> None:
    """Moves homeless variables into a strategy, and refuses those of other strategies.

    The default strategy owns none: it computes with the values of all.

    Raises:
        StrategyMismatchError: lists every variable that belongs to another strategy.
    """
    if context.is_default(strategy):
        return
    foreign = []
    for variable in found:
        where = home(variable)
        if where is None:
            adopt(variable, strategy, created=False)
        elif where.strategy not in (strategy, strategy.stands_for):
            foreign.append(f"  {variable.path}: made under {where.strategy!r} at {where.made_at}")
    if foreign:
        raise StrategyMismatchError(
            f"Expected variables of {strategy!r}. Got {len(foreign)} of another strategy:\n"
            + "\n".join(foreign)
            + "\nMake one strategy object and use it for the model, the optimizer and run, or "
            "build the model anew in this strategy's scope."
        )


@functools.cache
def _on_read_class(base: Any) -> Any:
    """The class of a variable of class `base` that keeps components.

    Keras' `_value` slot becomes their aggregate. Either the components or the aggregate that was
    assigned is there; the other is made on demand, so that an aggregate that goes through Keras
    and back stays exact.
    """

    class SyncOnReadVariable(base):
        _aggregate: Any = None
        _components: Any = None

        def __repr__(self) -> str:
            # Not through `_value`: there may be no aggregate.
            for name, held in (("components", self._components), ("value", self._aggregate)):
                if held is not None and not held.is_deleted():
                    return f"<Variable {describe(self)}, {name}={np.asarray(held).tolist()}>"
            return f"<Variable {describe(self)}>"

        @property
        def components(self) -> Any:
            """One component a replica, `[replicas, ...]`, on the replicas' devices."""
            strategy = home_strategy(self)
            if self._components is not None:  # the replicas may be others than before
                self._components = strategy.place_components(self, self._components)
            elif self._aggregate is not None:
                self._components = strategy.place_stacked(
                    spread(self._aggregate, read_aggregation(self), strategy.num_replicas_in_sync)
                )
            return self._components

        @components.setter
        def components(self, stacked: Any) -> None:
            self._components = stacked
            self._aggregate = None

        @property
        def _value(self) -> Any:
            if self._aggregate is None and self._components is not None:
                self._aggregate = join(self.components, self)
            return self._aggregate

        @_value.setter
        def _value(self, value: Any) -> None:
            self._aggregate = None if value is None else home_strategy(self).place(value)
            self._components = None

    return SyncOnReadVariable


def has_components(variable: Any) -> bool:
    """True for an on-read variable that has more than one component, outside a program."""
    return hasattr(type(variable), "components")


def held_components(variable: Any) -> Any:
    """The components `[replicas, ...]` that an on-read variable holds.

    None for other variables, and where what it holds is an aggregate that was assigned.
    """
    return getattr(variable, "_components", None)


def add_to_components(variable: Any, delta: Any) -> Any:
    """Adds to each component of an on-read variable, in cross-replica context.

    Returns:
        The new aggregate; the components as PerReplica where there is none.

    Raises:
        ValueError: the components are summed, so that it is unknown how they share the delta.
    """
    if read_aggregation(variable) == "sum":
        raise ValueError(no_cross_replica_add(variable))
    strategy = home_strategy(variable)
    variable.components = strategy.place_stacked(variable.components + strategy.place(delta))
    if read_aggregation(variable) == "none":
        return PerReplica.from_stacked(variable.components)
    return variable._value


def no_cross_replica_add(variable: Any) -> str:
    """The text of the error for an assign_add that no replica makes."""
    return (
        f"Expected assign_add or assign_sub on {describe(variable)} inside strategy.run, where "
        "each replica adds to its own component. Got it in cross-replica context, where the share "
        "of each replica is unknown. Do it (or the metric's update_state) in the function that "
        "strategy.run calls, or use assign for the aggregate."
    )


def home_strategy(variable: Any) -> Any:
    """The strategy of a variable that has one."""
    return variable._stratagem_home.strategy


def join(components: jax.Array, variable: Any) -> jax.Array:
    """The aggregate of `[replicas, ...]` components.

    Raises:
        ValueError: the variable has no aggregation to read it by.
    """
    how = read_aggregation(variable)
    components = home_strategy(variable).whole(components)
    if how == "sum":
        return _sum(components)
    if how == "mean":
        return _mean(components)
    if how == "only_first_replica":
        return components[0]
    raise ValueError(no_read_aggregation(variable))


def no_read_aggregation(variable: Any) -> str:
    """The text of the error for an on-read variable that has no aggregate."""
    return (
        f"Expected an aggregation for variable {variable.path!r} (synchronization 'on_read') to "
        "read it outside a replica. Got aggregation 'none'. Create it with aggregation='sum', "
        "'mean' or 'only_first_replica'."
    )


@jax.jit
def _sum(components: jax.Array) -> jax.Array:
    return jnp.sum(components, axis=0, dtype=components.dtype)


@jax.jit
def _mean(components: jax.Array) -> jax.Array:
    return jnp.mean(components, axis=0).astype(components.dtype)


def spread(aggregate: Any, aggregation: str, replicas: int) -> Any:
    """Components `[replicas, ...]` whose aggregate is the given value.

    A sum is divided evenly, as in TF; an integer sum that does not divide is kept whole by
    giving the remainder to replica 0.
    """
    value = np.asarray(aggregate)
    if aggregation != "sum":
        return np.broadcast_to(value, (replicas, *value.shape))
    if np.issubdtype(value.dtype, np.integer):
        share, rest = np.divmod(value, replicas)
        stacked = np.broadcast_to(share, (replicas, *value.shape)).copy()
        stacked[0] += rest
        return stacked.astype(value.dtype)
    return np.broadcast_to(value / np.asarray(replicas, value.dtype), (replicas, *value.shape))


def local_spec(variable: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype that one replica sees."""
    return jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(variable._dtype))


def stand_in(variable: Any) -> jax.Array:
    """A value of the right shape, for the attempt at a trace that discovers the variable."""
    return jnp.zeros(tuple(variable.shape), jnp.dtype(variable._dtype))


def user_line() -> str:
    """`file:line` of the innermost frame outside Stratagem, Keras and JAX."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_user_frame(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def is_user_frame(frame: Any) -> bool:
    """True for a frame outside Stratagem, Keras and JAX."""
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    return module not in {"stratagem", "keras", "jax", "contextlib"}


def describe(variable: Any) -> str:
    """How error texts name a variable."""
    return (
        f"{variable.path!r} (shape {tuple(variable.shape)}, {variable._dtype}, aggregation "
        f"{variable.aggregation!r}, synchronization {variable.synchronization!r})"
    )
