"""PerWorkerValues: an argument of a scheduled function, of which each worker gets its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem.coordinator.arrays import check_numbers
from stratagem.values import as_array

_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float, complex)
_NAMED = 4  # workers that an error names


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerArrays:
    """One array a worker, all of one shape and dtype; by worker index."""

    values: tuple[np.ndarray, ...]


class PerWorkerValues:
    """One value a worker: as an argument of a scheduled function, each worker gets its own.

    Args:
        values: by worker index: arrays, numbers, booleans, or structures of them. They are copied.

    Raises:
        ValueError: there are none, or they differ in structure, shape or dtype.
        TypeError: they hold other things, which are not the same for all workers.
    """

    def __init__(self, values: Sequence[Any]):
        self._values = tuple(values)
        if not self._values:
            raise ValueError(
                "PerWorkerValues: expected a value for each worker. Got none. Pass a list of as "
                "many as there are workers."
            )
        self.opened = _opened(self._values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values, by worker index."""
        return self._values

    def __repr__(self) -> str:
        return f"PerWorkerValues({list(self._values)})"


def open_values(arguments: Any) -> Any:
    """Arguments with structures of `WorkerArrays` in the place of PerWorkerValues."""
    return jax.tree.map(lambda x: x.opened if isinstance(x, PerWorkerValues) else x, arguments)


def _opened(values: Sequence[Any]) -> Any:
    paths, tree = jax.tree_util.tree_flatten_with_path(values[0])
    flat = [jax.tree.flatten(value) for value in values]
    _check_same([found for _, found in flat], "", "structure")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    named = zip((jax.tree_util.keystr(path) for path, _ in paths), columns, strict=True)
    return jax.tree.unflatten(tree, [_joined(name, column) for name, column in named])


def _joined(name: str, column: Sequence[Any]) -> Any:
    """What stands for a leaf of all values: arrays, or the object that all of them have."""
    first = column[0]
    if all(isinstance(x, _NUMBERS) for x in column):
        for worker, x in enumerate(column):
            check_numbers(x, f"PerWorkerValues, worker {worker}, value{name}")
        arrays = tuple(as_array(x, kept=True) for x in column)
        _check_same([f"{x.dtype}{list(x.shape)}" for x in arrays], name, "shape and dtype")
        return WorkerArrays(arrays)
    equal = all(type(x) is type(first) and (x is first or (x == first) is True) for x in column)
    if not equal or isinstance(first, PerWorkerValues):
        raise TypeError(
            f"PerWorkerValues: expected numbers, booleans or arrays, or structures of them. Got "
            f"{_listed([f'{x!r} ({type(x).__name__})' for x in column])} as value{name}. One "
            "program serves all workers, so other objects have to be equal: choose in it by "
            "experimental_get_current_worker_index(), with jnp.where or an index."
        )
    return first


def _check_same(described: Sequence[Any], name: str, what: str) -> None:
    differ = [str(one) if not i or one != described[0] else "" for i, one in enumerate(described)]
    if any(differ[1:]):
        raise ValueError(
            f"PerWorkerValues: expected values of the same {what}, as one program serves all "
            f"workers. Got {_listed(differ)} as value{name}. Make them alike: pad what is "
            "smaller, and say the dtype."
        )


def _listed(texts: Sequence[str]) -> str:
    """Some workers' texts; empty ones are left out."""
    found = [f"worker {worker}: {text}" for worker, text in enumerate(texts) if text]
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
