"""Layers that look beyond their replica: batch normalisation and random numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from keras import ops

from stratagem import _keras
from stratagem.keras_bridge.hooks import replicated_trace, wrap
from stratagem.step import primitives


def install() -> None:
    """Attaches the bridge to BatchNormalization and SeedGenerator."""
    wrap(_keras.BatchNormalization, "__init__", _create_batch_norm)
    wrap(_keras.BatchNormalization, "_moments", _moments)
    wrap(_keras.SeedGenerator, "next", _next_seed)


def _create_batch_norm(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # Keras refuses synchronized=True on JAX, where it has no replicas. Here there are some.
    synchronized = bool(kwargs.pop("synchronized", False))
    original(self, *args, **kwargs)
    self.synchronized = synchronized


def _moments(original: Any, self: Any, inputs: Any, mask: Any) -> Any:
    frame = replicated_trace()
    if frame is not None and self.synchronized:
        return _global_moments(self, inputs, mask, frame)
    if frame is not None and inputs.shape[0] == 0:
        # No rows, no statistics: what is known stays.
        return (
            ops.cast(self.moving_mean, inputs.dtype),
            ops.cast(self.moving_variance, inputs.dtype),
        )
    if self.synchronized and mask is None:
        return ops.moments(inputs, axes=self._reduction_axes)
    return original(self, inputs, mask)


def _global_moments(layer: Any, inputs: Any, mask: Any, frame: Any) -> Any:
    """Mean and variance over the rows of all replicas, from one all-reduce.

    The sums are taken of the distance to the moving mean, which all replicas share: the variance
    as a difference of two sums then loses little to rounding (Chan, Golub and LeVeque, The
    American Statistician 1983, section 3: shifted data).
    """
    axes = tuple(layer._reduction_axes)
    shape = [1] * inputs.ndim
    shape[layer.axis] = inputs.shape[layer.axis]
    shift = jax.lax.stop_gradient(jnp.reshape(ops.cast(layer.moving_mean, inputs.dtype), shape))
    distance = inputs - shift
    if mask is None:
        count = jnp.asarray(inputs.size // max(1, inputs.shape[layer.axis]), inputs.dtype)
    else:
        weights = jnp.broadcast_to(ops.cast(mask, inputs.dtype)[..., None], inputs.shape)
        distance = distance * weights
        count = jnp.sum(weights) / inputs.shape[layer.axis]
    first, second = jnp.sum(distance, axis=axes), jnp.sum(distance * distance, axis=axes)
    total, squares, rows = primitives.all_reduce([first, second, count], ["sum"] * 3, frame)
    rows = jnp.maximum(rows, 1)
    mean = total / rows
    variance = jnp.maximum(squares / rows - mean * mean, 0)
    return mean + jnp.reshape(shift, mean.shape), variance


def _next_seed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Each replica draws numbers of its own; the generator's state stays the same on all."""
    seed = original(self, *args, **kwargs)
    frame = replicated_trace()
    if frame is None:
        return seed
    return jax.random.fold_in(seed, primitives.replica_id_p.bind())
