"""PerWorkerVariable: a number, or an array, that each worker has its own of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem import context
from stratagem.coordinator.per_worker import experimental_get_current_worker_index


class PerWorkerVariable:
    """A variable that nothing synchronises: in a scheduled function, that of the worker.

    (`tf.Variable(..., per_worker_variable=True)`.) Its values live on a parameter server, so that
    those of a worker that is lost stay; a worker runs one function at a time, and so is alone with
    its own. For counts and sums of functions; it is not trained.

    Args:
        initial_value: of each worker.
        dtype: of it; None for that of the value.
        name: of the variable.

    Raises:
        ValueError: made outside the scope of a ParameterServerStrategy.
    """

    def __init__(self, initial_value: Any, dtype: Any = None, name: str | None = None):
        strategy = context.get_strategy()
        if not strategy.served:
            raise ValueError(
                "Expected a PerWorkerVariable in the scope of a ParameterServerStrategy. Got "
                f"{strategy!r}. Make it in `with strategy.scope():`."
            )
        first = jnp.asarray(initial_value, dtype)
        self.shape, self.dtype = first.shape, first.dtype
        whole = np.broadcast_to(np.asarray(first), (len(strategy.workers), *first.shape))
        self._all = keras.Variable(
            whole, dtype=str(first.dtype), trainable=False, name=name or "per_worker"
        )

    @property
    def value(self) -> jax.Array:
        """This worker's value. In scheduled functions."""
        return self._all.value[self._index()]

    def assign(self, value: Any) -> PerWorkerVariable:
        """Sets this worker's value. In scheduled functions."""
        return self.assign_add(jnp.asarray(value, self.dtype) - self.value)

    def assign_add(self, delta: Any) -> PerWorkerVariable:
        """Adds to this worker's value. In scheduled functions."""
        workers = jnp.arange(self._all.shape[0]).reshape(-1, *(1,) * len(self.shape))
        delta = jnp.broadcast_to(jnp.asarray(delta, self.dtype), self.shape)
        zero = jnp.zeros((), self.dtype)
        self._all.assign_add(jnp.where(workers == self._index(), delta, zero))
        return self

    def assign_sub(self, delta: Any) -> PerWorkerVariable:
        """Subtracts from this worker's value. In scheduled functions."""
        return self.assign_add(-jnp.asarray(delta, self.dtype))

    def read_all(self) -> np.ndarray:
        """The values of all workers, `[workers, ...]`. On the coordinator."""
        return np.asarray(self._all.numpy())

    def _index(self) -> Any:
        try:
            return experimental_get_current_worker_index()
        except RuntimeError:
            raise ValueError(
                "Expected a PerWorkerVariable to be used in a scheduled function. Got a use on the "
                "coordinator, which is no worker. Use read_all() there."
            ) from None

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __repr__(self) -> str:
        return f"<PerWorkerVariable shape={self.shape}, dtype={self.dtype}>"
