"""Elements without rows, for a worker that has run out or never had any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem.data.batch import Element
from stratagem.errors import JobMismatchError

Shapes = Sequence[Sequence[int]]  # of each leaf


def to_json(element: Element, *, rows_alike: bool = False) -> Any:
    """Structure and dtypes of an element, for another worker's `from_json`.

    Args:
        rows_alike: all its rows have the same shape, which is sent too.
    """
    numbered = element.treedef.unflatten(range(len(element.leaves)))
    shapes = [leaf.shape[1:] if rows_alike else () for leaf in element.leaves]
    return {
        "structure": str(element.treedef),
        "tree": _encoded(numbered),
        "shapes": [list(shape) for shape in shapes],
        "dtypes": [
            f"{leaf.dtype.name}{list(shape) if rows_alike else ''}"
            for leaf, shape in zip(element.leaves, shapes, strict=True)
        ],
    }


def check_alike(described: Sequence[Any]) -> None:
    """Compares the elements of all workers.

    Args:
        described: by worker, `to_json` of an element, or None.

    Raises:
        JobMismatchError: they differ; lists them.
    """
    known = {w: one for w, one in enumerate(described) if one is not None}
    if len({str(one) for one in known.values()}) > 1:
        lines = [
            f"  worker {w}: {one['structure']} of {', '.join(one['dtypes'])}"
            for w, one in known.items()
        ]
        raise JobMismatchError(
            "Expected elements of the same structure and dtypes from every worker's dataset. Got\n"
            + "\n".join(lines)
            + "\nMake the same kind of dataset on all workers."
        )


def from_json(described: Any) -> Element:
    """An element of no rows, of that structure and dtypes.

    Raises:
        ValueError: its structure has nodes other than dict, list and tuple.
    """
    leaves = [
        np.zeros((0, *shape), jax.numpy.dtype(name.partition("[")[0]))
        for name, shape in zip(described["dtypes"], described["shapes"], strict=True)
    ]
    tree = _decoded(described["tree"], described["structure"])
    return Element(leaves, jax.tree.structure(tree))


def without_rows(like: Element, shapes: Shapes) -> Element:
    """An element of no rows, whose other axes are those of `shapes`."""
    leaves = [
        np.zeros((0, *shape[1:]), leaf.dtype)
        for leaf, shape in zip(like.leaves, shapes, strict=True)
    ]
    return Element(leaves, like.treedef)


def _encoded(node: Any) -> Any:
    if isinstance(node, int) or node is None:
        return node
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _encoded(value) for key, value in node.items()}}
    if type(node) in (list, tuple):
        return {type(node).__name__: [_encoded(value) for value in node]}
    return {"other": type(node).__name__}


def _decoded(node: Any, structure: str) -> Any:
    if isinstance(node, int) or node is None:
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        return {key: _decoded(item, structure) for key, item in value.items()}
    if kind == "other":
        raise ValueError(
            "Expected every worker to have at least one element, or elements made of dicts with "
            f"text keys, lists and tuples. Got no element on this worker, and {structure} with a "
            f"{value} on another. Give each worker an element, or use plain containers."
        )
    return (list if kind == "list" else tuple)(_decoded(item, structure) for item in value)
