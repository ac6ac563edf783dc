"""Neural network functions under their TensorFlow names: tf.nn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem import nn
from stratagem.compat.math import unary
from stratagem.compat.tensors import as_tensor


def softmax(logits: Any, axis: int | None = None, name: str | None = None) -> jax.Array:
    """Probabilities along an axis, the last unless told (tf.nn.softmax)."""
    del name
    return jax.nn.softmax(as_tensor(logits), -1 if axis is None else axis)


def log_softmax(logits: Any, axis: int | None = None, name: str | None = None) -> jax.Array:
    """Logarithms of probabilities along an axis, the last unless told (tf.nn.log_softmax)."""
    del name
    return jax.nn.log_softmax(as_tensor(logits), -1 if axis is None else axis)


def softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, axis: int = -1, name: str | None = None
) -> jax.Array:
    """Cross entropy of label probabilities, one loss a row (of TensorFlow's name)."""
    del name
    logits = as_tensor(logits)
    return -jnp.sum(as_tensor(labels, logits.dtype) * jax.nn.log_softmax(logits, axis), axis)


def sparse_softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> jax.Array:
    """Cross entropy of class numbers, one loss a row (of TensorFlow's name)."""
    del name
    logs = jax.nn.log_softmax(as_tensor(logits))
    return -jnp.take_along_axis(logs, as_tensor(labels)[..., None], -1)[..., 0]


def sigmoid_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> jax.Array:
    """Cross entropy of independent probabilities, element by element (of TensorFlow's name)."""
    del name
    x = as_tensor(logits)
    return jnp.maximum(x, 0) - x * as_tensor(labels, x.dtype) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def l2_loss(t: Any, name: str | None = None) -> jax.Array:
    """Half the sum of squares (tf.nn.l2_loss)."""
    del name
    return jnp.sum(jnp.square(as_tensor(t))) / 2


def l2_normalize(x: Any, axis: Any = None, epsilon: float = 1e-12) -> jax.Array:
    """Vectors of length 1 along an axis (tf.nn.l2_normalize)."""
    x = as_tensor(x)
    squares = jnp.sum(jnp.square(x), axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squares, epsilon))


def moments(x: Any, axes: Any, keepdims: bool = False) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over axes (tf.nn.moments)."""
    x, axes = as_tensor(x), tuple(axes) if isinstance(axes, (list, tuple)) else axes
    return jnp.mean(x, axes, keepdims=keepdims), jnp.var(x, axes, keepdims=keepdims)


def leaky_relu(features: Any, alpha: float = 0.2, name: str | None = None) -> jax.Array:
    """A line, `alpha` times as steep below zero (tf.nn.leaky_relu)."""
    del name
    return jax.nn.leaky_relu(as_tensor(features), alpha)


def gelu(features: Any, approximate: bool = False, name: str | None = None) -> jax.Array:
    """The Gaussian error linear unit (tf.nn.gelu)."""
    del name
    return jax.nn.gelu(as_tensor(features), approximate)


def dropout(
    x: Any, rate: float, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> jax.Array:
    """Elements set to zero at random, the rest scaled up (tf.nn.dropout)."""
    del name
    return keras.random.dropout(as_tensor(x), rate, noise_shape, seed)


def embedding_lookup(
    params: Any, ids: Any, max_norm: float | None = None, name: str | None = None
) -> jax.Array:
    """Rows of a table `[rows, ...]` by number (tf.nn.embedding_lookup)."""
    del name
    return nn.embedding_lookup(_table(params), as_tensor(ids), max_norm)


def embedding_lookup_sparse(
    params: Any, sp_ids: Any, sp_weights: Any = None, combiner: str | None = None,
    max_norm: float | None = None, name: str | None = None, **form: Any,
) -> jax.Array:  # fmt: skip
    """Rows of a table, those of each example combined (tf.nn.embedding_lookup_sparse).

    Ids come in a form of `stratagem.nn.embedding_lookup_sparse`, since there are no sparse tensors.
    """
    del name
    return nn.embedding_lookup_sparse(
        _table(params), sp_ids, sp_weights, combiner or "mean", max_norm, **form
    )


def _table(params: Any) -> Any:
    """A table, or its shards, as they are; numbers in lists as a tensor."""
    shards = isinstance(params, (list, tuple)) and all(hasattr(p, "shape") for p in params)
    return params if shards or hasattr(params, "shape") else as_tensor(params)


def bias_add(value: Any, bias: Any, name: str | None = None) -> jax.Array:
    """Adds a vector along the last axis (tf.nn.bias_add)."""
    del name
    return as_tensor(value) + as_tensor(bias)


def conv2d(
    input: Any, filters: Any, strides: Any, padding: str, dilations: Any = None,
    name: str | None = None,
) -> jax.Array:  # fmt: skip
    """Convolution of `[batch, height, width, channels]` (tf.nn.conv2d)."""
    del name
    return keras.ops.conv(
        as_tensor(input), as_tensor(filters), _spatial(strides), padding.lower(),
        data_format="channels_last", dilation_rate=_spatial(1 if dilations is None else dilations),
    )  # fmt: skip


def max_pool2d(
    input: Any, ksize: Any, strides: Any, padding: str, name: str | None = None
) -> jax.Array:
    """The largest element of each window (tf.nn.max_pool2d)."""
    del name
    return keras.ops.max_pool(
        as_tensor(input), _spatial(ksize), _spatial(strides), padding.lower(), "channels_last"
    )


def avg_pool2d(
    input: Any, ksize: Any, strides: Any, padding: str, name: str | None = None
) -> jax.Array:
    """The mean of each window (tf.nn.avg_pool2d)."""
    del name
    return keras.ops.average_pool(
        as_tensor(input), _spatial(ksize), _spatial(strides), padding.lower(), "channels_last"
    )


def _spatial(sizes: Any) -> Any:
    """TensorFlow's `[1, h, w, 1]`, `[h, w]` or `n` as Keras wants it."""
    if not isinstance(sizes, Sequence):
        return sizes
    return tuple(sizes[1:3]) if len(sizes) == 4 else tuple(sizes)


def top_k(input: Any, k: int = 1, sorted: bool = True) -> Any:
    """The k largest elements of the last axis, and where they are (tf.math.top_k)."""
    return keras.ops.top_k(as_tensor(input), k, sorted)


NAMES: dict[str, Any] = {
    fn.__name__: fn
    for fn in (
        softmax, log_softmax, softmax_cross_entropy_with_logits,
        sparse_softmax_cross_entropy_with_logits, sigmoid_cross_entropy_with_logits, l2_loss,
        l2_normalize, moments, leaky_relu, gelu, dropout, embedding_lookup,
        embedding_lookup_sparse, bias_add, conv2d,
        max_pool2d, avg_pool2d, top_k, nn.compute_average_loss, nn.scale_regularization_loss,
    )
} | {
    name: unary(getattr(jax.nn, name))
    for name in ("relu", "relu6", "elu", "selu", "sigmoid", "silu", "softplus", "tanh")
} | {"swish": unary(jax.nn.silu), "softsign": unary(jax.nn.soft_sign)}  # fmt: skip
