"""DynamicTable: an embedding layer whose table has no preset size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem import context
from stratagem.parameter_server.policy import Policy
from stratagem.step import ids as table_ids
from stratagem.strategies.remote import dynamic_policy


@keras.saving.register_keras_serializable("stratagem")
class DynamicTable(keras.layers.Layer):
    """Rows of trainable numbers for ids of any value; a row is made when its id is first trained.

    For ParameterServerStrategy. As `keras.layers.Embedding`, without `input_dim`: ids need no
    vocabulary and no hashing to a range, no two ids share a row, and rare or old ids can go without
    one. Which server has a row depends on the id alone, and so do its initial values. Any Keras
    optimizer whose update is elementwise works; its slots live beside the rows.

    A lookup in training makes the rows that it needs, when its gradients arrive. `evaluate` and
    `predict` make none: an id without a row has the values that it would start with.

    The design is that of Monolith (Liu et al., 2022, arXiv 2209.07663, section 2.2).

    Args:
        dim: numbers in a row.
        initializer: of Keras: Zeros, Ones, Constant, RandomUniform, RandomNormal or
            TruncatedNormal, or a name of one.
        name: of the layer.
        admit_after: an id gets its row when it is trained for the `admit_after`-th step; until
            then it keeps its initial values.
        expire_after: rows that were not trained for so many updates of their server are removed.
            None: never.
        max_rows: how many rows one server keeps at most. None: as many as its memory holds.
        when_full: "error" (TableFullError), or "evict": the least recently trained rows go.

    Input: int32 ids `[...]`; or, for ids of 64 bits, `DynamicTable.halves(ids)`, uint32 `[..., 2]`
    (JAX computes with 32 bits). Declare it: `keras.Input((n,), dtype="int32")`, or
    `keras.Input((n, 2), dtype="uint32")`.

    Output: `[..., dim]`.

    Raises:
        ValueError: made outside the scope of a ParameterServerStrategy, or an argument is wrong.
    """

    def __init__(
        self, dim: int, initializer: Any = "uniform", name: str | None = None,
        admit_after: int = 1, expire_after: int | None = None, max_rows: int | None = None,
        when_full: str = "error", **kwargs: Any,
    ):  # fmt: skip
        super().__init__(name=name, **kwargs)
        if not context.get_strategy().served:
            raise ValueError(
                f"Expected a DynamicTable in the scope of a ParameterServerStrategy, whose servers "
                f"keep its rows. Got {context.get_strategy()!r}. Make the model in "
                "`with strategy.scope():`, or use keras.layers.Embedding with a preset size."
            )
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise ValueError(f"dim: expected how many numbers a row has, 1 or more. Got {dim!r}.")
        self.dim = dim
        self.initializer = keras.initializers.get(initializer)
        self.policy = Policy(admit_after, expire_after, max_rows, when_full)
        self.autocast = False
        self.build()

    def build(self, input_shape: Any = None) -> None:
        """Makes the table, which is empty."""
        del input_shape
        if "table" in self.__dict__:
            return
        with dynamic_policy(self.policy):
            self.table = self.add_weight(
                shape=(table_ids.ROWS, self.dim), initializer=self.initializer, name="table"
            )
        self.built = True

    halves = staticmethod(table_ids.halves)

    def call(self, ids: Any) -> Any:
        """Rows of ids; see the class."""
        dtype = jnp.dtype(ids.dtype)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                f"Expected integer ids for {self.name!r}. Got {dtype}. Declare the input with "
                "keras.Input(shape, dtype='int32')."
            )
        if context.current().trace is not None:
            return table_ids.lookup(self.table.value, ids).astype(self.compute_dtype)
        shape = self.compute_output_shape(ids.shape, ids.dtype)
        if isinstance(ids, jax.core.Tracer):  # Keras infers shapes
            return jnp.zeros(shape, self.compute_dtype)
        return self._rows(np.asarray(ids)).reshape(shape)

    def _rows(self, ids: np.ndarray) -> Any:
        operand = ids if table_ids.is_wide(ids) else ids[..., None]
        distinct, where = np.unique(table_ids.whole(operand).reshape(-1), return_inverse=True)
        return jnp.asarray(self.table.read_rows(distinct)[where], self.compute_dtype)

    def compute_output_shape(self, input_shape: Any, dtype: Any = None) -> tuple[Any, ...]:
        """`[..., dim]`, without the axis of halves."""
        wide = dtype is not None and str(np.dtype(dtype)) == "uint32" and input_shape[-1:] == (2,)
        return (*(input_shape[:-1] if wide else input_shape), self.dim)

    def compute_output_spec(self, ids: Any) -> Any:
        """Shape and dtype, without looking anything up."""
        shape = self.compute_output_shape(tuple(ids.shape), ids.dtype)
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids that have a row, int64 `[n]`, and their rows `[n, dim]`, in no special order."""
        return self.table.items()

    def count_params(self) -> int:
        """Numbers in the rows that there are now."""
        return len(self.items()[0]) * self.dim

    def save_own_variables(self, store: Any) -> None:
        """The rows that there are, with their ids."""
        store["ids"], store["rows"] = self.items()

    def load_own_variables(self, store: Any) -> None:
        """Sets the rows that were saved; others stay."""
        self.table.put(np.asarray(store["ids"], np.int64), np.asarray(store["rows"]))

    def get_config(self) -> dict[str, Any]:
        """What makes an equal layer."""
        return {
            **super().get_config(),
            "dim": self.dim,
            "initializer": keras.initializers.serialize(self.initializer),
            "admit_after": self.policy.admit_after,
            "expire_after": self.policy.expire_after,
            "max_rows": self.policy.max_rows,
            "when_full": self.policy.when_full,
        }
