"""ShardedVariable: what a variable whose rows are on several servers can do row by row.

TensorFlow's names (`tensorflow/python/distribute/sharded_variable.py`) for a Keras variable, from
which come `assign`, arithmetic and the rest that takes the whole value.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem._keras import in_stateless_scope
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.values import IndexedSlices, check_integers

# How scattered rows with the same index become one; of "set" the last one stays.
_COMBINE: dict[str, Any] = {
    "add": np.add, "sub": np.add, "mul": np.multiply, "div": np.multiply, "min": np.minimum,
    "max": np.maximum,
}  # fmt: skip


class ShardView:
    """The rows of one shard. Reads and writes go to the server that has them.

    It is no variable to gradients and optimizers: `variables.refuse_shards`.

    Args:
        whole: the variable.
        number: of the shard.
        start: its first row in the variable.
        stop: the row after its last.
    """

    def __init__(self, whole: ShardedVariable, number: int, start: int, stop: int):
        self.part_of, self.start, self.stop = whole, start, stop
        self.name = f"{whole.name}/part_{number}"
        self.shape = (stop - start, *whole.shape[1:])
        self.dtype = whole.dtype

    def numpy(self) -> np.ndarray:
        """Its value now."""
        return self.part_of._held(self.start, self.stop)

    @property
    def value(self) -> jax.Array:
        """Its value now; in a traced step, that of the step."""
        return jnp.asarray(self.part_of[self.start : self.stop])

    def assign(self, value: Any) -> ShardView:
        """Sets its rows, `[rows, ...]`."""
        self._refuse_in_step("assign")
        self.part_of.assign_rows(self.start, self._like(value))
        return self

    def assign_add(self, delta: Any) -> ShardView:
        """Adds `[rows, ...]` on the server."""
        self._refuse_in_step("assign_add")
        self._scatter("add", delta)
        return self

    def assign_sub(self, delta: Any) -> ShardView:
        """Subtracts `[rows, ...]` on the server."""
        self._refuse_in_step("assign_sub")
        self._scatter("sub", delta)
        return self

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """Rows by their numbers in the shard, `[n]` to `[n, ...]`."""
        del name
        if in_stateless_scope():
            return jnp.take(self.value, indices, axis=0)
        rows = _indices(indices, self.shape[0], self.name)
        return self.part_of.sparse_read(rows + self.start)

    def _scatter(self, op: str, delta: Any) -> None:
        self.part_of.scatter(op, np.arange(self.start, self.stop), self._like(delta))

    def _refuse_in_step(self, method: str) -> None:
        if in_stateless_scope():
            raise NotImplementedError(
                f"Expected {method} of the shard {self.name!r} outside of a compiled step. Got it "
                f"inside. Use {method} of the variable itself, {self.part_of.name!r}, there: "
                "servers change the rows that each of them has."
            )

    def _like(self, value: Any) -> np.ndarray:
        array = _as_held(value, self.dtype)
        if array.shape != self.shape:
            raise ValueError(
                f"Expected a value of shape {self.shape} for {self.name!r}. Got {array.shape}. "
                "Pass one row for each row of the shard."
            )
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __repr__(self) -> str:
        return f"<ShardView {self.name!r}, shape={self.shape}, dtype={self.dtype}>"


class ShardedVariable:
    """Mixed into a Keras variable that is cut along its first axis.

    Of the other class: `name`, `shape`, `dtype`, `value`, and what this class declares below.
    Inside a traced step everything works on the step's value; outside only the rows that are
    asked for travel.

    Attributes:
        shard_ranges: (first row, row after the last) of each shard.
        read: (start, stop) to the rows between, a NumPy array.
        assign_rows: (start, rows) sets rows from `start` on.
        scatter: (op, indices, updates) changes rows. op: "set", "add", "sub", "mul", "div",
            "min" or "max"; indices ascending and distinct, int64; one update for each.
        read_rows: optional: indices (ascending, distinct, int64) to their rows, in one request.
            Without it, rows are read in runs of consecutive ones.
    """

    name: str
    shape: Any
    dtype: Any
    value: Any
    shard_ranges: Sequence[tuple[int, int]]
    read: Callable[[int, int], np.ndarray]
    assign_rows: Callable[[int, np.ndarray], None]
    scatter: Callable[[str, np.ndarray, np.ndarray], None]

    @property
    def variables(self) -> list[ShardView]:
        """The shards, by their rows."""
        return [ShardView(self, i, *rows) for i, rows in enumerate(self.shard_ranges)]

    def __iter__(self) -> Iterator[ShardView]:
        return iter(self.variables)

    def numpy(self) -> np.ndarray:
        """The whole value now."""
        return self._held(0, self.shape[0])

    def _held(self, start: int, stop: int) -> np.ndarray:
        """Rows now; in a traced step those of the step, which are no NumPy array (an error)."""
        if in_stateless_scope():
            return np.asarray(self.value[start:stop])
        return self.read(start, stop)

    def __getitem__(self, index: Any) -> jax.Array:
        """Reads as `array[index]` does: integers, slices, Ellipsis, newaxis, or a boolean mask.

        In a traced step also by what else JAX allows; row numbers in a tensor are a lookup there.

        Raises:
            TypeError: the index is a tensor that is no mask; see `sparse_read`.
            IndexError: it is out of range.
        """
        if isinstance(index, list):
            index = np.asarray(index)
        if in_stateless_scope():
            return self.value[index]
        if isinstance(index, (np.ndarray, jax.Array)) and index.dtype == bool and index.ndim:
            return self._masked(index)
        index = index if isinstance(index, tuple) else (index,)
        for part in index:
            if not (part is None or part is Ellipsis or isinstance(part, slice)):
                _check_integer(part)
        first, rest = (index[0], index[1:]) if index else (Ellipsis, ())
        if first is None:
            return self[rest][None]
        if isinstance(first, slice):
            rows = range(*first.indices(self.shape[0]))
            return jnp.asarray(self._rows(rows)[(slice(None), *rest)])
        if first is Ellipsis:
            return jnp.asarray(self.numpy()[index])
        row = _in_range(operator.index(first), self.shape[0], self.name)
        return jnp.asarray(self.read(row, row + 1)[(0, *rest)])

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """The rows of indices `[n]`, which may repeat: `[n, ...]`.

        Raises:
            ValueError: indices have another rank than 1.
            TypeError: they are no integers.
            IndexError: they are out of range.
            NotImplementedError: the shards are not laid out evenly, first the larger ones.
        """
        del name
        self._check_layout()
        if in_stateless_scope():
            return jnp.take(self.value, indices, axis=0)
        rows = _indices(indices, self.shape[0], self.name)
        distinct, places = np.unique(rows, return_inverse=True)
        return jnp.asarray(self._rows(distinct)[places])

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Adds to rows, on their servers; equal indices add up."""
        return self._scatter("add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Subtracts from rows, on their servers; equal indices add up."""
        return self._scatter("sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Multiplies rows, on their servers; equal indices multiply."""
        return self._scatter("mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Divides rows, on their servers; equal indices multiply."""
        return self._scatter("div", sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Lowers rows to what is given, where that is less."""
        return self._scatter("min", sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Raises rows to what is given, where that is more."""
        return self._scatter("max", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Sets rows; of equal indices the last one counts."""
        return self._scatter("set", sparse_delta)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> ShardedVariable:
        """Sets rows. As in TensorFlow indices are `[n]`, where it is the same as scatter_update."""
        return self._scatter("set", sparse_delta)

    def _scatter(self, op: str, delta: Any) -> ShardedVariable:
        if not isinstance(delta, IndexedSlices):
            raise TypeError(
                f"Expected IndexedSlices for {self.name!r}. Got {type(delta).__name__}. Pass "
                "stratagem.IndexedSlices(values, indices)."
            )
        self._check_layout()
        if in_stateless_scope():
            raise NotImplementedError(
                f"Expected scatter methods of {self.name!r} outside of a compiled step. Got one "
                "inside. Use variable.assign(variable.value.at[indices].add(values)) there."
            )
        rows = _indices(delta.indices, self.shape[0], self.name)
        updates = _as_held(delta.values, self.dtype)
        wanted = (len(rows), *self.shape[1:])
        if updates.shape not in (wanted, ()):
            raise ValueError(
                f"Expected values of shape {wanted}, or a scalar, for {len(rows)} rows of "
                f"{self.name!r}. Got {updates.shape}. Pass one row of values for each index."
            )
        updates = np.broadcast_to(updates, wanted)
        if not np.all(rows[1:] > rows[:-1]):
            rows, updates = _combined(op, rows, updates)
        if len(rows):
            self.scatter(op, rows, np.ascontiguousarray(updates))
        return self

    def _masked(self, mask: Any) -> jax.Array:
        mask = np.asarray(mask)
        if mask.shape != tuple(self.shape[: mask.ndim]):
            raise IndexError(
                f"Expected a mask of the shape of {self.name!r}, {tuple(self.shape)}, or of its "
                f"first axes. Got {mask.shape}. Pass one boolean for each."
            )
        rows = np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1))
        return jnp.asarray(self._rows(rows)[mask[rows]])

    def _rows(self, rows: range | np.ndarray) -> np.ndarray:
        """Distinct rows, ascending or (of a range) descending: `[len(rows), ...]`."""
        if isinstance(rows, range):
            if rows.step == 1 or len(rows) < 2:
                return self._run(rows.start, rows.start + len(rows))
            if rows.step < 0:
                return self._rows(rows[::-1])[::-1]
            rows = np.arange(rows.start, rows.stop, rows.step)
        if (read_rows := getattr(self, "read_rows", None)) is not None and len(rows):
            return read_rows(rows)
        bounds = [0, *(np.flatnonzero(np.diff(rows) > 1) + 1), len(rows)]
        runs = [rows[i:j] for i, j in itertools.pairwise(bounds) if i < j]
        parts = [self._run(int(run[0]), int(run[-1]) + 1) for run in runs]
        return np.concatenate(parts) if parts else self._run(0, 0)

    def _run(self, start: int, stop: int) -> np.ndarray:
        if start == stop:  # nothing to ask anyone for
            return np.empty((0, *self.shape[1:]), dtype_of(self.dtype))
        return self.read(start, stop)

    def _check_layout(self) -> None:
        base, extra = divmod(self.shape[0], len(self.shard_ranges))
        found = [stop - start for start, stop in self.shard_ranges]
        if found != [base + (i < extra) for i in range(len(found))]:
            raise NotImplementedError(
                f"Expected shards of {self.name!r} in the layout 'div': as many rows each, the "
                f"first ones one more. Got shards of {found} rows. Use indices of the shards in "
                "`variables`."
            )


def _as_held(value: Any, dtype: str) -> np.ndarray:
    """A value in a variable's dtype; integers that a step would not read are refused."""
    array, held = np.asarray(value), np.dtype(dtype_of(dtype))
    if held.kind in "iu":
        check_integers(array, jax.dtypes.canonicalize_dtype(held))
    return array.astype(held, copy=False)


def _combined(op: str, rows: np.ndarray, updates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending, distinct rows, and one update for each."""
    if op == "set":
        distinct, from_end = np.unique(rows[::-1], return_index=True)
        return distinct, updates[len(rows) - 1 - from_end]
    order = np.argsort(rows, kind="stable")
    distinct, starts = np.unique(rows[order], return_index=True)
    if not len(distinct):
        return distinct, updates
    return distinct, _COMBINE[op].reduceat(updates[order], starts, axis=0)


def _indices(indices: Any, rows: int, name: str) -> np.ndarray:
    """Checked row numbers `[n]`, int64."""
    array = np.asarray(indices)
    if array.ndim != 1:
        raise ValueError(
            f"Expected indices of shape [n] for {name!r}. Got {array.shape}. Flatten them, and "
            "reshape what comes back."
        )
    if not len(array):
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"Expected integer indices for {name!r}. Got {array.dtype}. Convert them to int64."
        )
    for index in (array.min(), array.max()):
        if not 0 <= index < rows:
            raise IndexError(_out_of_range(int(index), rows, name))
    return array.astype(np.int64)


def _check_integer(part: Any) -> None:
    if isinstance(part, (int, np.integer)) and not isinstance(part, bool):
        return
    raise TypeError(
        "Expected an index of integers, slices, Ellipsis, newaxis, or one boolean mask. Got "
        f"{type(part).__name__}. Use sparse_read for rows whose numbers are in a tensor."
    )


def _in_range(index: int, rows: int, name: str) -> int:
    row = index + rows if index < 0 else index
    if not 0 <= row < rows:
        raise IndexError(_out_of_range(index, rows, name))
    return row


def _out_of_range(index: int, rows: int, name: str) -> str:
    return (
        f"Expected an index below {rows}, the rows of {name!r}. Got {index}. Look the index up in "
        "the data, or make the variable larger."
    )
