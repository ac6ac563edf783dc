"""Reads one element of a dataset: its leaves as arrays, or an error that names every bad leaf."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np


class Element(NamedTuple):
    """An element taken apart.

    Args:
        leaves: NumPy or JAX arrays, in the order of `treedef`.
        treedef: the structure.
    """

    leaves: list[Any]
    treedef: jax.tree_util.PyTreeDef


def read_element(element: Any, index: int) -> Element:
    """Takes an element apart. Tensors of other libraries become NumPy arrays.

    Args:
        element: structure of arrays.
        index: its place in the dataset, for errors.

    Raises:
        TypeError: a leaf is no array, or of a dtype that devices do not hold; all such leaves.
    """
    leaves, treedef = jax.tree.flatten(element)
    arrays = [leaf if type(leaf) is np.ndarray else _as_array(leaf) for leaf in leaves]
    for array in arrays:
        # Kinds b, i, u, f, c; the rest (bfloat16 and its like, keys, strings) is looked at closely.
        if array is None or (array.dtype.kind not in "biufc" and not _is_held(array)):
            _refuse_leaves(element, index)
    if not arrays:
        raise ValueError(
            f"Expected an element with at least one array. Got {element!r} as element {index} of "
            "the dataset."
        )
    return Element(arrays, treedef)


def read_batch(batch: Any, index: int) -> tuple[Element, int]:
    """Takes a batch apart and returns its row count too.

    Raises:
        TypeError: see `read_element`.
        ValueError: a leaf has no row axis, the leaves differ in rows, or there are no rows.
    """
    read = read_element(batch, index)
    shapes = [array.shape for array in read.leaves]
    if not all(shapes):
        bad = [name for name, shape in zip(_names(batch), shapes, strict=True) if not shape]
        raise ValueError(
            f"Expected batches: arrays whose first axis counts rows. Got scalars in batch {index} "
            f"of the dataset: {', '.join(bad)}. Batch the dataset first (`.batch(n)` in tf.data "
            "and Grain, `batch_size=n` in a torch DataLoader, stratagem.data.batches for arrays)."
        )
    rows = shapes[0][0]
    if any(shape[0] != rows for shape in shapes):
        found = [f"{n}: {s[0]} rows" for n, s in zip(_names(batch), shapes, strict=True)]
        raise ValueError(
            f"Expected the same number of rows in every array of a batch. Got {', '.join(found)} "
            f"in batch {index} of the dataset."
        )
    if rows == 0:
        raise ValueError(
            f"Expected at least one row in every batch. Got 0 rows in batch {index} of the "
            "dataset. Filter empty batches out, or filter rows before batching."
        )
    return read, rows


def check_structure(
    expected: jax.tree_util.PyTreeDef, got: jax.tree_util.PyTreeDef, index: int
) -> None:
    """Raises ValueError unless the element has the structure of the first one."""
    if expected != got:
        raise ValueError(
            "Expected every element of the dataset to have the structure of the first, "
            f"{expected}. Got {got} at element {index}."
        )


def _as_array(leaf: Any) -> Any:
    """The leaf as a NumPy or JAX array; None when it is neither nor converts to one."""
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return leaf
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        if leaf.dtype == torch.bfloat16:  # NumPy's view of torch tensors has no such type
            return leaf.view(torch.int16).numpy().view(jax.numpy.bfloat16)
        return leaf.numpy()
    if isinstance(leaf, (bool, int, float, complex, np.generic, str, bytes)):
        return np.asarray(leaf)
    return np.asarray(leaf) if hasattr(leaf, "__array__") else None


def _is_held(array: Any) -> bool:
    return isinstance(array, jax.Array) or jax.numpy.issubdtype(array.dtype, np.number)


def _names(tree: Any) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [f"batch{jax.tree_util.keystr(path)}" for path, _ in paths]


def _refuse_leaves(element: Any, index: int) -> NoReturn:
    bad = []
    for name, leaf in zip(_names(element), jax.tree.leaves(element), strict=True):
        array = _as_array(leaf)
        if array is None:
            bad.append(f"{name} of type {type(leaf).__module__}.{type(leaf).__qualname__}")
        elif array.dtype.kind not in "biufc" and not _is_held(array):
            bad.append(f"{name} of dtype {array.dtype}")
    raise TypeError(
        f"Expected arrays of numbers or booleans. Got {', '.join(bad)} in element {index} of the "
        "dataset. Encode strings as integers before (keras.layers.StringLookup or Hashing), make "
        "sparse and ragged tensors dense, and leave everything else out of the batch."
    )
