"""How a Keras initializer draws values, as plain data for parameter servers.

Values are then drawn where they stay, in blocks, so that a table may be larger than the memory of
the program that makes it. The distribution is the initializer's own; the numbers are not those of
Keras, whose generator draws a whole tensor at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from stratagem.parameter_server import initial

# The standard deviation of a standard normal distribution that is cut off at 2 of its own.
_TRUNCATED_STDDEV = 0.87962566103423978


def start_of(initializer: Any, shape: Sequence[int], dtype: Any) -> dict[str, Any] | None:
    """The description of an initializer; None for one that has to be called.

    Args:
        initializer: a Keras initializer, or any callable.
        shape: of the whole variable: some scale by it.
        dtype: of the variable.
    """
    kinds = keras.initializers
    found = type(initializer)
    if found is kinds.Zeros:
        return initial.constant(0)
    if found is kinds.Ones:
        return initial.constant(1)
    if found is kinds.Constant and np.ndim(initializer.value) == 0:
        return initial.constant(float(initializer.value))
    seed = getattr(initializer, "seed", None)
    if not isinstance(seed, int) or not np.issubdtype(dtype, np.floating):
        return None
    seed &= (1 << 64) - 1
    if found is kinds.RandomUniform:
        return initial.uniform(float(initializer.minval), float(initializer.maxval), seed)
    if found is kinds.RandomNormal:
        return initial.normal(float(initializer.mean), float(initializer.stddev), seed)
    if found is kinds.TruncatedNormal:
        return initial.truncated_normal(float(initializer.mean), float(initializer.stddev), seed)
    if isinstance(initializer, kinds.VarianceScaling):
        return _scaled(initializer, shape, seed)
    return None


def _scaled(initializer: Any, shape: Sequence[int], seed: int) -> dict[str, Any] | None:
    """Glorot, He and Lecun initializers (Keras' VarianceScaling) for a matrix."""
    if len(shape) != 2:
        return None  # fans of other shapes are Keras' business
    fan_in, fan_out = shape
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    variance = initializer.scale / max(1.0, fan[initializer.mode])
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return initial.uniform(-limit, limit, seed)
    if initializer.distribution == "untruncated_normal":
        return initial.normal(0.0, math.sqrt(variance), seed)
    return initial.truncated_normal(0.0, math.sqrt(variance) / _TRUNCATED_STDDEV, seed)
