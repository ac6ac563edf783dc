"""A set of numbers that fills up from below: one bound, and the few members above it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Watermark:
    """Numbers from 0 on. Memory is that of the members above the first gap.

    Args:
        below: all numbers below this one are members.
        above: further members.
    """

    __slots__ = ("above", "below")

    def __init__(self, below: int = 0, above: Iterable[int] = ()) -> None:
        self.below = below
        self.above = {number for number in above if number >= below}
        self._close()

    def add(self, number: int) -> bool:
        """Make a number a member; whether it was not one before."""
        if number < self.below or number in self.above:
            return False
        if number > self.below:
            self.above.add(number)
            return True
        self.below += 1
        if self.above:
            self._close()
        return True

    def _close(self) -> None:
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.above

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Watermark):
            return NotImplemented
        return (self.below, self.above) == (other.below, other.above)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return self.below + len(self.above)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.below)
        yield from sorted(self.above)

    @property
    def last(self) -> int:
        """The largest member; -1 where there is none."""
        return max(self.above, default=self.below - 1)
