"""The parameter servers as the coordinator sees them: heard, lost, restored; snapshots, commits.

It looks from the coordinator's thread, which never waits for a server; what waits is done by the
link, in another thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.coordinator import instructions as do
from stratagem.coordinator.presence import why_lost
from stratagem.errors import BackupError, JobMismatchError
from stratagem.parameter_server.client import as_raised
from stratagem.parameter_server.keeper import is_final
from stratagem.parameter_server.link import OUT_OF_REACH, Link
from stratagem.parameter_server.rounds import Place
from stratagem.transport.message import Message

_HELLO_SECONDS = 10.0
_COMMIT_SECONDS = 600.0

_log = logging.getLogger("stratagem")

Event = Callable[[Callable[[Any, float], Any]], None]


class _Member:
    """One server; `up`: the incarnation that has its content, None while it is lost."""

    def __init__(self, index: int, peer: Any, up: str | None):
        self.index, self.peer, self.up = index, peer, up
        self.asked = False


class Guard:
    """Looks after the servers. In the coordinator's thread, but for what the link calls back.

    Args:
        link: to the servers.
        told: what each server said of itself when the job began or went on.
        event: tells the coordinator's state what has happened; any thread.
    """

    def __init__(self, link: Link, told: list[dict[str, Any]], event: Event):
        self._link, self._event = link, event
        self._told = told
        self._members: dict[str, _Member] = {}
        self._families: dict[int, list[Any]] = {}  # of the closures of rounds
        self._numbers: dict[int, dict[Place, np.ndarray | None]] = {}  # of the last round

    def connect(self, hub: Any) -> None:
        """Connects, beside the link; then `look` can be called."""
        peers = self._link.servers.peers
        for index, (peer, told) in enumerate(zip(peers, self._told, strict=True)):
            up = told["incarnation"] if told["ready"] else None
            self._members[peer.name] = _Member(index, hub.connect(peer.address, peer.name), up)

    def look(self) -> None:
        """Finds out who has gone silent, was started again, or is back."""
        for member in self._members.values():
            if why := why_lost(member.peer, member.up):
                self._down(member, why)
            if member.up is None and not member.asked and self._link.failed is None:
                self._ask(member)

    def restore(self, what: do.Restore) -> None:
        """Has a server's content restored."""
        member = self._members[what.server]
        member.asked = True
        self._link.restore(member.index, functools.partial(self._restored, member))

    def snapshot(self, what: do.Snapshot) -> None:
        """Has all servers write a snapshot."""

        def done(error: Exception | None) -> None:
            if error is None:
                self._event(lambda s, now: s.snapshot_written(what.number, now))
            else:
                self._event(lambda s, now: s.snapshot_failed(what.number, str(error), now))

        self._link.snapshot(done)

    def begins(self, number: int | None, family: Any) -> None:
        """A closure of these plans is in a round; None: in none."""
        if number is not None and family not in (known := self._families.setdefault(number, [])):
            known.append(family)

    def commit(self, what: do.Commit) -> None:
        """Has all servers apply a round, with its norms, where an update takes any.

        A round that is committed again, as a server was lost, has the norms that it had: others
        have applied it with them.
        """
        self._families = {n: f for n, f in self._families.items() if n >= what.round}
        families = self._families.get(what.round, ())
        plans = [p for family in families for p in list(family.plans.values())]
        numbers: dict[Place, np.ndarray | None]
        numbers = {place: None for p in plans for place in p.parts.totals}  # see rounds.Numbers
        norms = {n.numbers: n for p in plans if (n := p.parts.norms) is not None}
        if not norms or what.round in self._numbers:
            self._apply(what, self._numbers.get(what.round, numbers))
            return

        def squared(answers: list[Message]) -> None:
            totals = iter(np.sum([answer.arrays[0] for answer in answers], axis=0))
            for one in norms.values():
                found = one.compute([next(totals) for _ in one.squares])
                numbers.update(zip(one.numbers, found, strict=True))
            self._numbers = {what.round: numbers}
            self._apply(what, numbers)

        places = [list(place) for one in norms.values() for place in one.squares]
        self._ask_of(what, "squares", {"places": places}, (), squared)

    def _apply(self, what: do.Commit, numbers: Mapping[Place, np.ndarray | None]) -> None:
        given = {place: value for place, value in numbers.items() if value is not None}
        totals = [list(place) for place in numbers if place not in given]
        self._ask_of(
            what, "commit", {"places": [list(place) for place in given], "totals": totals},
            list(given.values()),
            lambda answers: self._event(lambda s, now: s.committed(what.round, now)),
        )  # fmt: skip

    def _ask_of(
        self, what: do.Commit, method: str, more: Mapping[str, Any],
        arrays: Sequence[np.ndarray], done: Callable[[list[Message]], None],
    ) -> None:  # fmt: skip
        """Asks all servers for something of a round; `done` gets their answers, if none lacks any
        gradients."""
        left, lacking, answers = len(self._members), False, []

        def one(member: _Member, result: Any) -> None:
            nonlocal left, lacking
            if isinstance(as_raised(result), OUT_OF_REACH):
                return  # then the server is lost, and the state commits the round again
            if isinstance(result, Exception):
                self._fail(member, result)
                return
            if result.fields["missing"]:
                lacking = True
                _log.warning(
                    "%s lacks gradients of %s for round %d, which are computed again.",
                    member.peer, result.fields["missing"], what.round,
                )  # fmt: skip
            left -= 1
            answers.append(result)
            if not left and lacking:
                self._event(lambda s, now: s.lacks(what.round, now))
            elif not left:
                done(answers)

        fields = {
            "job": self._link.servers.job, "round": what.round, "closures": list(what.tokens),
            "mean": True, "weights": list(what.weights), **more,
        }  # fmt: skip
        for member in self._members.values():
            ask = functools.partial(one, member)
            member.peer.post(method, fields, arrays, seconds=_COMMIT_SECONDS, done=ask)

    def stop(self, seconds: float) -> list[Any]:
        """Tells all servers that are there that the job is done; gives what to wait for."""
        there = [member.peer for member in self._members.values() if member.up is not None]
        job = {"job": self._link.servers.job}
        return [peer.post("stop", job, seconds=seconds) for peer in there]

    def _ask(self, member: _Member) -> None:
        member.asked = True
        servers = self._link.servers
        member.peer.post(
            "hello", {"job": servers.job, **servers.greeting(member.index)},
            seconds=_HELLO_SECONDS, done=functools.partial(self._heard, member),
        )  # fmt: skip

    def _heard(self, member: _Member, answer: Any) -> None:
        if isinstance(refused := as_raised(answer), JobMismatchError):
            self._fail(member, refused)
            return
        if isinstance(answer, Exception):
            member.asked = False  # `look` asks again
            return
        said = answer.fields
        ready, mine = said["ready"], said["job"] == self._link.servers.job
        if ready and not mine:
            self._fail(member, JobMismatchError(
                f"Expected {member.peer} to serve this job. Got one that serves another job, "
                f"{said['job']!r}. End that job, or give this one servers of its own."
            ))  # fmt: skip
            return
        incarnation = said["incarnation"]
        if ready:
            member.up, member.asked = incarnation, False
        # Otherwise `restore` follows, and `asked` stays until that has ended.
        name = member.peer.name
        self._event(lambda s, now: s.server_up(name, incarnation, ready, now))

    def _restored(self, member: _Member, result: Any) -> None:
        """In the link's thread."""
        if isinstance(result, Exception):
            if is_final(result):
                self._fail(member, result)
            else:
                _log.warning("%s could not be restored: %s", member.peer, result)
                self._link.thread.later(lambda hub: setattr(member, "asked", False))
            return
        self._link.thread.later(lambda hub: self._back(member, result))

    def _back(self, member: _Member, lost: int | None) -> None:
        member.up, member.asked = member.peer.incarnation, False
        name = member.peer.name
        self._event(lambda s, now: s.restored(name, now, lost))

    def _down(self, member: _Member, why: str) -> None:
        member.up, member.asked = None, False
        name = member.peer.name
        self._event(lambda s, now: s.server_down(name, why, now))

    def _fail(self, member: _Member, error: Exception) -> None:
        """It cannot be restored: the program is told, at once and whatever it asks for."""
        if isinstance(error, BackupError | JobMismatchError):
            error = type(error)(str(error))  # its text says all; where it was raised, nothing
        else:
            error = BackupError(
                f"Expected {member.peer} to go on. Got {type(error).__name__}: {error}. Look at "
                "its log, and start the job again; it goes on from the last snapshot."
            )
        self._link.fail(error)
        self._event(lambda s, now: s.server_failed(error, now))
