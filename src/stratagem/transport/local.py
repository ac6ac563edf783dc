"""The in-process twin of the network: the same hubs, a clock of its own, and faults on demand.

One thread runs everything. While a hub waits, the others take their turns, in the order in which
things happen; when nothing is left to happen now, the clock jumps to what happens next. So a test
of a deadline of an hour takes no time, and gives the same at every run.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stratagem.transport.hub import HEARTBEAT_SECONDS, Hub
from stratagem.transport.message import LIMITS, Limits
from stratagem.transport.shares import Shares


@dataclass(eq=False)
class _Connection:
    """Who has connected, and to what address."""

    connector: LocalCarrier
    address: str


Way: TypeAlias = tuple[str, _Connection]
_Event: TypeAlias = tuple[float, int, "LocalCarrier", tuple[Way, list[Any]] | None]


@dataclass
class Faults:
    """What happens to messages from one hub to another, one way.

    Attributes:
        delay: seconds that each needs.
        drop: how many of the next are lost.
        duplicate: how many of the next come twice.
        cut: whether none gets through; they wait, as those of TCP do, until it is mended.
        lose: whether those of a cut are lost instead, as when a connection breaks.
        chosen: decides for each message whether it is lost, such as by chance; None: none is.
    """

    delay: float = 0.0
    drop: int = 0
    duplicate: int = 0
    cut: bool = False
    lose: bool = False
    chosen: Callable[[], bool] | None = None

    def lost(self) -> bool:
        """Whether the next message is lost."""
        if self.drop:
            self.drop -= 1
            return True
        return (self.cut and self.lose) or (self.chosen is not None and self.chosen())

    def copies(self) -> int:
        """How often the next message comes."""
        if self.duplicate:
            self.duplicate -= 1
            return 2
        return 1


_NO_FAULTS = Faults()


class LocalNetwork:
    """Hubs of one thread, with a clock and faults.

    Attributes:
        now: seconds on the clock.
        messages: how many were sent.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.messages = 0
        self.ready: dict[LocalCarrier, None] = {}  # in the order in which something came
        self._listening: dict[str, LocalCarrier] = {}
        self._faults: dict[tuple[str, str], Faults] = {}
        self._held: list[tuple[LocalCarrier, Way, list[Any]]] = []
        self._events: list[_Event] = []
        self._order = itertools.count()
        self._ports = itertools.count(1)

    def hub(self, name: str, limits: Limits = LIMITS, heartbeat: float = HEARTBEAT_SECONDS) -> Hub:
        """A new hub; another one of the same name is the same task after a restart."""
        carrier = LocalCarrier(self, name)
        carrier.hub = Hub(name, carrier=carrier, limits=limits, heartbeat=heartbeat)
        return carrier.hub

    def faults(self, sender: str, receiver: str) -> Faults:
        """What happens to messages between two hubs, by name, one way; to be changed."""
        return self._faults.setdefault((sender, receiver), Faults())

    def delay(self, sender: str, receiver: str, seconds: float) -> None:
        """Each message needs so long."""
        self.faults(sender, receiver).delay = seconds

    def drop(self, sender: str, receiver: str, count: int = 1) -> None:
        """The next messages are lost."""
        self.faults(sender, receiver).drop = count

    def duplicate(self, sender: str, receiver: str, count: int = 1) -> None:
        """The next messages come twice."""
        self.faults(sender, receiver).duplicate = count

    def cut(self, a: str, b: str, lose: bool = False) -> None:
        """Nothing passes between two hubs until `mend`.

        Args:
            a: name of one.
            b: name of the other.
            lose: whether what is sent meanwhile is lost; otherwise it comes after `mend`.
        """
        for faults in (self.faults(a, b), self.faults(b, a)):
            faults.cut, faults.lose = True, lose

    def mend(self, a: str, b: str) -> None:
        """Ends a cut."""
        for pair in ((a, b), (b, a)):
            self.faults(*pair).cut = False
        self._release()

    def kill(self, hub: Hub) -> None:
        """The hub's process ends; what it has sent arrives, what it was sent does not."""
        hub.close(0.0)

    def run(self, seconds: float) -> None:
        """Lets so much time pass, in which all hubs take their turns."""
        end = self.now + seconds
        while self.step(end):
            pass
        self.now = end

    # What follows is for the carriers.

    def step(self, until: float, waiting: LocalCarrier | None = None) -> bool:
        """Does the next thing that happens until then; False where nothing does.

        Args:
            until: seconds on the clock.
            waiting: who looks for itself.
        """
        for carrier in self.ready:
            if carrier is not waiting and not carrier.hub.inside:
                carrier.hub.turn(0.0)
                return True
        if not self._events or self._events[0][0] > until:
            return False
        when, _, carrier, parcel = heapq.heappop(self._events)
        self.now = max(self.now, when)
        if carrier.closed:
            return True
        if parcel is not None:
            carrier.inbox.append(parcel)
        elif carrier.alarm_at != when:
            return True  # it was set to another time
        else:
            carrier.alarm_at = float("inf")
        self.ready[carrier] = None
        return True

    def at(self, when: float, carrier: LocalCarrier, parcel: tuple[Way, list[Any]] | None) -> None:
        """Something happens to a carrier then: a message comes, or its alarm."""
        heapq.heappush(self._events, (when, next(self._order), carrier, parcel))

    def carry(self, sender: LocalCarrier, way: Way, frames: list[Any]) -> None:
        """Takes a message on its way."""
        self.messages += 1
        self._carry(sender, way, frames)

    def listen(self, address: str, carrier: LocalCarrier) -> str:
        """Who connects there reaches this carrier from now on."""
        host, _, port = address.rpartition(":")
        address = f"{host}:{next(self._ports)}" if port == "0" else address
        if address in self._listening:
            raise OSError(f"Expected a free address. Got {address}, where another hub listens.")
        self._listening[address] = carrier
        self._release()
        return address

    def forget(self, carrier: LocalCarrier) -> None:
        """A carrier has closed."""
        self.ready.pop(carrier, None)
        for address in [a for a, other in self._listening.items() if other is carrier]:
            del self._listening[address]

    def _carry(self, sender: LocalCarrier, way: Way, frames: list[Any]) -> None:
        side, connection = way
        if side == "out":
            receiver = self._listening.get(connection.address)
            seen: Way = ("in", connection)
        else:
            receiver, seen = connection.connector, ("out", connection)
        if receiver is None:  # nobody listens there now: it waits, as with TCP
            self._held.append((sender, way, frames))
            return
        faults = self._faults.get((sender.name, receiver.name), _NO_FAULTS)
        if faults.lost():
            return
        if faults.cut:
            self._held.append((sender, way, frames))
            return
        for _ in range(faults.copies()):
            self.at(self.now + faults.delay, receiver, (seen, frames))

    def _release(self) -> None:
        """Sends what was held, if it can pass now."""
        held, self._held = self._held, []
        for sender, way, frames in held:
            if not (sender.closed and way[0] == "out"):
                self._carry(sender, way, frames)


class LocalCarrier:
    """One hub's end of the network; see `carrier.Carrier`."""

    hub: Hub

    def __init__(self, network: LocalNetwork, name: str):
        self.name = name
        self.inbox: deque[tuple[Way, list[Any]]] = deque()
        self.alarm_at = float("inf")
        self.closed = False
        self._network = network
        self._woken = False

    def now(self) -> float:
        return self._network.now

    def listen(self, address: str) -> str:
        return self._network.listen(address, self)

    def connect(self, address: str) -> Way:
        return "out", _Connection(self, address)

    def disconnect(self, way: Way) -> None:
        pass

    def shares(self) -> Shares:
        return Shares()

    def send(self, way: Way, header: bytes, arrays: Sequence[np.ndarray]) -> None:
        frames = [header, *(array.tobytes() for array in arrays)]
        self._network.carry(self, way, frames)

    def flush(self) -> None:
        """Nothing: each message travels alone, as each has a fate of its own."""

    def receive(self, seconds: float) -> list[tuple[Way, list[Any]]]:
        """Waits on the network's clock, on which the other hubs live on meanwhile."""
        until = self.now() + seconds
        while not (self.inbox or self._woken or self in self._network.ready):
            if not self._network.step(until, self):
                self._network.now = max(self.now(), until)
                break
        self._network.ready.pop(self, None)
        self._woken = False
        came = list(self.inbox)
        self.inbox.clear()
        return came

    def more(self) -> bool:
        return bool(self.inbox)

    def alarm(self, when: float) -> None:
        if when < self.alarm_at:
            self.alarm_at = when
            self._network.at(when, self, None)

    def wake(self) -> None:
        self._woken = True

    def close(self, asked: float, answered: float) -> None:
        self.closed = True
        self._network.forget(self)
