"""What the elements of a distributed dataset look like."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor.

    Args:
        shape: sizes; None where elements may differ.
        dtype: the dtype; in a distributed dataset's spec, the one that the replicas see.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class PerReplicaSpec:
    """One `TensorSpec` a replica.

    Args:
        values: the specs, in replica order.
    """

    values: tuple[TensorSpec, ...]


def spec_of(array: Any, *, static_rows: bool) -> TensorSpec:
    """The spec of an array whose other elements may have other row counts."""
    shape: tuple[int | None, ...] = tuple(array.shape)
    if shape and not static_rows:
        shape = (None, *shape[1:])
    return TensorSpec(shape, array.dtype)


def distribute_spec(spec: Any, num_replicas: int, *, split: bool) -> Any:
    """The structure of specs that the replicas see, for a structure of specs of the source.

    Args:
        spec: structure of `TensorSpec`.
        num_replicas: replicas; with one, the specs stay plain.
        split: whether an element of the source is split between the replicas, rather than dealt
            whole. The row count is then known only where the replicas divide it.
    """

    def one(leaf: TensorSpec) -> Any:
        shape = leaf.shape
        if split and shape and shape[0] is not None:
            rows, rest = divmod(shape[0], num_replicas)
            shape = (None if rest else rows, *shape[1:])
        leaf = TensorSpec(shape, canonical_dtype(leaf.dtype))
        return leaf if num_replicas == 1 else PerReplicaSpec((leaf,) * num_replicas)

    return jax.tree.map(one, spec)


def canonical_dtype(dtype: Any) -> np.dtype:
    """The dtype JAX gives an array of this dtype: 64 bits become 32 unless x64 is enabled."""
    return jax.dtypes.canonicalize_dtype(dtype)
