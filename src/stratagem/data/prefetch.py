"""Reads a little ahead in a thread that ends with whoever reads from it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from stratagem.data.exchange import Exchange, StoppedError

T = TypeVar("T")

_DEPTH = 2  # items that wait to be taken
_END = object()


_open: weakref.WeakSet[Prefetch[Any]] = weakref.WeakSet()


class Prefetch(Iterator[T], Generic[T]):
    """An iterator run ahead in a thread, at most two items; its errors come out at `next`.

    The thread ends with the iterator, with `close`, when this object is forgotten, and with the
    program.

    Args:
        items: what to run ahead; it belongs to the thread from now on.
        exchange: how `items` talks to other workers; its `stop` ends the thread.
    """

    def __init__(self, items: Iterator[T], exchange: Exchange):
        self._queue: queue.Queue[Any] = queue.Queue(_DEPTH)
        self._exchange = exchange
        self._ended = False
        task = (items, self._queue, exchange)
        thread = threading.Thread(target=_run, args=task, name="stratagem-input", daemon=True)
        self.close = weakref.finalize(self, _close, self._queue, exchange.stop, thread)
        _close_at_exit()
        _open.add(self)
        thread.start()

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        self._exchange.awaited_since = time.monotonic()
        item, error = self._queue.get()
        self._exchange.awaited_since = None
        if item is not _END:
            return item
        self._ended = True
        self.close()
        if error is not None:
            raise error
        raise StopIteration


@functools.cache
def _close_at_exit() -> None:
    # Before the job is left, whose channel the threads use: exit functions run last in, first out,
    # and the job was there before its data.
    atexit.register(lambda: [one.close() for one in list(_open)])


def _run(items: Iterator[Any], ahead: queue.Queue[Any], exchange: Exchange) -> None:
    error: BaseException | None = None
    stop = exchange.stop
    try:
        for item in items:
            ahead.put((item, None))
            if stop.is_set():
                return
    except StoppedError:
        return
    except BaseException as caught:  # told to who reads, in its thread
        error = caught
        with contextlib.suppress(Exception):  # the others may be gone, which may be the error
            exchange.fail(caught)
    finally:
        if not stop.is_set():
            ahead.put((_END, error))


def _close(ahead: queue.Queue[Any], stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    while thread.is_alive():
        try:
            ahead.get_nowait()  # makes room for what the thread is about to put
        except queue.Empty:
            thread.join(0.01)
