"""Making, shaping and picking from tensors under their TensorFlow names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.compat.math import partners
from stratagem.compat.tensors import as_tensor, kept


class Known(np.ndarray):
    """Sizes, which Python knows also inside a compiled function."""

    def numpy(self) -> np.ndarray:
        """The sizes as a plain NumPy array."""
        return np.asarray(self)


def shape(input: Any, out_type: Any = jnp.int32, name: str | None = None) -> np.ndarray:
    """The sizes of a tensor (tf.shape), numbers that `reshape` and Python can use."""
    del name
    return np.asarray(jnp.shape(as_tensor(input)), out_type).view(Known)


def size(input: Any, out_type: Any = jnp.int32, name: str | None = None) -> np.ndarray:
    """How many elements a tensor has (tf.size)."""
    del name
    return np.asarray(as_tensor(input).size, out_type).view(Known)


def rank(input: Any) -> int:
    """How many axes a tensor has (tf.rank)."""
    return as_tensor(input).ndim


def zeros(shape: Any, dtype: Any = "float32", name: str | None = None) -> jax.Array:
    """A tensor of zeros (tf.zeros)."""
    del name
    return jnp.zeros(_sizes(shape), kept(dtype))


def ones(shape: Any, dtype: Any = "float32", name: str | None = None) -> jax.Array:
    """A tensor of ones (tf.ones)."""
    del name
    return jnp.ones(_sizes(shape), kept(dtype))


def fill(dims: Any, value: Any, name: str | None = None) -> jax.Array:
    """A tensor of one value (tf.fill)."""
    del name
    return jnp.full(_sizes(dims), as_tensor(value))


def eye(num_rows: int, num_columns: int | None = None, dtype: Any = "float32") -> jax.Array:
    """A matrix with ones on its diagonal (tf.eye)."""
    return jnp.eye(num_rows, num_columns, dtype=kept(dtype))


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in np.atleast_1d(np.asarray(shape, int)))


def zeros_like(input: Any, dtype: Any = None, name: str | None = None) -> jax.Array:
    """Zeros of a tensor's shape (tf.zeros_like)."""
    del name
    return jnp.zeros_like(as_tensor(input), kept(dtype))


def ones_like(input: Any, dtype: Any = None, name: str | None = None) -> jax.Array:
    """Ones of a tensor's shape (tf.ones_like)."""
    del name
    return jnp.ones_like(as_tensor(input), kept(dtype))


def range(start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None) -> jax.Array:
    """The numbers from `start` up to `limit` (tf.range).

    In a compiled function `for i in tf.range(n)` repeats what follows n times in the program.
    """
    if limit is None:
        start, limit = 0, start
    return jnp.arange(start, limit, delta, kept(dtype))


def linspace(start: Any, stop: Any, num: int, axis: int = 0) -> jax.Array:
    """Numbers with equal steps between them (tf.linspace)."""
    return jnp.linspace(as_tensor(start), as_tensor(stop), num, axis=axis)


def reshape(tensor: Any, shape: Any, name: str | None = None) -> jax.Array:
    """The elements in another shape (tf.reshape)."""
    del name
    return as_tensor(tensor).reshape(_sizes(shape))


def transpose(a: Any, perm: Any = None, name: str | None = None) -> jax.Array:
    """Axes in another order (tf.transpose)."""
    del name
    return jnp.transpose(as_tensor(a), perm)


def expand_dims(input: Any, axis: int, name: str | None = None) -> jax.Array:
    """A new axis of size 1 (tf.expand_dims)."""
    del name
    return jnp.expand_dims(as_tensor(input), axis)


def squeeze(input: Any, axis: Any = None, name: str | None = None) -> jax.Array:
    """Without axes of size 1 (tf.squeeze)."""
    del name
    return jnp.squeeze(as_tensor(input), tuple(axis) if isinstance(axis, list) else axis)


def concat(values: Any, axis: int, name: str | None = None) -> jax.Array:
    """Tensors one after the other along an axis (tf.concat)."""
    del name
    return jnp.concatenate([as_tensor(v) for v in values], axis)


def stack(values: Any, axis: int = 0, name: str | None = None) -> jax.Array:
    """Tensors side by side along a new axis (tf.stack)."""
    del name
    return jnp.stack([as_tensor(v) for v in values], axis)


def unstack(value: Any, num: int | None = None, axis: int = 0) -> list[jax.Array]:
    """The parts of a tensor along an axis (tf.unstack)."""
    del num
    value = as_tensor(value)
    return [jnp.take(value, i, axis) for i in np.arange(value.shape[axis])]


def split(value: Any, num_or_size_splits: Any, axis: int = 0) -> list[jax.Array]:
    """Equal parts, or parts of given sizes, along an axis (tf.split)."""
    where = num_or_size_splits
    if not isinstance(where, int):
        where = np.cumsum(np.asarray(where))[:-1].tolist()
    return jnp.split(as_tensor(value), where, axis)


def tile(input: Any, multiples: Any, name: str | None = None) -> jax.Array:
    """The tensor repeated along its axes (tf.tile)."""
    del name
    return jnp.tile(as_tensor(input), _sizes(multiples))


def repeat(input: Any, repeats: Any, axis: int | None = None) -> jax.Array:
    """Each element repeated (tf.repeat)."""
    return jnp.repeat(as_tensor(input), repeats, axis)


def reverse(tensor: Any, axis: Any, name: str | None = None) -> jax.Array:
    """Axes in reverse (tf.reverse)."""
    del name
    return jnp.flip(as_tensor(tensor), _sizes(axis))


def pad(tensor: Any, paddings: Any, mode: str = "CONSTANT", constant_values: Any = 0) -> jax.Array:
    """More elements before and behind along each axis (tf.pad)."""
    widths = np.asarray(paddings).tolist()
    if mode.upper() == "CONSTANT":
        return jnp.pad(as_tensor(tensor), widths, constant_values=constant_values)
    return jnp.pad(as_tensor(tensor), widths, mode=mode.lower())


def gather(
    params: Any, indices: Any, validate_indices: Any = None, axis: int = 0, batch_dims: int = 0
) -> jax.Array:
    """Slices by index along an axis (tf.gather). An index outside gives zeros or NaN.

    Raises:
        NotImplementedError: with batch_dims.
    """
    del validate_indices
    if batch_dims:
        raise NotImplementedError(
            f"Expected batch_dims=0. Got {batch_dims}. Use jax.vmap(jax.numpy.take), or "
            "keras.ops.take_along_axis."
        )
    return jnp.take(as_tensor(params), as_tensor(indices), axis)


def where(condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> jax.Array:
    """x where the condition holds, y elsewhere; without them, where it holds (tf.where)."""
    del name
    if x is None and y is None:
        return jnp.argwhere(as_tensor(condition))
    return jnp.where(as_tensor(condition), *partners(x, y))


def one_hot(
    indices: Any,
    depth: int,
    on_value: Any = 1.0,
    off_value: Any = 0.0,
    axis: int = -1,
    dtype: Any = "float32",
) -> jax.Array:
    """A new axis with `on_value` at the index (tf.one_hot)."""
    hot = jax.nn.one_hot(as_tensor(indices), depth, axis=axis, dtype=jnp.bool_)
    return jnp.where(hot, on_value, off_value).astype(kept(dtype))


def identity(input: Any, name: str | None = None) -> jax.Array:
    """The value as a tensor: of a variable, what it holds now (tf.identity)."""
    del name
    return as_tensor(input)


def stop_gradient(input: Any, name: str | None = None) -> jax.Array:
    """The tensor as a constant for derivatives (tf.stop_gradient)."""
    del name
    return jax.lax.stop_gradient(as_tensor(input))


def boolean_mask(tensor: Any, mask: Any, name: str | None = None) -> jax.Array:
    """The elements where the mask holds, which Python must know (tf.boolean_mask)."""
    del name
    return as_tensor(tensor)[np.asarray(mask)]


NAMES: dict[str, Sequence[Any] | Any] = {
    fn.__name__: fn
    for fn in (
        shape, size, rank, zeros, ones, fill, eye, zeros_like, ones_like, range, linspace, reshape,
        transpose, expand_dims, squeeze, concat, stack, unstack, split, tile, repeat, reverse, pad,
        gather, where, one_hot, identity, stop_gradient, boolean_mask,
    )
} | {"newaxis": None}  # fmt: skip
