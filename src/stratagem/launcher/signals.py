"""The signals that ask a supervisor to end its job."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Has signals that ask to end passed on, and puts back what was there before."""
    before = {signum: signal.getsignal(signum) for signum in _STOP_SIGNALS}
    try:
        for signum in _STOP_SIGNALS:
            signal.signal(signum, lambda number, _frame: stop(number))
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
