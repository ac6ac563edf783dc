"""The thread of a hub comes at once to what others ask of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from threading import Event

import pytest

from stratagem.transport.thread import HubThread


class Idle:
    """A hub to which nothing comes: a turn ends with its time, or when it is woken."""

    def __init__(self) -> None:
        self._woken = Event()

    def turn(self, seconds: float) -> None:
        self._woken.wait(seconds)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        pass


def test_what_is_asked_for_after_other_work_waits_for_no_turn():
    thread = HubThread(Idle, "asked")
    begun = time.monotonic()
    for i in range(20):
        assert thread.do(lambda hub, i=i: i, "a number", 30.0) == i
        time.sleep(0.005)  # the thread is in a turn again
    taken = time.monotonic() - begun
    thread.close()
    assert taken < 5.0  # a turn is a second long


def test_what_nobody_comes_to_any_more_is_refused():
    """Work that is handed over just while the thread ends is not waited for in vain."""
    thread = HubThread(Idle, "ends")
    thread.close()
    with pytest.raises(RuntimeError, match="Got a use of 'ends' after it was closed. Make a new"):
        thread.submit(lambda hub: 1)
    thread._closing = False  # as who has looked at it just before
    with pytest.raises(RuntimeError, match="Got a use of 'ends' after it was closed. Make a new"):
        thread.do(lambda hub: 1, "a number", 30.0)
