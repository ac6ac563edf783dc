"""Who reaches whom: all tasks of a cluster listen, connect to all others, and compare.

Unlike the roll call before a job, in which all meet the leader, every pair meets here, in both
directions, and nobody's absence ends it. Each connection first carries a challenge and the two
tasks' cards, each with a proof of the job's key (`keys.py`); then some round trips for the time and
the clocks; then what each has found so far. So every task knows in the end what all know.

Who does not answer the challenge with a card is a stranger, and hears no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stratagem.cluster.keys import Key, challenge
from stratagem.cluster.line import (
    BULK,
    LIMIT,
    OTHER,
    SILENT,
    TRY_SECONDS,
    Line,
    Unreached,
    connected,
    resolve,
)
from stratagem.cluster.rollcall import listen
from stratagem.cluster.tries import fair

_HELLO = "stratagem doctor 1"
_RETRY_SECONDS = 0.2
_GRACE_SECONDS = 3.0  # after the deadline, for others to tell what they have found
_ROUNDS = 5
_LONG = 300  # characters of a name or a version

Row = dict[str, float | None]


@dataclass(frozen=True)
class Card:
    """What a task says of itself.

    Args:
        task: as "worker 1".
        cluster: the tasks and their addresses.
        versions: of Python and packages, by name.
        devices: as "2 CPU".
        token: of this run; no two tasks have the same.
    """

    task: str
    cluster: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]
    devices: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class Link:
    """What this task has found out about another one, by connecting to it.

    Args:
        task: the other one, as this task's cluster has it.
        address: where it should be.
        problem: why it was not reached; empty if it was.
        card: what it says of itself.
        milliseconds: the shortest round trip.
        clock_offset: seconds that its clock is ahead of this one's, give or take half a round trip.
        megabytes_per_second: from here to there, if that was asked for.
    """

    task: str
    address: str
    problem: str = ""
    card: Card | None = None
    milliseconds: float = 0.0
    clock_offset: float = 0.0
    megabytes_per_second: float | None = None


@dataclass(frozen=True)
class Meeting:
    """What a task knows after it.

    Args:
        card: its own.
        links: to each other task, in the cluster's order.
        callers: the cards of those that connected to this task.
        reach: task -> another task -> milliseconds, None where that is not reached. What a task
            did not get to tell is missing.
    """

    card: Card
    links: tuple[Link, ...]
    callers: tuple[Card, ...]
    reach: Mapping[str, Mapping[str, float | None]]


def meet(card: Card, seconds: float, bandwidth: bool = False, key: Key | None = None) -> Meeting:
    """Meets the other tasks of a cluster. All of them call it, at about the same time.

    Args:
        card: this task's; its address in `card.cluster` is where it listens.
        seconds: how long to try to reach the others. It ends earlier once all are done, and at
            most 4 s later.
        bandwidth: send 32 MiB to each of the others, one after the other.
        key: of the job; None for none, which lets everybody in.

    Raises:
        OSError: this machine cannot listen at the address.
    """
    with listen(dict(card.cluster)[card.task]) as listener:
        return asyncio.run(_Meeting(card, seconds, bandwidth, key or Key()).hold(listener))


def resolve_all(hosts: Sequence[str], seconds: float) -> dict[str, tuple[str, ...] | str]:
    """The IP addresses of each host, or why there are none."""

    async def one(host: str) -> tuple[str, ...] | str:
        try:
            async with asyncio.timeout(seconds):
                return await resolve(host, 0)
        except TimeoutError:
            return f"the name service does not answer within {seconds:g} s"
        except Unreached as error:
            return str(error)

    async def every() -> dict[str, tuple[str, ...] | str]:
        return dict(zip(hosts, await asyncio.gather(*map(one, hosts)), strict=True))

    return asyncio.run(every())


def try_peers(tasks: Sequence[tuple[str, str]], seconds: float) -> dict[str, str]:
    """Connects once to each task, whatever runs there: task -> "" or why it was not reached."""

    async def one(address: str) -> str:
        try:
            async with connected(address, seconds):
                return ""
        except Unreached as error:
            return str(error)

    async def every() -> list[str]:
        return await asyncio.gather(*(one(address) for _, address in tasks))

    return dict(zip((task for task, _ in tasks), asyncio.run(every()), strict=True))


class _Meeting:
    """The state of a meeting, used by one event loop only."""

    def __init__(self, card: Card, seconds: float, bandwidth: bool, key: Key) -> None:
        self._card = card
        self._key = key
        self._deadline = time.monotonic() + seconds
        self._bandwidth = bandwidth
        self._one_at_a_time = asyncio.Lock()
        self._waiting = len(card.cluster) - 1  # Tasks that are still tried.
        self._rows: dict[str, Row] = {card.task: {}}
        self._told: set[str] = set()  # tasks whose rows are their last
        self._callers: dict[str, Card] = {}
        self._telling: list[asyncio.Task[None]] = []
        self._tasks: list[asyncio.Task[None]] = []  # that answer

    async def hold(self, listener: socket.socket) -> Meeting:
        def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._tasks.append(asyncio.create_task(self._answer(reader, writer)))

        server = await asyncio.start_server(answer, sock=listener, limit=LIMIT)
        others = [entry for entry in self._card.cluster if entry[0] != self._card.task]
        async with contextlib.AsyncExitStack() as stack:
            links = await asyncio.gather(*(self._link(stack, *other) for other in others))
            if self._telling:
                await asyncio.wait(self._telling, timeout=max(0.0, self._left()) + _GRACE_SECONDS)
            server.close()
            for task in (*self._telling, *self._tasks):
                task.cancel()
            await asyncio.gather(*self._telling, *self._tasks, return_exceptions=True)
        return Meeting(self._card, tuple(links), tuple(self._callers.values()), self._rows)

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    async def _link(self, stack: contextlib.AsyncExitStack, task: str, address: str) -> Link:
        """Reaches a task, by the deadline; its connection then goes on telling."""
        link = Link(task, address, "there was no time to try")
        while link.problem and self._left() > 0:
            tried = contextlib.AsyncExitStack()
            try:
                seconds = fair(self._deadline)
                async with asyncio.timeout(seconds):
                    reach = connected(address, min(TRY_SECONDS, seconds))
                    line = await tried.enter_async_context(reach)
                    link = await self._visit(line, task, address)
            except (Unreached, TimeoutError) as error:
                await tried.aclose()
                link = Link(task, address, str(error) or SILENT)
                await asyncio.sleep(max(0.0, min(_RETRY_SECONDS, self._left())))
                continue
            stack.push_async_exit(tried)
            self._telling.append(asyncio.create_task(self._tell(line, task)))
        self._rows[self._card.task][task] = None if link.problem else link.milliseconds
        self._waiting -= 1
        return link

    async def _visit(self, line: Line, task: str, address: str) -> Link:
        seconds = min(TRY_SECONDS, fair(self._deadline))
        card = await self._introduce(line, seconds)
        trips = []
        for _ in range(_ROUNDS):
            sent, begun = time.time(), time.perf_counter()
            await line.send({})
            answer = await line.receive(seconds)
            trip = time.perf_counter() - begun
            clock = _number(answer.get("clock"))
            if clock is None:
                raise Unreached("it breaks off")
            # The answer was written about half way (Cristian's algorithm, 1989).
            trips.append((trip, clock - (sent + trip / 2)))
        trip, offset = min(trips)
        rate = await self._send_bulk(line) if self._bandwidth else None
        return Link(task, address, "", card, trip * 1e3, offset, rate)

    async def _introduce(self, line: Line, seconds: float) -> Card:
        """Says who this task is to one that listens; returns who that is."""
        first = await line.receive(seconds)
        theirs, own, said = first.get("challenge"), challenge(), vars(self._card)
        if first.get("hello") != _HELLO:
            raise Unreached(OTHER)
        proof = self._key.proof("guest", theirs, own, said)
        await line.send({"card": said, "challenge": own, "proof": proof})
        answer = await line.receive(seconds)
        if "refused" in answer:
            raise Unreached(f"it refuses this task, which {_words(answer['refused'])}")
        fault = self._key.fault(answer.get("proof"), "host", own, theirs, answer.get("card"))
        card = _read_card(answer.get("card"))
        if fault or card is None:
            raise Unreached(f"it {fault}" if fault else OTHER)
        return card

    async def _send_bulk(self, line: Line) -> float | None:
        async with self._one_at_a_time:
            begun = time.perf_counter()
            try:
                await line.send_bulk(self._left())
                await line.receive(self._left())
            except Unreached:  # There was not enough time.
                return None
            return BULK / 1e6 / (time.perf_counter() - begun)

    async def _tell(self, line: Line, task: str) -> None:
        """Tells what this task has found, and hears what the other one has, until both are done."""
        with contextlib.suppress(Unreached):
            while True:
                last = not self._waiting
                await line.send(self._findings())
                answer = await line.receive(TRY_SECONDS)
                self._hear(task, answer)
                if last and task in self._told:
                    return
                await asyncio.sleep(_RETRY_SECONDS)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One that has connected to this task."""
        line = Line(reader, writer)
        seconds = max(0.1, self._left()) + _GRACE_SECONDS
        with contextlib.suppress(Unreached), contextlib.closing(writer):
            card = await self._receive_guest(line)
            while card is not None:
                message = await line.receive(seconds)
                if message.get("bulk") is True:
                    await line.receive_bulk(seconds)
                self._hear(card.task, message)
                await line.send({"clock": time.time(), **self._findings()})

    async def _receive_guest(self, line: Line) -> Card | None:
        """Hears who one is that has connected, and says who this is; None for a stranger."""
        own, said = challenge(), vars(self._card)
        await line.send({"hello": _HELLO, "challenge": own})
        message = await line.receive(TRY_SECONDS)
        card, theirs = _read_card(message.get("card")), message.get("challenge")
        if card is None:
            return None
        fault = self._key.fault(message.get("proof"), "guest", own, theirs, message["card"])
        if fault:
            await line.send({"refused": fault})
            return None
        self._callers[card.token] = card
        await line.send({"card": said, "proof": self._key.proof("host", theirs, own, said)})
        return card

    def _findings(self) -> dict[str, Any]:
        return {"row": self._rows[self._card.task], "last": not self._waiting}

    def _hear(self, task: str, message: Mapping[str, Any]) -> None:
        row = message.get("row")
        names = {name for name, _ in self._card.cluster}
        if not isinstance(row, dict) or task not in names - {self._card.task}:
            return
        self._rows[task] = {to: _number(value) for to, value in row.items() if to in names}
        if message.get("last") is True:
            self._told.add(task)


def _read_card(fields: Any) -> Card | None:
    """The card that a task has sent, None where it is none."""
    try:
        return Card(
            _words(fields["task"]),
            tuple((_words(task), _words(address)) for task, address in fields["cluster"]),
            tuple((_words(name), _words(version)) for name, version in fields["versions"]),
            _words(fields["devices"]),
            _words(fields["token"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _words(value: Any) -> str:
    """What a peer says, without what would move the cursor of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:_LONG])


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < 1e12 else None
