"""Arithmetic and reductions under their TensorFlow names: tf.add, tf.reduce_sum, tf.math.log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.compat.tensors import as_tensor

Axis = int | Sequence[int] | None


def unary(fn: Callable[[Any], Any]) -> Callable[..., jax.Array]:
    """`fn` of one tensor, with TensorFlow's parameters."""

    @functools.wraps(fn)
    def op(x: Any, name: str | None = None) -> jax.Array:
        del name
        return fn(as_tensor(x))

    return op


def binary(fn: Callable[[Any, Any], Any]) -> Callable[..., jax.Array]:
    """`fn` of two tensors of one dtype: a Python number takes the dtype of its partner."""

    @functools.wraps(fn)
    def op(x: Any, y: Any, name: str | None = None) -> jax.Array:
        del name
        return fn(*partners(x, y))

    return op


def partners(x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands; Python numbers stay weak, so that they take the other's dtype."""
    numbers = (bool, int, float)
    both = isinstance(x, numbers) and isinstance(y, numbers)
    return (
        x if isinstance(x, numbers) and not both else as_tensor(x),
        y if isinstance(y, numbers) and not both else as_tensor(y),
    )


def _reduction(fn: Callable[..., Any]) -> Callable[..., jax.Array]:
    @functools.wraps(fn)
    def op(
        input_tensor: Any, axis: Axis = None, keepdims: bool = False, name: str | None = None
    ) -> jax.Array:
        del name
        x = as_tensor(input_tensor)
        axes = tuple(axis) if isinstance(axis, (list, tuple)) else axis
        return fn(x, axis=axes, keepdims=keepdims).astype(_dtype_of(fn, x))

    return op


def _dtype_of(fn: Any, x: jax.Array) -> Any:
    """Reductions keep the dtype, also the mean of integers, which TensorFlow rounds to zero."""
    return jnp.bool_ if fn in (jnp.any, jnp.all) else x.dtype


def _divide(x: Any, y: Any) -> Any:
    return jnp.true_divide(x, y)


def _divide_no_nan(x: Any, y: Any) -> Any:
    safe = jnp.where(y == 0, jnp.ones_like(y), y)
    return jnp.where(y == 0, jnp.zeros_like(x / safe), x / safe)


def add_n(inputs: Sequence[Any], name: str | None = None) -> jax.Array:
    """The sum of tensors of one shape (tf.add_n)."""
    del name
    return functools.reduce(jnp.add, [as_tensor(x) for x in inputs])


def matmul(
    a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False, name: str | None = None
) -> jax.Array:
    """The product of matrices `[..., m, k]` and `[..., k, n]` (tf.matmul)."""
    del name
    a, b = as_tensor(a), as_tensor(b)
    a = jnp.swapaxes(a, -1, -2) if transpose_a else a
    b = jnp.swapaxes(b, -1, -2) if transpose_b else b
    return jnp.matmul(a, b)


def tensordot(a: Any, b: Any, axes: Any, name: str | None = None) -> jax.Array:
    """The sum of products over axes (tf.tensordot)."""
    del name
    return jnp.tensordot(as_tensor(a), as_tensor(b), axes)


def einsum(equation: str, *inputs: Any, **kwargs: Any) -> jax.Array:
    """Einstein's sum (tf.einsum); TensorFlow's `optimize` and `name` are ignored."""
    del kwargs
    return jnp.einsum(equation, *(as_tensor(x) for x in inputs))


def cumsum(x: Any, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> jax.Array:
    """The running sum along an axis (tf.cumsum)."""
    x = as_tensor(x)
    turned = jnp.flip(x, axis) if reverse else x
    total = jnp.cumsum(turned, axis)
    total = total - turned if exclusive else total
    return jnp.flip(total, axis) if reverse else total


def argmax(input: Any, axis: int | None = 0, output_type: Any = jnp.int32) -> jax.Array:
    """Index of the largest element along an axis, the first unless told (tf.argmax)."""
    return jnp.argmax(as_tensor(input), 0 if axis is None else axis).astype(output_type)


def argmin(input: Any, axis: int | None = 0, output_type: Any = jnp.int32) -> jax.Array:
    """Index of the smallest element along an axis, the first unless told (tf.argmin)."""
    return jnp.argmin(as_tensor(input), 0 if axis is None else axis).astype(output_type)


def clip_by_value(
    t: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None
) -> jax.Array:
    """Elements within limits (tf.clip_by_value)."""
    del name
    return jnp.clip(as_tensor(t), clip_value_min, clip_value_max)


def norm(t: Any, ord: Any = "euclidean", axis: Axis = None, keepdims: bool = False) -> jax.Array:
    """The norm of all elements, or along axes (tf.norm)."""
    order = None if ord in ("euclidean", "fro") else ord
    axes = tuple(axis) if isinstance(axis, list) else axis
    x = as_tensor(t)
    if axes is None:
        x = x.reshape(-1)
    return jnp.linalg.norm(x, order, axes, keepdims)


def clip_by_norm(t: Any, clip_norm: Any, axes: Axis = None) -> jax.Array:
    """The tensor, shrunk so that its norm is at most `clip_norm` (tf.clip_by_norm)."""
    x = as_tensor(t)
    axis = tuple(axes) if isinstance(axes, list) else axes
    length = jnp.sqrt(jnp.sum(x * x, axis, keepdims=True))
    return x * clip_norm / jnp.maximum(length, clip_norm)


def global_norm(t_list: Sequence[Any]) -> jax.Array:
    """The norm of several tensors as one vector; None counts nothing (tf.linalg.global_norm)."""
    squares = [jnp.sum(jnp.square(as_tensor(t))) for t in t_list if t is not None]
    return jnp.sqrt(functools.reduce(jnp.add, squares))


def clip_by_global_norm(
    t_list: Sequence[Any], clip_norm: Any, use_norm: Any = None
) -> tuple[list[Any], jax.Array]:
    """Tensors shrunk together so that their global norm is at most `clip_norm`, and that norm."""
    length = global_norm(t_list) if use_norm is None else as_tensor(use_norm)
    scale = clip_norm / jnp.maximum(length, clip_norm)
    return [None if t is None else as_tensor(t) * scale for t in t_list], length


REDUCTIONS: dict[str, Any] = {
    "reduce_sum": _reduction(jnp.sum),
    "reduce_mean": _reduction(jnp.mean),
    "reduce_max": _reduction(jnp.max),
    "reduce_min": _reduction(jnp.min),
    "reduce_prod": _reduction(jnp.prod),
    "reduce_any": _reduction(jnp.any),
    "reduce_all": _reduction(jnp.all),
    "reduce_logsumexp": _reduction(jax.scipy.special.logsumexp),
}

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add, "atan2": jnp.arctan2, "divide": _divide, "equal": jnp.equal,
    "greater": jnp.greater, "greater_equal": jnp.greater_equal, "less": jnp.less,
    "less_equal": jnp.less_equal, "logical_and": jnp.logical_and, "logical_or": jnp.logical_or,
    "maximum": jnp.maximum, "minimum": jnp.minimum, "multiply": jnp.multiply,
    "not_equal": jnp.not_equal, "pow": jnp.power, "subtract": jnp.subtract,
}  # fmt: skip

# In tf and in tf.math.
SHARED: dict[str, Any] = {
    **REDUCTIONS,
    **{
        name: unary(fn)
        for name, fn in {
            "abs": jnp.abs, "acos": jnp.arccos, "asin": jnp.arcsin, "atan": jnp.arctan,
            "ceil": jnp.ceil, "cos": jnp.cos, "cosh": jnp.cosh, "exp": jnp.exp,
            "floor": jnp.floor, "logical_not": jnp.logical_not, "negative": jnp.negative,
            "round": jnp.round, "sigmoid": jax.nn.sigmoid, "sign": jnp.sign, "sin": jnp.sin,
            "sinh": jnp.sinh, "sqrt": jnp.sqrt, "square": jnp.square, "tan": jnp.tan,
            "tanh": jnp.tanh,
        }.items()
    },
    **{name: binary(fn) for name, fn in _BINARY.items()},
    "add_n": add_n,
    "argmax": argmax,
    "argmin": argmin,
    "cumsum": cumsum,
}  # fmt: skip

# In tf alone.
TOP: dict[str, Any] = {
    "matmul": matmul,
    "tensordot": tensordot,
    "einsum": einsum,
    "norm": norm,
    "clip_by_value": clip_by_value,
    "clip_by_norm": clip_by_norm,
    "clip_by_global_norm": clip_by_global_norm,
    "truediv": binary(_divide),
}

# In tf.math alone.
MATH: dict[str, Any] = {
    **{
        name: unary(fn)
        for name, fn in {
            "digamma": jax.scipy.special.digamma, "erf": jax.scipy.special.erf,
            "expm1": jnp.expm1, "is_finite": jnp.isfinite, "is_inf": jnp.isinf,
            "is_nan": jnp.isnan, "lgamma": jax.scipy.special.gammaln, "log": jnp.log,
            "log1p": jnp.log1p, "log_sigmoid": jax.nn.log_sigmoid,
            "reciprocal": jnp.reciprocal, "rsqrt": jax.lax.rsqrt, "softplus": jax.nn.softplus,
        }.items()
    },
    "divide_no_nan": binary(_divide_no_nan),
    "floordiv": binary(jnp.floor_divide),
    "floormod": binary(jnp.mod),
    "mod": binary(jnp.mod),
    "squared_difference": binary(lambda x, y: jnp.square(x - y)),
    "reduce_std": _reduction(jnp.std),
    "reduce_variance": _reduction(jnp.var),
}  # fmt: skip

LINALG: dict[str, Any] = {
    "matmul": matmul,
    "norm": norm,
    "einsum": einsum,
    "tensordot": tensordot,
    "global_norm": global_norm,
}
