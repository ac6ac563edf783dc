"""The terminal: the lines of all tasks, each with its task in front, and what the launcher says."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import BinaryIO

from rich.console import Console
from rich.text import Text

from stratagem.launcher.abstract import Task
from stratagem.recovery.policy import Ended, ServiceLost, describe, describe_code

# One after the other; red is left for failures.
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green")
_KEPT_LINES = 200
_SHOWN_LINES = 30
_TRACEBACK = b"Traceback (most recent call last)"

Render = Callable[[str, str], bytes]


class Output:
    """Writes whole lines, each in one piece; only the thread of the supervisor uses it.

    Args:
        tasks: all tasks of the job; each gets a colour.
        stdout: where their standard output goes; None for this process's own.
        stderr: where their standard error and the launcher's own words go, likewise.
        render: text and style -> bytes; None for colours where rich finds a terminal.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        stdout: BinaryIO | None = None,
        stderr: BinaryIO | None = None,
        render: tuple[Render, Render] | None = None,
    ) -> None:
        self._files = (stdout or sys.stdout.buffer, stderr or sys.stderr.buffer)
        self._render = render or (renderer(sys.stdout), renderer(sys.stderr))
        self._colours = {task: _COLOURS[i % len(_COLOURS)] for i, task in enumerate(tasks)}
        self._width = max((len(str(task)) for task in tasks), default=0)
        self._tails: dict[str, deque[bytes]] = {}

    def line(self, task: Task | str, line: bytes, is_error: bool) -> None:
        """Writes one line of a task, and keeps the last ones of stderr.

        Those of a helper, which has a name, are only kept: they matter if it fails.
        """
        if is_error:
            self._tails.setdefault(str(task), deque(maxlen=_KEPT_LINES)).append(line)
        if isinstance(task, Task):
            colour = self._colours.get(task, "dim")
            prefix = self._render[is_error](f"[{task}]".ljust(self._width + 2), colour)
            self._write(is_error, prefix + b" " + line + b"\n")

    def say(self, text: str, style: str = "bold") -> None:
        """Writes what the launcher itself has to say, to standard error."""
        name = self._render[1]("[stratagem]".ljust(self._width + 2), style)
        for line in text.splitlines():
            self._write(1, name + b" " + line.encode() + b"\n")

    def forget(self, task: Task) -> None:
        """Drops what a task wrote before it was started again."""
        self._tails.pop(str(task), None)

    def failure(self, first: Ended | ServiceLost, others: Sequence[Ended]) -> None:
        """Says who failed first, with the end of what it wrote; the last words of a job."""
        for end in others:
            self.say(f"also ended: {end.task}, {describe_code(end.code)}", "dim")
        self.say(f"first failure: {describe(first)}", "bold red")
        tail = last_words(self._tails.get(first.task, ()))
        if not tail:
            self.say("It wrote nothing to standard error.")
        mark = self._render[1]("|", "bold red")
        for line in tail:
            self._write(1, mark + b" " + line + b"\n")

    def flush(self) -> None:
        """Hands on what was written."""
        for file in self._files:
            file.flush()

    def _write(self, which: int, data: bytes) -> None:
        # Two files on one terminal: in order only if each is flushed before the other is written.
        self._files[1 - which].flush()
        self._files[which].write(data)


def last_words(lines: Sequence[bytes] | deque[bytes]) -> list[bytes]:
    """The last traceback in what a task wrote to stderr, and all after it; else its last lines.

    A chain of exceptions ("During handling ...") counts as one traceback.
    """
    kept = list(lines)
    starts = [i for i, line in enumerate(kept) if _TRACEBACK in line]
    if not starts:
        return kept[-_SHOWN_LINES:]
    first = starts[-1]
    for earlier in reversed(starts[:-1]):
        if not any(b"exception" in line and line.endswith(b":") for line in kept[earlier:first]):
            break
        first = earlier
    return kept[first:]


def renderer(stream: object) -> Render:
    """Bytes for text in a style: coloured where `stream` is a terminal (NO_COLOR is obeyed)."""
    console = Console(file=stream, highlight=False, soft_wrap=True)  # type: ignore[arg-type]
    known: dict[tuple[str, str], bytes] = {}

    def render(text: str, style: str) -> bytes:
        if (text, style) not in known:
            with console.capture() as capture:
                console.print(Text(text, style), end="")
            known[text, style] = capture.get().encode()
        return known[text, style]

    return render
