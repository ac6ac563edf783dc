"""What is said, once, where workers take parts of a batch and a result is not that of the whole."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

# What was warned of, where a worker's part of a batch is traced; None elsewhere.
_warned: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
    "stratagem_warned", default=None
)
_log = logging.getLogger("stratagem")


@contextlib.contextmanager
def traced(warned: set[str] | None) -> Iterator[None]:
    """In the body a training step is traced whose gradients meet others, weighed by rows.

    Args:
        warned: what was warned of so far; None for a step of a whole batch.
    """
    token = _warned.set(warned)
    try:
        yield
    finally:
        _warned.reset(token)


def warn(text: str) -> None:
    """Warns, where this step is traced for a part, and once of the same."""
    warned = _warned.get()
    if warned is not None and text not in warned:
        warned.add(text)
        _log.warning(text)
