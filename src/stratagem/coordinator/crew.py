"""The workers as the coordinator sees them: connected, set up, lost, back again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle
import numpy as np

from stratagem.transport.message import Message

_SILENCE_SECONDS = 5.0  # after which a worker counts as lost
_SETUP_SECONDS = 30.0
_PROGRAM_SECONDS = 300.0
_CLOSURE_SECONDS = 1e9  # a step may take any time; a worker that has died is silent

_log = logging.getLogger("stratagem")

Done = Callable[[str, Message | Exception], None]


class Member:
    """One worker.

    Attributes:
        peer: the connection.
        up: the incarnation that takes part; None while it is not there.
        asked: whether it is being set up.
        has: the plans that it has.
        iterators: the iterators that it was told of.
    """

    def __init__(self, index: int, name: str, peer: Any):
        self.index, self.name, self.peer = index, name, peer
        self.up: str | None = None
        self.asked = False
        self.has: set[int] = set()
        self.iterators: set[int] = set()


class Crew:
    """All workers of a job. Everything but `opened` happens in the hub's thread.

    Args:
        setup: what a worker is told first.
        event: tells the coordinator's state what has happened.
    """

    def __init__(self, setup: dict[str, Any], event: Callable[[Any], None]):
        self._setup, self._event = setup, event
        self._hub: Any = None
        self._members: dict[str, Member] = {}
        self._iterators: dict[int, bytes] = {}
        self._opened: dict[int, Future[Any]] = {}

    @property
    def names(self) -> str:
        """All workers, with their addresses."""
        return ", ".join(str(m.peer) for m in self._members.values())

    def connect(self, hub: Any, workers: Sequence[tuple[str, str]]) -> None:
        """Connects to workers, which may come later."""
        self._hub = hub
        for name, address in workers:
            self.add(name, address)
        self.look()

    def add(self, name: str, address: str) -> None:
        """Connects to one more."""
        index = int(name.rpartition(" ")[2])
        self._members[name] = Member(index, name, self._hub.connect(address, name))

    def stop(self, seconds: float) -> list[Any]:
        """Tells all that are there that the job is done; gives what to wait for."""
        there = [member.peer for member in self._members.values() if member.up is not None]
        return [peer.post("stop", {}, seconds=seconds) for peer in there]

    def incarnation(self, name: str) -> str:
        """That of a worker which takes part."""
        return self._members[name].up or ""

    def index(self, name: str) -> int:
        """The number of a worker."""
        return self._members[name].index

    def look(self) -> None:
        """Finds out who has come, gone silent, or come back."""
        for member in self._members.values():
            peer = member.peer
            if member.up is not None and peer.incarnation != member.up:
                self._down(member, "its process ended, and another one has begun")
            elif member.up is not None and peer.silence > _SILENCE_SECONDS:
                self._down(member, f"it has not been heard for {peer.silence:.1f} s")
            if member.up is None and not member.asked:
                member.asked = True
                peer.post(
                    "setup", self._setup, seconds=_SETUP_SECONDS,
                    done=functools.partial(self._set_up, member),
                )  # fmt: skip

    def lost(self, name: str, why: str) -> None:
        """A worker has not answered, and will not."""
        member = self._members[name]
        if member.up is not None:
            self._down(member, why)

    def release(self, name: str) -> None:
        """A worker takes no part any more."""
        self._hub.disconnect(self._members.pop(name).peer)

    def give_plan(
        self, name: str, family: int, key: str, plan: Any, wire: Callable[[Any], Any]
    ) -> None:
        """Sends a plan that a worker lacks; what is sent after it arrives after it."""
        member = self._members[name]
        if plan.number not in member.has:
            fields, arrays = wire(plan)
            fields = {**fields, "family": family, "variant": key}
            member.peer.post(
                "plan", fields, arrays, seconds=_PROGRAM_SECONDS,
                done=functools.partial(self._refused, member),
            )  # fmt: skip
            member.has.add(plan.number)

    def run(
        self, name: str, fields: dict[str, Any], arrays: Sequence[np.ndarray], done: Done
    ) -> None:
        """Has a worker execute a closure."""
        member = self._members[name]
        incarnation = member.up or ""
        member.peer.post(
            "run", fields, arrays, seconds=_CLOSURE_SECONDS,
            done=functools.partial(done, incarnation),
        )  # fmt: skip

    def cancel(self, name: str, closure: int) -> None:
        """Tells a worker that it need not begin a closure."""
        member = self._members.get(name)
        if member is not None and member.up is not None:
            member.peer.post("cancel", {"closure": closure}, seconds=_SETUP_SECONDS)

    def opened(self, number: int) -> Future[Any]:
        """What some worker says of an iterator's first element, when it has opened it."""
        return self._opened.setdefault(number, Future())

    def open_iterator(self, number: int, pickled: bytes) -> None:
        """Has all workers open an iterator, now or when they come."""
        self._iterators[number] = pickled
        for member in self._members.values():
            if member.up is not None:
                self._open(member, number)

    def _open(self, member: Member, number: int) -> None:
        if number not in member.iterators:
            member.iterators.add(number)
            data = np.frombuffer(self._iterators[number], np.uint8)
            member.peer.post(
                "iterator", {"iterator": number}, [data], seconds=_PROGRAM_SECONDS,
                done=functools.partial(self._has_opened, number),
            )  # fmt: skip

    def _has_opened(self, number: int, answer: Message | Exception) -> None:
        found = self._opened.setdefault(number, Future())
        if found.done():
            return
        if isinstance(answer, Exception):
            found.set_exception(answer)
        elif answer.method == "ended":
            found.set_result(None)
        else:
            found.set_result(cloudpickle.loads(answer.arrays[0].tobytes()))

    def _set_up(self, member: Member, answer: Message | Exception) -> None:
        member.asked = False
        if isinstance(answer, Exception):
            return  # `look` asks again
        member.up = member.peer.incarnation
        member.has.clear()
        member.iterators.clear()
        for number in self._iterators:
            self._open(member, number)
        up = member.up
        self._event(lambda s, now: s.worker_up(member.name, up, now))

    def _down(self, member: Member, why: str) -> None:
        was, member.up = member.up, None
        _log.warning("%s is lost: %s. Its work is done by others.", member.peer, why)
        self._event(lambda s, now: s.worker_down(member.name, why, now, was))

    def _refused(self, member: Member, answer: Message | Exception) -> None:
        if isinstance(answer, Exception):
            self.lost(member.name, str(answer))
