"""Bytes of a task's output, as they come, into whole lines that can stand beside those of others.

A progress bar draws over its own line, with carriage returns. Here each drawing is a line of its
own; only the newest is shown, at most once a second, and the last one of a line always.
"""

from __future__ import annotations

import re

PROGRESS_SECONDS = 1.0
_LONGEST = 1 << 20  # Bytes of a line without an end that are kept: a task may write no newline.
# What moves the cursor would draw over the lines of others: backspaces, bells, and all escape
# sequences but those that choose a colour (they end with "m").
_MOVES = re.compile(rb"[\x07\x08\x0b\x0c]|\x1b\[[0-9;?]*[A-Za-ln-z@`]|\x1b[^\[]")
_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_RESET = b"\x1b[0m"


class LineBuffer:
    """Collects the output of one stream of one task; it has no clock, every call tells the time."""

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = -PROGRESS_SECONDS

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that are complete with `data`, without their newlines.

        Args:
            data: what the task wrote, cut anywhere.
            now: seconds on a clock that does not go back.
        """
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [line for text in whole for line in _last_drawing(text)]
        drawn, returned, rest = rest.rpartition(b"\r")
        if returned and rest == b"":
            # Not known yet whether "\r\n" or a drawing: the text before it is kept.
            before, returned, drawn = drawn.rpartition(b"\r")
            rest, drawn = drawn + b"\r", before
        if returned and now - self._shown_at >= PROGRESS_SECONDS:
            if any(newest := _last_drawing(drawn)):
                lines += newest
                self._shown_at = now
        while len(rest) > _LONGEST:
            lines += _last_drawing(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._rest = rest
        return lines

    def close(self) -> list[bytes]:
        """What is left when the task has ended: a last line without a newline, or nothing."""
        rest, self._rest = self._rest, b""
        return _last_drawing(rest) if rest.strip(b"\r") else []


def _last_drawing(text: bytes) -> list[bytes]:
    """What a terminal would show of a line that was drawn over: the last of its drawings."""
    drawings = [clean(drawing) for drawing in text.split(b"\r")]
    if len(drawings) == 1:
        return drawings
    return [drawing for drawing in drawings if drawing][-1:] or [b""]


def clean(line: bytes) -> bytes:
    """A line without what moves the cursor, and with its colours switched off at its end."""
    line = _MOVES.sub(b"", line)
    return line + _RESET if (found := _COLOUR.findall(line)) and found[-1] != _RESET else line
