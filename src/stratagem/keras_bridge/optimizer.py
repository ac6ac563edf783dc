"""Gradients meet here: every Keras optimizer goes through `apply`, and so does every replica."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from stratagem import _keras, context, variables
from stratagem.keras_bridge.hooks import replicated_trace, wrap
from stratagem.step import effects, numerics, primitives
from stratagem.step.trace import synchronized
from stratagem.strategies.remote import slot_of


def install() -> None:
    """Attaches the bridge to Keras' optimizers."""
    wrap(_keras.BaseOptimizer, "apply", _apply)
    wrap(_keras.BaseOptimizer, "stateless_apply", _stateless_apply)
    wrap(_keras.BaseOptimizer, "add_variable_from_reference", _add_slot)
    wrap(_keras.LossScaleOptimizer, "apply", _apply_scaled)
    wrap(_keras.LossScaleOptimizer, "stateless_apply", _stateless_apply)


def combine(grads: Sequence[Any], frame: context.Frame) -> list[Any]:
    """The replicas' gradients as one: summed in `run` (as TF does), averaged by rows in `fit`.

    It happens before unscaling, clipping and weight decay, so that all of those see the gradient
    of the global batch, and an overflow on any replica is an overflow on all.
    """
    present = [g for g in grads if g is not None]
    if frame.trace.rows.weight is None:
        combined = primitives.all_reduce(present, ["sum"] * len(present), frame)
    else:
        combined = effects.average_rows(present, frame)
    remaining = iter(combined)
    return [None if g is None else next(remaining) for g in grads]


def _named(optimizer: Any, grads: Sequence[Any], trainable: Sequence[Any] | None = None) -> Any:
    """The gradients, under the names that step/numerics.py reports when it is asked to."""
    return numerics.name_gradients(list(grads), trainable or optimizer._trainable_variables)


def _arrived(grads: Sequence[Any]) -> list[Any]:
    """Says where the update begins, where others make it (step/split.py, step/apart.py)."""
    frame = context.current()
    if frame.trace is None or not (frame.strategy.central or frame.strategy.served):
        return list(grads)
    if frame.strategy.served and frame.strategy.late_gradients == "divide":
        late = primitives.given("staleness", (), (), "float32")
        grads = [None if g is None else g / late.astype(jnp.asarray(g).dtype) for g in grads]
    return [None if g is None else primitives.arrived(jnp.asarray(g)) for g in grads]


def _served() -> contextlib.AbstractContextManager[None]:
    """Within an optimizer, servers compute what is added to a variable, not only the sum."""
    frame = context.current()
    if frame.trace is None or not frame.strategy.served:
        return contextlib.nullcontext()
    return synchronized(frame)


def _apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    variables.refuse_shards(trainable_variables or ())
    frame = replicated_trace()
    if frame is None:
        grads = _arrived(_named(self, grads, trainable_variables))
        with _served():
            return original(self, grads, trainable_variables)
    grads = _arrived(combine(_named(self, grads, trainable_variables), frame))
    with synchronized(frame):
        return original(self, grads, trainable_variables)


def _stateless_apply(
    original: Any, self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
) -> Any:
    frame = replicated_trace()
    if frame is None:
        grads = _arrived(_named(self, grads))
        with _served():
            return original(self, optimizer_variables, grads, trainable_variables)
    grads = _arrived(combine(_named(self, grads), frame))
    with synchronized(frame):
        return original(self, optimizer_variables, grads, trainable_variables)


def _apply_scaled(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Loss scaling in a custom loop: Keras' stateful form cannot branch in a traced step."""
    variables.refuse_shards(trainable_variables or ())
    frame = context.current()
    if frame.trace is None:
        return original(self, grads, trainable_variables)
    if not self.built:
        self.build(list(trainable_variables))
    trainable, own = list(self._trainable_variables), list(self.variables)
    new_trainable, new_own = self.stateless_apply(
        [v.value for v in own], list(grads), [v.value for v in trainable]
    )
    with synchronized(frame):
        for variable, value in zip([*trainable, *own], [*new_trainable, *new_own], strict=True):
            variable.assign(value)
    return None


def _add_slot(original: Any, self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """On parameter servers a slot lives beside its variable."""
    variables.refuse_shards([reference_variable])
    with slot_of(reference_variable):
        return original(self, reference_variable, *args, **kwargs)
