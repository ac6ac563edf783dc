"""Which requests were carried out, so that none is twice. Pure; memory stays bounded."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from stratagem.parameter_server.plan import are_counts, is_count

# More ids than these above `below` mean that nobody moves it; no coordinator has so many at work.
_MOST_ABOVE = 1 << 20
_MOST_CLIENTS = 4096


class Applied:
    """A set of numbers: all below one, and some above."""

    def __init__(self, below: int = 0, above: Any = ()):
        self.below = below
        self._above = set(above)
        self._compact()

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self._above

    def __len__(self) -> int:
        """How many are kept one by one."""
        return len(self._above)

    def check_room(self) -> None:
        """Raises ValueError where one more would be too many to keep."""
        if len(self._above) >= _MOST_ABOVE:
            raise ValueError(
                f"Expected `below` to follow what is finished. Got {len(self._above)} numbers "
                f"above {self.below}. Send with each request the lowest number that is at work."
            )

    def add(self, number: int) -> None:
        """Puts a number in."""
        self._above.add(number)
        if number == self.below:
            self._compact()

    def advance(self, below: int) -> None:
        """Puts all numbers below one in."""
        if below > self.below:
            self.below = below
            self._above = {n for n in self._above if n >= below}
            self._compact()

    def merge(self, other: Applied) -> None:
        """Puts all in that the other has."""
        self.advance(other.below)
        self._above |= {n for n in other._above if n >= self.below}
        self._compact()

    def wire(self) -> list[Any]:
        """As plain data."""
        return [self.below, sorted(self._above)]

    @classmethod
    def from_wire(cls, data: Any) -> Applied:
        """What `wire` was; raises ValueError for anything else."""
        if not (
            isinstance(data, (list, tuple))
            and len(data) == 2
            and is_count(data[0])
            and are_counts(data[1])
        ):
            raise ValueError(f"Expected numbers of what was applied. Got {data!r:.200}.")
        return cls(data[0], data[1])

    def _compact(self) -> None:
        while self.below in self._above:
            self._above.remove(self.below)
            self.below += 1


class Tokens:
    """What each client had carried out, by the numbers that it gives to its requests.

    A client that was silent while 4,096 others wrote is forgotten.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, Applied] = OrderedDict()

    def take(self, client: str, number: int, below: int) -> bool:
        """Notes a request; whether it is new.

        Args:
            client: who sent it.
            number: of the request; a client counts up.
            below: the client waits for no answer to a number below this.
        """
        applied = self._clients.setdefault(client, Applied())
        self._clients.move_to_end(client)
        while len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        if number in applied:
            return False
        applied.check_room()
        applied.advance(min(below, number))
        applied.add(number)
        return True

    def wire(self) -> dict[str, Any]:
        """As plain data."""
        return {client: applied.wire() for client, applied in self._clients.items()}

    @classmethod
    def from_wire(cls, data: Any) -> Tokens:
        """What `wire` was; raises ValueError for anything else."""
        if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
            raise ValueError(f"Expected tokens by client. Got {data!r:.200}.")
        tokens = cls()
        tokens._clients.update((name, Applied.from_wire(x)) for name, x in data.items())
        return tokens

    def merge(self, other: Tokens) -> None:
        """Puts all in that the other has."""
        for client, applied in other._clients.items():
            self._clients.setdefault(client, Applied()).merge(applied)
