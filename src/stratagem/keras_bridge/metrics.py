"""Metrics: summed over replicas where that is exact, else updated with the whole batch.

Every Keras metric of the library adds up counts; its state is summed in the step's all-reduce. A
user's metric may keep anything: a running variance, a maximum, the ratio of the last batch, a mean
of the batches' means. `additive.py` finds out. Where a sum would be wrong, every replica gathers
the rows that the metric is given and makes the update that one device would make; the state is
then the same on all replicas. Where workers take the batches, this process makes it.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem import _keras, context, variables
from stratagem.keras_bridge import additive, postponed
from stratagem.keras_bridge.hooks import replicated_trace, wrap
from stratagem.keras_bridge.variables import outside_trace
from stratagem.step import effects
from stratagem.step.replica import all_gather
from stratagem.step.trace import synchronized

_log = logging.getLogger("stratagem")
_updating: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "stratagem_metric_update", default=False
)
# For each metric, by the shapes of its arguments: True where it may be summed.
_verdicts: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Attaches the bridge to Keras' metrics."""
    wrap(keras.Metric, "__init__", _create)
    wrap(keras.Metric, "add_variable", _add_variable)


def attach(metric: Any) -> None:
    """Wraps the `update_state` of a metric's class, unless the metric only holds others."""
    if not isinstance(metric, _keras.METRIC_CONTAINERS):
        wrap(type(metric), "update_state", _update)


def _create(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    attach(self)


def _add_variable(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A metric starts from its initial value, not from one initial value a replica."""
    variable = original(self, *args, **kwargs)
    components = getattr(variable, "components", None)
    if components is not None and variable.aggregation == "sum":
        with outside_trace():
            variable._value = components[0]
    return variable


def _update(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    frame = replicated_trace()
    if _updating.get():
        return original(self, *args, **kwargs)
    if frame is None:
        return _update_on_worker(original, self, *args, **kwargs)
    with _inside():
        leaves, tree = jax.tree.flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf)]
        if _may_sum(original, self, leaves, where, tree, frame):
            return original(self, *args, **kwargs)
        _mark(self, frame)
        leaves = _whole_batch(self, leaves, where, frame)
        args, kwargs = jax.tree.unflatten(tree, leaves)
        with synchronized(frame):
            return original(self, *args, **kwargs)


def _update_on_worker(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Where workers take the batches, what they add to a metric is added up."""
    frame, later = context.current(), postponed.current()
    if frame.trace is None or not frame.strategy.served:
        return original(self, *args, **kwargs)
    with _inside():
        leaves, tree = jax.tree.flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf)]
        of_parts = later is not None and later.parts
        if _adds(original, self, leaves, where, tree, frame, of_parts):
            return original(self, *args, **kwargs)
    if later is None:
        raise ValueError(
            f"Expected metrics whose updates add to their state, since workers begin theirs at "
            f"zero and what they have is added up. Got {self.name!r} ({type(self).__name__}), "
            "whose update does something else with it. Return what it needs from the scheduled "
            "function, and update it in the program; or use fit and evaluate, which do."
        )
    return later.take(self, tree, leaves, where)


def _adds(
    original: Any, metric: Any, leaves: list[Any], where: list[int], tree: Any, frame: Any,
    of_parts: bool,
) -> bool:  # fmt: skip
    """True when a metric is what batches, or their parts, add to it."""
    if not where or _adds_by_design(original, metric):
        return True
    rows = of_parts and all(leaves[i].shape for i in where)
    return _verdict(original, metric, leaves, where, tree, frame, rows)


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    """Updates that an update calls (its base class', inner metrics') are part of it."""
    token = _updating.set(True)
    try:
        yield
    finally:
        _updating.reset(token)


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _may_sum(
    original: Any, metric: Any, leaves: list[Any], where: list[int], tree: Any, frame: Any
) -> bool:
    """True when the metric's parts, updated with the replicas' rows, add up to its state."""
    if any(variables.is_replicated_metric(v) for v in metric.variables):
        return False
    scalars = [i for i in where if not leaves[i].shape]
    if scalars:
        return _may_sum_scalars(original, metric, leaves, where, tree, frame)
    if any(v.aggregation != "sum" for v in metric.variables):
        return False
    if not where or _adds_by_design(original, metric):
        return True
    return _verdict(original, metric, leaves, where, tree, frame, rows=True)


def _may_sum_scalars(
    original: Any, metric: Any, leaves: list[Any], where: list[int], tree: Any, frame: Any
) -> bool:
    """Numbers computed by the replica, such as its loss.

    In `fit`, a Mean of them without weights counts batches: it takes the batch's value, which is
    the average by rows. With weights (the number of rows) its parts add up, as do other metrics'.
    A number that is a sum over the replica's rows belongs in a Sum: it cannot be told from a mean.
    """
    counts_batches = isinstance(metric, keras.metrics.Mean) and len(leaves) == 1
    if frame.trace.rows.weight is not None and counts_batches:
        return False
    return _adds_by_design(original, metric) or _examine(
        original, metric, leaves, where, tree, frame, rows=False
    )


def _adds_by_design(original: Any, metric: Any) -> bool:
    """True for Keras' own updates (a test tries them all) that call no function of others."""
    if not original.__module__.startswith("keras.src.metrics"):
        return False
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        fn = metric._fn
        ours = inspect.isfunction(fn) and fn.__module__.startswith("keras.src.")
        return ours and metric._fn_kwargs.get("axis", -1) == -1
    return True


def _verdict(
    original: Any, metric: Any, leaves: list[Any], where: list[int], tree: Any, frame: Any,
    rows: bool,
) -> bool:  # fmt: skip
    """As `_examine`, once for a metric and the shapes of its arguments."""
    key = (rows, tree, *((leaf.shape[1:], str(leaf.dtype)) if _is_tensor(leaf) else leaf
                         for leaf in leaves))  # fmt: skip
    known = _verdicts.setdefault(metric, {})
    if key not in known:
        known[key] = _examine(original, metric, leaves, where, tree, frame, rows)
    return known[key]


def _examine(
    original: Any, metric: Any, leaves: list[Any], where: list[int], tree: Any, frame: Any,
    rows: bool,
) -> bool:  # fmt: skip
    """Asks additive.py about one metric and the shapes of its arguments."""

    def rebuild(tensors: list[Any]) -> tuple[Any, Any]:
        filled = list(leaves)
        for i, tensor in zip(where, tensors, strict=True):
            filled[i] = tensor
        return jax.tree.unflatten(tree, filled)

    def update(state: list[Any], tensors: list[Any]) -> list[Any]:
        args, kwargs = rebuild(tensors)
        scope = keras.StatelessScope(list(zip(metric.variables, state, strict=True)))
        with scope:
            original(metric, *args, **kwargs)
        return [jnp.asarray(scope.get_current_value(v)) for v in metric.variables]

    tensors = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in where]
    with synchronized(frame):
        if not metric.variables:
            jax.make_jaxpr(lambda given: update([], given) and None)(tensors)  # creates them
        state = [variables.local_spec(v) for v in metric.variables]
        closed = jax.make_jaxpr(update)(state, tensors)
        if not additive.adds_to_old_state(closed, len(state)):
            return False
        if not rows:
            return True
        with outside_trace():
            return additive.adds_over_rows(update, state, tensors)


def _mark(metric: Any, frame: Any) -> None:
    """Declares the metric's state the same on all replicas; the step is then traced anew."""
    new = [v for v in metric.variables if not variables.is_replicated_metric(v)]
    if not new:
        return
    _log.info(
        "metric %r is not a sum over rows: each replica gathers the rows of the whole batch for it",
        metric.name,
    )
    with outside_trace():
        for variable in new:
            variables.mark_replicated_metric(variable)
    frame.trace.facts.dirty = True


def _whole_batch(metric: Any, leaves: list[Any], where: list[int], frame: Any) -> list[Any]:
    """The arguments as one device would see them: all rows, and scalars averaged by rows."""
    leaves = list(leaves)
    for i in where:
        leaf = leaves[i]
        if leaf.shape:
            leaves[i] = _gather(leaf, frame)
            continue
        real = jnp.issubdtype(leaf.dtype, jnp.floating)
        if frame.trace.rows.weight is None or not real:
            raise ValueError(
                f"Expected tensors with rows to update metric {metric.name!r} "
                f"({type(metric).__name__}), whose state is not a sum over rows. Got a scalar "
                f"{leaf.dtype}, of which each replica has its own. Give it the rows, or combine "
                "the scalars with strategy.reduce and update it outside strategy.run."
            )
        (leaves[i],) = effects.average_rows([leaf], frame)
    return leaves


def _gather(leaf: Any, frame: context.Frame) -> Any:
    rows = all_gather(jnp.asarray(leaf), 0, frame)
    mask = _keras.get_keras_mask(leaf)
    if mask is not None:
        _keras.set_keras_mask(rows, all_gather(jnp.asarray(mask), 0, frame))
    return rows
