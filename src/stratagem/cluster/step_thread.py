"""A thread that makes one call after the other, and can be left alone with one that is stuck."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

# How long a process with a step that was left behind lets the one before it end.
_LEAVING_SECONDS = 2.0
_LEAVING_LAST = 5

_STATUS = re.compile(r"[A-Z_]+: ")

T = TypeVar("T")


class Call:
    """A call that a `StepThread` makes.

    Attributes:
        done: whether it has ended; then there is a result, or an error.
    """

    def __init__(self, call: Callable[[], Any]):
        self.call: Callable[[], Any] | None = call
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None


class StepThread:
    """A thread that runs one call after the other, and can be left alone with one.

    Args:
        news: what to tell when a call is done; held by who calls the methods.
    """

    def __init__(self, news: threading.Condition):
        self._news = news
        self._job: Call | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name="stratagem-step", daemon=True)
        self._thread.start()

    def is_this(self) -> bool:
        """Whether the caller is a call of this thread."""
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[[], Any]) -> Call:
        """Runs a call; its result is there once it is `done`."""
        self._job = job = Call(call)
        self._news.notify_all()
        return job

    def abandon(self) -> None:
        """Ends the thread, once it is free."""
        self._abandoned = True
        self._news.notify_all()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._job is not None or self._abandoned)
                job, self._job = self._job, None
            if job is None or job.call is None:
                return
            try:
                job.result = _computed(job.call())
            except BaseException as error:
                job.error = error
            with self._news:
                # What the call holds has to go when the caller lets it go.
                job.call, job.done = None, True
                self._news.notify_all()
            del job


def await_all(threads: Sequence[StepThread], rank: int) -> None:
    """Lets threads that were left behind end before the process does; some seconds at most.

    They wait for connections to processes that end now, as this one does. One that comes back from
    native code while Python ends takes the process down (SIGABRT, before Python 3.14). So it
    is waited for; and where two processes wait for each other so, the first rank ends first.
    """
    deadline = time.monotonic() + min(rank + 1, _LEAVING_LAST) * _LEAVING_SECONDS
    for thread in threads:
        thread._thread.join(max(0.0, deadline - time.monotonic()))


def may_tell_of_a_loss(error: BaseException | None) -> bool:
    """Whether it comes from XLA: small programs raise ValueError with the text of a status."""
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError)


def _computed(result: T) -> T:
    """Waits for all arrays of a result.

    `jax.block_until_ready` takes Python's lock five times a second to look for signals. In a thread
    that is left behind, that ends a process at its exit with SIGABRT (before Python 3.14). Copying
    an array to the host waits without that; the smallest one comes last as well as any.
    """
    arrays = [
        leaf
        for leaf in jax.tree.leaves(result)
        if isinstance(leaf, jax.Array)
        and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    if arrays:
        np.asarray(min(arrays, key=lambda array: array.nbytes).addressable_data(0))
    return jax.block_until_ready(result)
