"""Arguments of a step: what the program takes as input, and what it knows beforehand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.errors import UnevenShapesError
from stratagem.step.same import Same
from stratagem.step.trace import NO_ROWS
from stratagem.values import DistributedValues, Mirrored, PerReplica, map_leaves, open_parts

_TENSORS = (jax.Array, np.ndarray, np.generic, int, float, complex)
_OPEN = "a value that holds structures"


@dataclasses.dataclass(frozen=True)
class Argument:
    """How one dynamic argument enters: `shapes[r]` on replica r, or the same array on all."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: Any
    split: bool

    @property
    def even(self) -> bool:
        return len(set(self.shapes)) == 1

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(max(sizes) for sizes in zip(*self.shapes, strict=True))


def flatten(arguments: Any) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """Leaves and structure of a call's arguments, and what each leaf adds to the program's key.

    Distributed values and Keras variables are leaves, because JAX does not know their classes.
    Values that hold structures are opened.
    """
    leaves, tree = jax.tree.flatten(arguments)
    keys = tuple([_key_of(leaf) for leaf in leaves])
    if _OPEN in keys:
        opened = map_leaves(lambda x: open_parts(x) if _has_structure(x) else x, arguments)
        leaves, tree = jax.tree.flatten(opened)
        keys = tuple([_key_of(leaf) for leaf in leaves])
    return leaves, tree, keys


def row_classes(
    arguments: list[Argument], replicas: int, weights: Any
) -> tuple[tuple[int, ...], list[int]]:
    """Class of each replica, and for each class a replica that represents it."""
    seen: dict[Any, int] = {}
    members = []
    representatives: list[int] = []
    for r in range(replicas):
        shapes = tuple(a.shapes[r] for a in arguments if a.split)
        if weights is not None and weights[r] == 0:
            members.append(NO_ROWS)
            continue
        if shapes not in seen:
            seen[shapes] = len(representatives)
            representatives.append(r)
        members.append(seen[shapes])
    return tuple(members), representatives


def _has_structure(leaf: Any) -> bool:
    """True for a distributed value whose parts are no tensors, such as dicts or IndexedSlices."""
    if not isinstance(leaf, DistributedValues) or getattr(leaf, "stacked", None) is not None:
        return False
    return not isinstance(leaf.values[0], _TENSORS)


def describe(leaf: Any) -> Any:
    """An Argument for what the program takes as input; the leaf itself for what it knows."""
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            f"Expected arrays to run a step on. Got {leaf}, a value inside a JAX transformation "
            "such as jax.jit or jax.grad, which cannot contain a step of a strategy. Decorate the "
            "outer function with @stratagem.function, and use stratagem.GradientTape inside."
        )
    if isinstance(leaf, PerReplica):
        stacked = leaf.stacked
        if stacked is not None:
            return Argument((stacked.shape[1:],) * stacked.shape[0], stacked.dtype, True)
        return _describe_parts(leaf)
    if isinstance(leaf, Mirrored):
        return Argument((np.shape(leaf.value),), jnp.asarray(leaf.value).dtype, False)
    if isinstance(leaf, jax.Array):  # also of random keys, whose dtype is no NumPy one
        return Argument((leaf.shape,), leaf.dtype, False)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return Argument((leaf.shape,), jax.dtypes.canonicalize_dtype(leaf.dtype), False)
    return leaf


def _describe_parts(leaf: PerReplica) -> Argument:
    parts = leaf.values
    if not all(isinstance(part, _TENSORS) for part in parts):
        raise TypeError(
            "Expected tensors or numbers as the parts of a PerReplica argument: one program serves "
            "all replicas. Got "
            + ", ".join(f"replica {i}: {part!r}" for i, part in enumerate(parts))
            + ". Pass Python objects that are the same on all replicas as they are."
        )
    shapes = leaf.shapes
    dtypes = {jnp.result_type(p) for p in parts}
    if len({len(s) for s in shapes}) > 1 or len(dtypes) > 1:
        raise UnevenShapesError(
            "Expected parts of one rank and dtype on all replicas. Got "
            + ", ".join(f"replica {i}: {s} {jnp.result_type(p)}"
                        for i, (s, p) in enumerate(zip(shapes, parts, strict=True)))
            + ". Make every replica's part with the same function."
        )  # fmt: skip
    return Argument(shapes, dtypes.pop(), True)


def _key_of(leaf: Any) -> Any:
    """The same for leaves that are described the same.

    Every call makes it, while `describe` is only needed for a new program.
    """
    if isinstance(leaf, PerReplica) and (stacked := leaf.stacked) is not None:
        return ("stacked", stacked.shape, stacked.dtype)
    if isinstance(leaf, jax.Array):
        return ("array", leaf.shape, leaf.dtype)
    if isinstance(leaf, (DistributedValues, np.ndarray, np.generic)):
        return _OPEN if _has_structure(leaf) else describe(leaf)
    try:
        hash(leaf)
    except TypeError:
        return Same(leaf)
    # True == 1 == 1.0, but they make different programs.
    return (type(leaf), leaf)
