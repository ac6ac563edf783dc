"""Arrays as they go to workers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def check_numbers(leaf: Any, what: str) -> None:
    """Refuses arrays of text, objects and times.

    Args:
        leaf: anything; only arrays are looked at.
        what: it is, for errors.

    Raises:
        TypeError: it is such an array.
    """
    if not isinstance(leaf, (np.ndarray, np.generic)) or leaf.dtype.kind in "biufc":
        return
    if not jnp.issubdtype(leaf.dtype, np.number):  # bfloat16 and its like are
        raise TypeError(
            f"{what}: expected numbers or booleans. Got an array of dtype {leaf.dtype}. Turn it "
            "into numbers before: text with keras.layers.StringLookup or Hashing on the data, "
            "times with astype('int64'). Python objects (str, not arrays of it) are constants."
        )
