"""tf.Variable: a Keras variable with TensorFlow's constructor and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from stratagem.compat.tensors import as_tensor
from stratagem.coordinator import PerWorkerVariable
from stratagem.values import IndexedSlices
from stratagem.variables import VariableAggregation, VariableSynchronization


class Variable(keras.Variable):
    """A tensor that keeps its value between steps (tf.Variable).

    It is a keras.Variable: layers and models track it, optimizers train it, strategies place it.
    `value` is a property there, not a method; `read_value()` is both libraries' way. `aggregation`
    and `synchronization` read as lower-case names, such as "sum".

    Args:
        initial_value: a number, list or tensor, or a function without arguments that makes one.
        trainable: whether tapes watch it and models list it; by default all but those that
            synchronise on read.
        name: a name for errors and checkpoints.
        dtype: of the value; by default the initial value's (float32 for a Python float).
        aggregation: how values that replicas assign combine, a tf.VariableAggregation.
        synchronization: when replicas' values combine, a tf.VariableSynchronization.
        shape: of the value, checked.

    Raises:
        ValueError: no initial value, one of another shape, or a declaration that a strategy
            refuses (synchronization NONE, MEAN of integers).
    """

    def __new__(cls, *args: Any, per_worker_variable: bool = False, **kwargs: Any) -> Any:
        """With `per_worker_variable`, a `coordinator.PerWorkerVariable`: no keras.Variable."""
        if not per_worker_variable:
            return super().__new__(cls)
        names = ("initial_value", "dtype", "name")
        return PerWorkerVariable(*args[:1], **{n: kwargs[n] for n in names if n in kwargs})

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        validate_shape: bool = True,
        caching_device: Any = None,
        name: str | None = None,
        variable_def: Any = None,
        dtype: Any = None,
        import_scope: Any = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Any = None,
    ):
        del validate_shape, caching_device, variable_def, import_scope
        if initial_value is None:
            raise ValueError(
                "Expected an initial value for tf.Variable. Got None. Pass a number, a tensor, or "
                "a function that makes one."
            )
        value = _initial(initial_value, dtype)
        if shape is not None and tuple(shape) != tuple(value.shape):
            raise ValueError(
                f"Expected an initial value of shape {tuple(shape)} for variable {name!r}. Got "
                f"{tuple(value.shape)}. Leave shape out, or change the value; shapes are fixed."
            )
        synchronization = VariableSynchronization(synchronization)
        if trainable is None:
            trainable = synchronization is not VariableSynchronization.ON_READ
        super().__init__(
            value,
            dtype=value.dtype.name,
            trainable=trainable,
            autocast=False,
            aggregation=VariableAggregation(aggregation).keras_name,
            synchronization=synchronization.keras_name,
            name=name,
        )
        self.constraint = constraint

    def assign(
        self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Writes a value, in a replica as the variable's aggregation says; returns the new one."""
        del use_locking, name, read_value
        return super().assign(_dense(value))

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Adds a value, in a replica as the variable's aggregation says; returns the new one."""
        del use_locking, name, read_value
        return super().assign_add(_dense(delta))

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Subtracts a value, as `assign_add` adds one. Returns the new value."""
        del use_locking, name, read_value
        return super().assign_sub(_dense(delta))

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Adds rows; in a replica they are aggregated first. Returns the new value."""
        return self.assign_add(self._rows(sparse_delta), use_locking)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False) -> Any:
        """Subtracts rows; in a replica they are aggregated first. Returns the new value."""
        return self.assign_sub(self._rows(sparse_delta), use_locking)

    def _rows(self, slices: IndexedSlices) -> jax.Array:
        return IndexedSlices(slices.values, slices.indices, self.shape).to_dense()

    def read_value(self) -> jax.Array:
        """The value as a tensor."""
        return as_tensor(self)

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array, on the host."""
        return np.asarray(self.value)

    def get_shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(self.shape)

    def ref(self) -> Reference:
        """What a dict or set can hold: variables compare by value."""
        return Reference(self)


class Reference:
    """A variable as a key; equal for the same variable only."""

    def __init__(self, variable: Any):
        self._variable = variable

    def deref(self) -> Any:
        """The variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)


def _initial(value: Any, dtype: Any) -> Any:
    if not callable(value):
        return as_tensor(value, dtype)
    # A step that is traced creates its variables with values, at once.
    with jax.ensure_compile_time_eval():
        return as_tensor(value(), dtype)


def _dense(value: Any) -> Any:
    """What Keras' assign takes; Python numbers as they are, so that any dtype takes them."""
    return value.to_dense() if isinstance(value, IndexedSlices) else value


class Module:
    """An object whose attributes may hold variables and other modules (tf.Module)."""

    def __init__(self, name: str | None = None):
        self.name = name or type(self).__name__.lower()

    @property
    def variables(self) -> tuple[Any, ...]:
        """All variables of this module and of those it holds, each once."""
        return tuple({id(v): v for v in _found(self, {id(self)})}.values())

    @property
    def trainable_variables(self) -> tuple[Any, ...]:
        """Those that training changes."""
        return tuple(v for v in self.variables if v.trainable)


def _found(holder: Any, seen: set[int]) -> Iterator[Any]:
    """The variables below an object: in attributes, lists, tuples, dicts, layers and modules."""
    for name in sorted(vars(holder)) if isinstance(holder, Module) else ():
        yield from _of_value(getattr(holder, name), seen)


def _of_value(value: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(value, keras.Variable):
        yield value
    elif id(value) in seen:
        return
    elif isinstance(value, Module):
        seen.add(id(value))
        yield from _found(value, seen)
    elif isinstance(value, keras.Layer):
        yield from value.variables
    elif isinstance(value, dict):
        for key in value:
            yield from _of_value(value[key], seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _of_value(item, seen)
