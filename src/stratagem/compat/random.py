"""Random tensors: tf.random. The numbers are those of keras.random, not of TensorFlow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem.compat.tensors import as_tensor, kept

_seed = 0


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and Keras' generators, and shuffles that have no seed of their own.

    Also what `tf.keras.utils.set_random_seed` does, but for the shuffles.
    """
    global _seed
    _seed = int(seed)
    keras.utils.set_random_seed(_seed)


def global_seed() -> int:
    """What `set_seed` was given, 0 before."""
    return _seed


def normal(
    shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = "float32",
    seed: int | None = None, name: str | None = None,
) -> jax.Array:  # fmt: skip
    """Numbers of a normal distribution (tf.random.normal)."""
    del name
    return keras.random.normal(tuple(shape), mean, stddev, _name(dtype), seed)


def truncated_normal(
    shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = "float32",
    seed: int | None = None, name: str | None = None,
) -> jax.Array:  # fmt: skip
    """Normal numbers within two standard deviations (tf.random.truncated_normal)."""
    del name
    return keras.random.truncated_normal(tuple(shape), mean, stddev, _name(dtype), seed)


def uniform(
    shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = "float32",
    seed: int | None = None, name: str | None = None,
) -> jax.Array:  # fmt: skip
    """Numbers from `minval` up to `maxval`; integers need a maxval (tf.random.uniform).

    Raises:
        ValueError: integers without maxval.
    """
    del name
    if not jnp.issubdtype(kept(dtype), jnp.integer):
        high = 1.0 if maxval is None else maxval
        return keras.random.uniform(tuple(shape), minval, high, _name(dtype), seed)
    if maxval is None:
        raise ValueError(
            f"Expected maxval for integers. Got None, with dtype {kept(dtype)}. Pass the first "
            "number that is too large."
        )
    return keras.random.randint(tuple(shape), minval, maxval, _name(dtype), seed)


def shuffle(value: Any, seed: int | None = None, name: str | None = None) -> jax.Array:
    """The rows in another order (tf.random.shuffle)."""
    del name
    return keras.random.shuffle(as_tensor(value), 0, seed)


def _name(dtype: Any) -> str:
    return kept(dtype).name


NAMES: dict[str, Any] = {
    fn.__name__: fn for fn in (set_seed, normal, truncated_normal, uniform, shuffle)
}
