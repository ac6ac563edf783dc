"""A hub in a thread of its own, which other threads ask to do things."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from stratagem.errors import PeerTimeoutError

T = TypeVar("T")

_LONGEST_TURN = 1.0  # seconds

_log = logging.getLogger("stratagem")


class HubThread:
    """Runs a hub; everything that uses the hub runs in its thread.

    Args:
        make: makes the hub, in the thread.
        name: of the thread.
    """

    def __init__(self, make: Callable[[], Any], name: str):
        self._work: deque[tuple[Callable[[Any], Any], Future[Any] | None]] = deque()
        self._ticks: list[tuple[float, Callable[[], None]]] = []
        self._closing = self._ended = False
        self._waits = False
        self._hub: Any = None
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, started), name=name, daemon=True
        )
        self._thread.start()
        started.result()

    def submit(self, work: Callable[[Any], T]) -> Future[T]:
        """Asks for `work(hub)`. Any thread; in the hub's own it is done at once."""
        future: Future[T] = Future()
        if threading.current_thread() is self._thread:
            _settle(future, work, self._hub)
            return future
        if self._closing:
            raise self.closed()
        self._work.append((work, future))
        if self._waits:
            self._hub.wake()
        if self._ended:  # meanwhile
            self._refuse()
        return future

    def closed(self) -> RuntimeError:
        """The error of who uses it after it was closed."""
        return RuntimeError(
            f"Expected a connection that is open. Got a use of {self._thread.name!r} after it "
            "was closed. Make a new strategy."
        )

    def later(self, work: Callable[[Any], Any]) -> None:
        """Asks for `work(hub)`; in the hub's own thread it is done after the turn, not at once."""
        self._work.append((work, None))
        if self._waits and threading.current_thread() is not self._thread:
            self._hub.wake()

    def do(self, work: Callable[[Any], T], what: str, seconds: float) -> T:
        """Waits for `work(hub)`, which has deadlines of its own, and gives its result.

        Raises:
            PeerTimeoutError: the thread did not come to it in time.
        """
        future = self.submit(work)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():  # the work itself ended so
                raise
            raise PeerTimeoutError(
                f"Expected {what} within {seconds:g} s. The thread {self._thread.name!r} is busy "
                "with something else."
            ) from None

    def each(self, seconds: float, tick: Callable[[], None]) -> None:
        """Calls `tick` every so many seconds, in the thread."""
        self.submit(lambda hub: self._ticks.append((seconds, tick)))

    def close(self) -> None:
        """Ends the thread and closes the hub; what was asked for before is done first."""
        if self._closing:
            return
        self._closing = True
        self._hub.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, make: Callable[[], Any], started: Future[None]) -> None:
        try:
            self._hub = make()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        due: dict[int, float] = {}
        try:
            while True:
                self._waits = True  # before the look at the work: who adds some later wakes us
                if self._work or self._closing:
                    self._waits = False
                    with self._hub.together():
                        while self._work:
                            work, future = self._work.popleft()
                            _settle(future, work, self._hub)
                    if self._closing:
                        return
                    self._waits = True
                wait = self._tick(due)
                self._hub.turn(0.0 if self._work else wait)
        finally:
            self._ended = True  # before the last look: who adds something later sees it
            self._refuse()
            with contextlib.suppress(Exception):
                self._hub.close()

    def _refuse(self) -> None:
        """Nobody comes to what is left: who waits for it is told."""
        with contextlib.suppress(IndexError):  # another thread does the same
            while True:
                _, future = self._work.popleft()
                if future is not None:
                    future.set_exception(self.closed())

    def _tick(self, due: dict[int, float]) -> float:
        """Makes the calls whose time has come; gives the seconds until the next."""
        now, wait = time.monotonic(), _LONGEST_TURN
        for i, (seconds, tick) in enumerate(self._ticks):
            if now >= due.get(i, 0.0):
                due[i] = now + seconds
                try:
                    tick()
                except Exception:  # it must not end the thread, on which all others wait
                    _log.exception("In the thread %s", self._thread.name)
            wait = min(wait, due[i] - now)
        return max(0.0, wait)


def _settle(future: Future[Any] | None, work: Callable[[Any], Any], hub: Any) -> None:
    try:
        result = work(hub)
    except BaseException as error:
        if future is None:
            _log.exception("In the thread %s", threading.current_thread().name)
        else:
            future.set_exception(error)
    else:
        if future is not None:
            future.set_result(result)
