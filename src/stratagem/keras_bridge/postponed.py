"""Metrics whose state is no sum, where workers take the batches: updated here, with whole batches.

A worker's metrics begin at zero, and its part is added to the others'. That is exact for counts and
sums, and wrong for a maximum, a moving average or the value of the last batch. For such a metric a
step gives back what the metric would have been updated with, and this process updates it, in the
order of the batches.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import _keras

_step: contextvars.ContextVar[Updates | None] = contextvars.ContextVar(
    "stratagem_postponed", default=None
)


@dataclasses.dataclass
class Updates:
    """The updates that one traced step leaves to this process.

    Attributes:
        parts: whether the step is for a part of a batch.
        calls: for each the metric, and the structure and leaves of its arguments, where the
            number of an array stands for it, and perhaps of its mask.
        arrays: what the step gives back for them, while it is traced.
    """

    parts: bool
    calls: list[tuple[Any, Any, list[Any]]] = dataclasses.field(default_factory=list)
    arrays: list[Any] = dataclasses.field(default_factory=list)

    def take(self, metric: Any, tree: Any, leaves: list[Any], where: list[int]) -> None:
        """An update that is not made now.

        Args:
            metric: whose.
            tree: structure of its arguments.
            leaves: its arguments.
            where: which of them are tensors.
        """
        kept = list(leaves)
        for i in where:
            mask = _keras.get_keras_mask(leaves[i])
            kept[i] = _Place(self._number(leaves[i]), None if mask is None else self._number(mask))
        self.calls.append((metric, tree, kept))

    def given(self) -> list[Any]:
        """What the step gives back, at its end."""
        arrays, self.arrays = self.arrays, []
        return arrays

    def _number(self, array: Any) -> int:
        self.arrays.append(jnp.asarray(array))
        return len(self.arrays) - 1

    def make(self, arrays: list[Any]) -> None:
        """Makes them, with what whole batches have given."""
        for metric, tree, leaves in self.calls:
            args, kwargs = jax.tree.unflatten(tree, [_filled(x, arrays) for x in leaves])
            metric.update_state(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Place:
    array: int
    mask: int | None


def _filled(leaf: Any, arrays: list[Any]) -> Any:
    if not isinstance(leaf, _Place):
        return leaf
    value = jnp.asarray(arrays[leaf.array])
    if leaf.mask is not None:
        _keras.set_keras_mask(value, jnp.asarray(arrays[leaf.mask]))
    return value


@contextlib.contextmanager
def collected(updates: Updates) -> Iterator[None]:
    """In the body a step is traced that may leave updates to this process."""
    token = _step.set(updates)
    try:
        yield
    finally:
        _step.reset(token)


def current() -> Updates | None:
    """Those of the step that is traced; None where it cannot leave any."""
    return _step.get()


class Batches:
    """What batches have given back, until it is their turn. Any thread.

    Attributes:
        updates: what is to be made of it; None before a step is traced.
    """

    def __init__(self) -> None:
        self.updates: Updates | None = None
        self._lock = threading.Lock()
        self._parts: list[list[tuple[int, list[Any]] | None]] = []  # rows and arrays, by batch
        self._done = 0

    def begin(self, parts: int) -> int:
        """A batch is cut into parts; gives its number."""
        with self._lock:
            self._parts.append([None] * parts)
            return len(self._parts) - 1

    def came(self, batch: int, part: int, rows: int, arrays: list[Any]) -> None:
        """A part has given back its arrays; none where there was no data any more."""
        with self._lock:
            if batch < len(self._parts):
                self._parts[batch][part] = rows, arrays

    def settle(self) -> None:
        """Makes the updates of all batches whose turn it is. A user's thread."""
        while True:
            with self._lock:
                if self._done == len(self._parts) or None in self._parts[self._done]:
                    return
                parts = [part for part in self._parts[self._done] if part is not None]
                self._parts[self._done], self._done = [], self._done + 1
            parts = [part for part in parts if part[1]]
            if parts and self.updates is not None:
                sizes = [rows for rows, _ in parts]
                every = zip(*(arrays for _, arrays in parts), strict=True)
                self.updates.make([_joined(list(each), sizes) for each in every])

    def forget(self) -> None:
        """Forgets all batches."""
        with self._lock:
            self._parts, self._done = [], 0


def _joined(values: list[Any], rows: list[int]) -> Any:
    """What a whole batch has: all rows, and of numbers the mean by rows."""
    if len(values) == 1:
        return values[0]
    if np.ndim(values[0]):
        return np.concatenate([np.asarray(v) for v in values])
    return np.average(np.asarray(values), weights=rows).astype(np.asarray(values[0]).dtype)
