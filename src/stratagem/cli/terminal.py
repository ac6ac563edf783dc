"""Where commands print their tables."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 110  # where there is no terminal, as in a log


def console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for the tables where it is none."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDTH)
