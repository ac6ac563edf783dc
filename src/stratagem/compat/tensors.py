"""Tensors are JAX arrays: making them, their dtypes, and `.numpy()`.

JAX arrays have no method `numpy`, which TensorFlow programs call everywhere. Importing
`stratagem.compat.tensorflow` gives the two public classes of JAX values one: `jax.Array.numpy`, the
same as `numpy.asarray(x)`. It is the only thing that the import changes outside this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.data import TensorSpec as _TensorSpec
from stratagem.values import IndexedSlices, Mirrored

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(getattr(jnp, name))
    for name in (
        "bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64",
        "uint8", "uint16", "uint32", "uint64", "complex64", "complex128",
    )
}  # fmt: skip
DTYPES |= {
    "bool": np.dtype(bool),
    "half": np.dtype("float16"),
    "double": np.dtype("float64"),
    "string": np.dtype(object),
}


def give_arrays_numpy() -> None:
    """Adds the method `numpy` to JAX's arrays, unless a version of JAX brings its own.

    In a traced function there is no value yet: there the call is the error that JAX raises for
    `numpy.asarray`, which Stratagem explains.
    """

    def numpy(self: Any) -> np.ndarray:
        """The value as a NumPy array, on the host (added by stratagem.compat.tensorflow)."""
        return np.asarray(self)

    classes: tuple[Any, ...] = (jax.Array, jax.core.Tracer)
    for cls in classes:
        if not hasattr(cls, "numpy"):
            cls.numpy = numpy


def as_dtype(dtype: Any) -> np.dtype:
    """The NumPy dtype of a name, a type or a dtype (`tf.as_dtype`)."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    return np.dtype(dtype)


def kept(dtype: Any) -> Any:
    """The dtype that JAX keeps for one: 32 bits for 64, unless jax_enable_x64 is set."""
    return None if dtype is None else jax.dtypes.canonicalize_dtype(as_dtype(dtype))


def as_tensor(value: Any, dtype: Any = None) -> jax.Array:
    """Any value as a tensor: arrays, numbers, nested lists, variables, mirrored values.

    Python numbers become float32 and int32, as in TensorFlow.
    """
    if isinstance(value, keras.Variable):
        value = value.value
    elif isinstance(value, Mirrored):
        value = value.value
    elif isinstance(value, IndexedSlices):
        value = value.to_dense()
    elif isinstance(value, (list, tuple)):
        value = stacked(value)
    if isinstance(value, jax.Array):
        return value if dtype is None else value.astype(kept(dtype))
    return jnp.asarray(value, kept(dtype) if dtype is not None else _own_dtype(value))


def _own_dtype(value: Any) -> Any:
    """float32 for a Python float: `jnp.asarray` would make it weak, which takes any partner's."""
    if isinstance(value, bool):
        return jnp.bool_
    if isinstance(value, int):
        return jnp.int32
    if isinstance(value, float):
        return jnp.float32
    dtype = getattr(value, "dtype", None)
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)


def stacked(values: Any) -> Any:
    """A number, or a list of tensors, numbers or lists, as one array."""
    leaves = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, keras.Variable))
    if any(isinstance(leaf, (jax.Array, keras.Variable, Mirrored)) for leaf in leaves):
        return jnp.stack([as_tensor(v) for v in values])
    array = np.asarray(values)
    made_of_python = not any(isinstance(leaf, (np.ndarray, np.generic)) for leaf in leaves)
    narrow = {"f": np.float32, "i": np.int32}.get(array.dtype.kind)
    return array.astype(narrow) if made_of_python and narrow is not None else array


def constant(
    value: Any, dtype: Any = None, shape: Sequence[int] | None = None, name: str | None = None
) -> jax.Array:
    """A tensor of a value; with `shape`, of that shape, a scalar repeated (tf.constant)."""
    del name
    made = as_tensor(value, dtype)
    if shape is None:
        return made
    return jnp.full(shape, made) if made.ndim == 0 else made.reshape(tuple(shape))


def convert_to_tensor(
    value: Any, dtype: Any = None, dtype_hint: Any = None, name: str | None = None
) -> jax.Array:
    """A tensor of a value (tf.convert_to_tensor)."""
    del dtype_hint, name
    return as_tensor(value, dtype)


def cast(x: Any, dtype: Any, name: str | None = None) -> jax.Array:
    """The tensor in another dtype (tf.cast)."""
    del name
    return as_tensor(x).astype(kept(dtype))


def is_tensor(x: Any) -> bool:
    """True for arrays of JAX, variables and IndexedSlices (tf.is_tensor)."""
    return isinstance(x, (jax.Array, keras.Variable, IndexedSlices))


class TensorSpec(_TensorSpec):
    """Shape and dtype of a tensor; None for an axis of any size (tf.TensorSpec)."""

    def __init__(self, shape: Any = (), dtype: Any = "float32", name: str | None = None):
        del name
        super().__init__(tuple(shape), as_dtype(dtype))
