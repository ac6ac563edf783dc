"""Noticing that this process is told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

_POLL_SECONDS = 1.0
_STOP = b"\0"


class TerminationWatch:
    """Calls a function once this process is told to end: by SIGTERM, or by a function that knows.

    Python runs signal handlers in the main thread, between two of its instructions; while that
    thread waits in native code (for the other replicas, in a collective), it runs none. So a
    thread of its own reads from the socket to which the interpreter's C handler writes at once.

    `stop` puts the former handler back. Start and stop it in the main thread.

    Args:
        told: called in the watch's thread, once.
        asked: polled each second instead of SIGTERM; True means to end.
    """

    def __init__(self, told: Callable[[], None], asked: Callable[[], Any] | None = None):
        self._told = told
        self._asked = asked
        self._thread: threading.Thread | None = None
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._before: tuple[Any, int] | None = None

    def start(self) -> None:
        """Begins to watch.

        Raises:
            RuntimeError: for SIGTERM, not in the main thread.
        """
        if self._asked is None and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Expected to watch for SIGTERM from the main thread, as Python demands. Got thread "
                f"{threading.current_thread().name!r}. Create it in the main thread, or pass a "
                "termination_watcher_fn, which is polled instead."
            )
        self._ends = receiver, sender = socket.socketpair()
        sender.setblocking(False)
        if self._asked is None:
            handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
            self._before = handler, signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        else:
            receiver.settimeout(_POLL_SECONDS)
        self._thread = threading.Thread(
            target=self._watch, args=(receiver,), name="stratagem-terminate", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends watching, and puts back the signal handler that was there before."""
        if self._thread is None or self._ends is None:
            return
        if self._before is not None:
            handler, descriptor = self._before
            signal.set_wakeup_fd(descriptor)
            # None: the former handler was not Python's, and cannot be put back from here.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
            self._before = None
        self._ends[1].send(_STOP)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        for end in self._ends:
            end.close()

    def _watch(self, receiver: socket.socket) -> None:
        told = False
        while True:
            try:
                received = receiver.recv(1)
            except TimeoutError:
                received = bytes([signal.SIGTERM]) if not told and self._asked_to() else b""
            if received == _STOP:
                return
            if received:
                self._pass_on(received)
            if received == bytes([signal.SIGTERM]) and not told:
                told = True
                self._told()

    def _asked_to(self) -> bool:
        return self._asked is not None and bool(self._asked())

    def _pass_on(self, received: bytes) -> None:
        """Gives whoever had the interpreter's signal socket before (asyncio) what is theirs."""
        if self._before is not None and self._before[1] != -1:
            with contextlib.suppress(OSError):
                os.write(self._before[1], received)
