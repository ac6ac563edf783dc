"""Lets other threads end a poll."""

from __future__ import annotations

import contextlib
import os


class Doorbell:
    """A pipe to oneself.

    Attributes:
        reader: is ready to read after `ring`.
    """

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        for end in (self.reader, self._writer):
            os.set_blocking(end, False)
        self._open = True

    def ring(self) -> None:
        """Any thread; also after `close`, when it does nothing."""
        if self._open:
            with contextlib.suppress(BlockingIOError):  # it is full, so it rings
                os.write(self._writer, b"\0")

    def quiet(self) -> None:
        """Ends the ringing."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass

    def close(self) -> None:
        """Frees the pipe."""
        self._open = False
        os.close(self.reader)
        os.close(self._writer)
