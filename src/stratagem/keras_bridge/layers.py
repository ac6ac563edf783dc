"""Layers that look beyond their replica: batch normalisation and random numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from keras import ops

from stratagem import _keras
from stratagem.keras_bridge.hooks import replicated_trace, wrap
from stratagem.step import primitives
from stratagem.step.replica import all_gather


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
    """Mean and variance over the rows of all replicas, from one collective.

    Each replica sends its count, mean and sum of squared distances to that mean; they combine
    without subtracting large numbers (Chan, Golub and LeVeque, The American Statistician 1983,
    equation 2.1, for any number of parts). Hence gathered, not summed: what is sent is small.
    """
    axes = tuple(layer._reduction_axes)
    channels = inputs.shape[layer.axis]
    shape = [1] * inputs.ndim
    shape[layer.axis] = channels
    if mask is None:
        weights: Any = 1
        count = jnp.asarray(inputs.size // max(1, channels), inputs.dtype)
    else:
        weights = jnp.broadcast_to(ops.cast(mask, inputs.dtype)[..., None], inputs.shape)
        count = jnp.sum(weights) / channels
    mean = jnp.sum(inputs * weights, axis=axes) / jnp.maximum(count, 1)
    distance = (inputs - jnp.reshape(mean, shape)) * weights
    squares = jnp.sum(distance * distance, axis=axes)
    sent = jnp.concatenate([count[None], mean, squares])[None]
    parts = all_gather(sent, 0, frame)  # [replicas, 1 + 2 * channels]
    counts, means, squares = parts[:, :1], parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
    rows = jnp.maximum(jnp.sum(counts), 1)
    mean = jnp.sum(counts * means, axis=0) / rows
    between = jnp.sum(counts * jnp.square(means - mean), axis=0)
    return mean, (jnp.sum(squares, axis=0) + between) / rows


def _next_seed(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Each replica draws numbers of its own; the generator's state stays the same on all."""
    seed = original(self, *args, **kwargs)
    frame = replicated_trace()
    if frame is None:
        return seed
    return jax.random.fold_in(seed, primitives.replica_id_p.bind())
