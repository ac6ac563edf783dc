"""Keras variables meet the current strategy: at creation, at reads, and at each assign."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from stratagem import _keras, context, variables
from stratagem.keras_bridge.hooks import wrap
from stratagem.step import effects, primitives
from stratagem.strategies.remote import is_remote
from stratagem.strategies.tallied import alone, is_tallied
from stratagem.values import check_integers
from stratagem.variables import VariableAggregation, VariableSynchronization


def install() -> None:
    """Attaches the bridge to Keras' variable class and to Layer.add_weight."""
    cls = _keras.JaxVariable
    wrap(cls, "__init__", _create)
    wrap(cls, "_convert_to_tensor", _convert_to_tensor)
    wrap(cls, "_direct_assign", _direct_assign)
    wrap(cls, "_deferred_initialize", _deferred_initialize)
    wrap(cls, "_initialize_with_initializer", _initialize_with_initializer)
    wrap(cls, "assign", _assign)
    wrap(cls, "assign_add", _assign_add)
    wrap(cls, "assign_sub", _assign_sub)
    wrap(_keras.Layer, "add_weight", _add_weight)
    if "value" not in vars(cls):
        _keras_value = cls.value
        cls.value = property(lambda self: _read(_keras_value.fget, self), doc=_keras_value.__doc__)


def _create(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # TF's enums are welcome where Keras takes the names of their members.
    for name in ("aggregation", "synchronization"):
        if _is_rule(kwargs.get(name)):
            kwargs[name] = kwargs[name].keras_name
    frame = context.current()
    if frame.trace is None:
        original(self, *args, **kwargs)
    else:
        _check_initial_value(args[0] if args else kwargs.get("initializer"))
        with outside_trace():
            original(self, *args, **kwargs)
    if context.has_strategy():
        variables.check_declaration(self)
        with outside_trace() if frame.trace is not None else contextlib.nullcontext():
            variables.adopt(self, frame.strategy, created=True)


def _check_initial_value(initializer: Any) -> None:
    if isinstance(initializer, jax.core.Tracer):
        raise ValueError(
            "Expected an initial value that is known while the step is traced. Got a tensor that "
            f"the step computes, {initializer}. Pass a number, a NumPy array or a function such as "
            "initializer='zeros' with a shape, or create the variable outside the step."
        )


def _is_rule(value: Any) -> bool:
    return isinstance(value, (VariableAggregation, VariableSynchronization))


@contextlib.contextmanager
def outside_trace() -> Iterator[None]:
    """A variable made while a step is traced gets its initial value at once, once."""
    attribute = "stateless_scope"
    scope = _keras.global_state.get_global_attribute(attribute)
    _keras.global_state.set_global_attribute(attribute, None)
    try:
        with jax.ensure_compile_time_eval():
            yield
    finally:
        _keras.global_state.set_global_attribute(attribute, scope)


def _read(original: Any, self: Any) -> Any:
    frame = context.current()
    if frame.trace is not None:
        scope = _keras.get_stateless_scope()
        # Keras' own stateless scopes map only the state they were given; anything else that a
        # step reads is an input of the program all the same.
        if scope is not None and scope.get_current_value(self) is None:
            return self._maybe_autocast(frame.trace.scope.get_current_value(self))
        return original(self)
    where = variables.home(self)
    if where is not None and where.strategy.spans and not _keras.in_stateless_scope():
        # Outside of steps each process computes for itself, with the value that all have.
        return where.strategy.local_view(original(self))
    return original(self)


def _convert_to_tensor(original: Any, self: Any, value: Any, dtype: Any = None) -> Any:
    """Of initial and assigned values."""
    _refuse_wide(value, dtype)
    return original(self, value, dtype)


def _refuse_wide(value: Any, dtype: Any) -> None:
    """Raises ValueError for integers that a variable of this dtype (None: its own) cannot hold."""
    if isinstance(value, (np.ndarray, np.generic)):
        kept = jax.dtypes.canonicalize_dtype(value.dtype if dtype is None else dtype)
        if kept.kind in "iu":
            check_integers(np.asarray(value), kept)


def _direct_assign(original: Any, self: Any, value: Any) -> None:
    where = variables.home(self)
    if where is not None and not variables.is_on_read(self):
        value = where.strategy.place(value)
    original(self, value)


def _deferred_initialize(original: Any, self: Any) -> None:
    """A variable that was made while shapes were inferred gets its initial value now."""
    original(self)
    where = variables.home(self)
    if where is not None and where.strategy.served:
        where.strategy.take(self)
    elif where is not None and where.strategy.spans:
        self._value = where.strategy.place_first(self._value)


def _initialize_with_initializer(original: Any, self: Any, initializer: Any) -> None:
    """Parameter servers draw large values themselves."""
    where = variables.home(self)
    strategy = context.current().strategy if where is None else where.strategy
    if not strategy.served or not strategy.initialize(self, initializer):
        original(self, initializer)


def _assign(original: Any, self: Any, value: Any) -> Any:
    if context.current().trace is None or not _keras.in_stateless_scope():
        return original(self, value)
    value = self._convert_to_tensor(value, dtype=self._dtype)
    if tuple(value.shape) == tuple(self.shape):
        value = effects.write(self, value)
    return original(self, value)


def _assign_add(original: Any, self: Any, value: Any) -> Any:
    return _add(original, self, value, 1)


def _assign_sub(original: Any, self: Any, value: Any) -> Any:
    return _add(original, self, value, -1)


def _add(original: Any, self: Any, value: Any, sign: int) -> Any:
    _refuse_wide(value, self._dtype)
    frame = context.current()
    if frame.trace is None and not _keras.in_stateless_scope() and is_remote(self):
        self.add_to_value(sign * self._convert_to_tensor(value, dtype=self._dtype))
        return self
    if not _keras.in_stateless_scope() and is_tallied(self):
        delta = self._convert_to_tensor(value, dtype=self._dtype)  # may wait for a closure
        with alone():  # what one adds between the read and the write is not lost
            return original(self, delta)
    if not _keras.in_stateless_scope() and variables.has_components(self):
        delta = self._convert_to_tensor(value, dtype=self._dtype)
        return variables.add_to_components(self, sign * delta)
    if frame.trace is None or not _keras.in_stateless_scope():
        return original(self, value)
    delta = self._convert_to_tensor(value, dtype=self._dtype)
    if frame.strategy.served and not frame.trace.synchronized:
        return original(self, primitives.arrived(delta))  # servers add it to what there is then
    combined = effects.add(self, delta)
    if combined is None:
        return original(self, value)
    one_component = variables.is_on_read(self) and frame.replica is None
    old = frame.trace.scope.local_value(self) if one_component else self.value
    assign = _keras.JaxVariable.assign._stratagem_original
    return assign(self, old + sign * combined)


def _add_weight(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    variable = original(self, *args, **kwargs)
    variables.mark_statistic(variable)
    return variable
