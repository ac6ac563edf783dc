"""How a coordinator's program ends, and what is kept of a job that is not known to be done then."""

from __future__ import annotations

import dis
import logging
import signal
import sys
import threading
from types import FrameType
from typing import Any

from stratagem.parameter_server.link import Link

RETURNED, EXITED, FAILED = "returned", "exited", "failed"

_log = logging.getLogger("stratagem")


class Program:
    """How the program of this process ends.

    Python tells nobody in the process with which code it ends. The outermost frame of the main
    thread tells whether the program came to its last line (RETURNED, code 0), or was left by an
    exception: one that Python has printed, or SIGTERM's (FAILED), or else SystemExit, of whatever
    code (EXITED). What ends the process at once, as `os._exit`, leaves everything as it is.

    SIGTERM ends it as Ctrl-C does, by an exception in the main thread, so that there is time to
    keep what servers have; the second one ends it at once. A handler of the user's is left alone.

    Args:
        keeps: whether there is a directory where that can be kept.
    """

    def __init__(self, keeps: bool) -> None:
        self._frame = sys._current_frames()[threading.main_thread().ident or 0]
        while self._frame.f_back is not None:
            self._frame = self._frame.f_back
        self._asked = False
        self._listens = False
        in_main = threading.current_thread() is threading.main_thread()
        if keeps and in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._leave)
            self._listens = True

    @property
    def how(self) -> str:
        """At its end: RETURNED, EXITED or FAILED."""
        if self._asked or getattr(sys, "last_value", None) is not None:
            return FAILED
        return RETURNED if returned(self._frame) else EXITED

    def close(self) -> None:
        """Puts back what SIGTERM did."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and self._listens and signal.getsignal(signal.SIGTERM) == self._leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _leave(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self._asked = True
        raise SystemExit(128 + number)


def returned(frame: FrameType) -> bool:
    """Whether a frame that is not executed any more came to its end; otherwise it was left by an
    exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")


def keep(link: Link, record: Any) -> bool:
    """Takes a last snapshot of a job that is not done; whether its servers are not needed now."""
    if not record.began:
        return True
    record.freeze()
    if (error := link.keep_last()) is None:
        return True
    _log.warning(
        "Expected a last snapshot before the program ends, as its job is not done. Got %s: %s. The "
        "job can go on as long as its servers run; what they got since the snapshot before is "
        "lost with them.",
        type(error).__name__, error,
    )  # fmt: skip
    return False
