"""RemoteValue: the result of a scheduled function, which some worker computes some time."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CancelledError = concurrent.futures.CancelledError


class RemoteValue:
    """What `ClusterCoordinator.schedule` returns at once. Coordinator only.

    It has TensorFlow's `fetch` and `get`, and the methods of `concurrent.futures.Future`.
    """

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._ended = False

    def fetch(self) -> Any:
        """Waits for the result, and gives it as NumPy arrays; None if the data had ended.

        Raises:
            CancelledError: another closure failed, or the strategy was closed, before this one
                was done.
            Exception: what the function raised on the worker.
        """
        return self._future.result()

    def get(self) -> Any:
        """`fetch`, as JAX arrays."""
        return jax.tree.map(
            lambda x: jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x,
            self.fetch(),
        )

    def done(self) -> bool:
        """Whether there is a result, an error, or nothing to come. Never waits."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        """`fetch` with a deadline in seconds.

        Raises:
            TimeoutError: no result in time.
        """
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits for the error of the function; None where it has a result."""
        return self._future.exception(timeout)

    def cancelled(self) -> bool:
        """Whether it was dropped: another closure had failed, or the strategy was closed."""
        return self._future.cancelled()

    def add_done_callback(self, fn: Callable[[RemoteValue], Any]) -> None:
        """Calls `fn(self)` when it is done, in the coordinator's thread: keep it short."""
        self._future.add_done_callback(lambda _: fn(self))

    def is_ok(self) -> bool:
        """False once the data of the closure are known to have ended, or it has failed.

        So `while coordinator.schedule(step, (iterator,)).is_ok(): pass` is one pass over the data.
        """
        if self._ended:
            return False
        if not self._future.done() or self._future.cancelled():
            return not self._future.cancelled()
        return self._future.exception() is None

    @property
    def ended(self) -> bool:
        """True for a closure that found no data left, and so was not run."""
        return self._ended

    def end(self) -> None:
        """Says that there were no data for it. Called by the coordinator."""
        self._ended = True
        self._future.set_result(None)

    def set_result(self, value: Any) -> None:
        """Called by the coordinator, once."""
        self._future.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """Called by the coordinator, once."""
        self._future.set_exception(error)

    def cancel(self) -> None:
        """Called by the coordinator, once."""
        self._future.cancel()
        self._future.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "ready" if self.done() else "not ready"
        return f"<RemoteValue {state}>"


def fetch(value: Any) -> Any:
    """A structure with the results of the remote values in it; other leaves as they are."""
    return jax.tree.map(
        lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf,
        value,
        is_leaf=lambda leaf: isinstance(leaf, RemoteValue),
    )
