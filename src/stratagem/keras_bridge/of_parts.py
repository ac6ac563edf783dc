"""What losses are divided by where workers take parts of a batch: what the whole batch has."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

# Of the part of a batch whose step is traced; None elsewhere.
_part: contextvars.ContextVar[Divisors | None] = contextvars.ContextVar(
    "stratagem_divisors", default=None
)


@dataclasses.dataclass
class Divisors:
    """By what the losses of a step are divided, in their order, unless that is its rows.

    Attributes:
        whole: what the whole batch has for each of its rows; None where that is not known.
        own: likewise of the rows that the step is traced for; filled by tracing.
    """

    whole: Sequence[Any] | None = None
    own: list[Any] = dataclasses.field(default_factory=list)

    def of(self, own: Any, rows: int) -> Any:
        """What to divide by, so that losses weighed by rows add up to the whole batch's.

        Args:
            own: what these rows have.
            rows: how many they are.
        """
        self.own.append(own / rows)
        return own if self.whole is None else self.whole[len(self.own) - 1] * rows


@contextlib.contextmanager
def traced(divisors: Divisors) -> Iterator[None]:
    """In the body a step is traced whose gradients meet others, weighed by rows."""
    token = _part.set(divisors)
    try:
        yield
    finally:
        _part.reset(token)


def divisors() -> Divisors | None:
    """Those of the part whose step is traced; None where it is no part."""
    return _part.get()
