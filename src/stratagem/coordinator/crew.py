"""The workers as the coordinator sees them: connected, set up, lost, back again."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from stratagem.coordinator import opening as openings
from stratagem.coordinator.opening import Opening
from stratagem.coordinator.presence import other_job, why_lost
from stratagem.coordinator.replies import error_of
from stratagem.errors import PeerLostError, PeerTimeoutError
from stratagem.transport import several
from stratagem.transport.message import Message

_SETUP_SECONDS = 30.0
_PROGRAM_SECONDS = 300.0
_WARN_SECONDS = 60.0  # after which it is told that a dataset is being opened, and how often then
_CLOSURE_SECONDS = 1e9  # a step may take any time; a worker that has died is silent

_log = logging.getLogger("stratagem")

Done = Callable[[str, Message | Exception], None]


class Member:
    """One worker.

    Attributes:
        peer: the connection.
        up: the incarnation that takes part; None while it is not there.
        asked: whether it is being set up.
        lost: whether it was there, and is not.
        since: when it began to be waited for.
        missed: whether it was told that it has not come.
        has: the plans that it has.
        iterators: the iterators that it was told of.
    """

    def __init__(self, index: int, name: str, peer: Any):
        self.index, self.name, self.peer = index, name, peer
        self.up: str | None = None
        self.asked = self.lost = self.missed = False
        self.since = time.monotonic()
        self.has: set[int] = set()
        self.iterators: set[int] = set()


class Run(NamedTuple):
    """A closure to be executed.

    Attributes:
        fields: what a worker has to know.
        arrays: its arguments.
        done: takes the answer.
    """

    fields: dict[str, Any]
    arrays: Sequence[np.ndarray]
    done: Callable[[Message | Exception], None]


class Crew:
    """All workers of a job. Everything but `opened` happens in the hub's thread.

    Args:
        setup: what a worker is told first, besides its index.
        event: tells the coordinator's state what has happened.

    Attributes:
        ending: whether the job ends; then nobody is lost. Any thread sets it.
    """

    def __init__(self, setup: dict[str, Any], event: Callable[[Any], None]):
        self._setup, self._event = setup, event
        self.ending = False
        self._hub: Any = None
        self._members: dict[str, Member] = {}
        self._iterators: dict[int, bytes] = {}
        self._openings: dict[int, Opening] = {}
        self._waiting: dict[str, list[Run]] = {}  # what each is to be sent
        self._over: Exception | None = None  # why workers do nothing any more
        self._small: set[int] = set()  # families whose results were small the last time
        self._warned = time.monotonic()

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
        if self.ending:
            return
        for member in self._members.values():
            peer = member.peer
            if why := why_lost(peer, member.up):
                self._down(member, why)
            if member.up is None and not member.asked:
                member.asked = True
                peer.post(
                    "setup", {**self._setup, "index": member.index}, seconds=_SETUP_SECONDS,
                    done=functools.partial(self._set_up, member),
                )  # fmt: skip
        now = time.monotonic()
        for opening in self._openings.values():
            if opening.empty and not opening.first.done() and now > opening.until:
                self._settle_without_absent(opening)
        self._miss(now)
        if now - self._warned >= _WARN_SECONDS:
            self._warned = now
            self._warn(now)

    def _settle_without_absent(self, opening: Opening) -> None:
        """Who has not come has no say any more in whether a dataset is empty."""
        for member in [m for n in opening.awaited if (m := self._members[n]).up is None]:
            _log.warning(
                "A dataset is empty where it was opened, and %s has not come in %g s: it is taken "
                "to have none either. Start it earlier.",
                member.peer, openings.COME_SECONDS,
            )  # fmt: skip
            opening.settle(member.name)

    def _miss(self, now: float) -> None:
        """Tells once who has never come, while others work; where none does, the state tells."""
        if not any(member.up for member in self._members.values()):
            return
        for member in self._members.values():
            absent = member.up is None and not member.lost
            late = absent and now - member.since >= openings.COME_SECONDS
            if late and not member.missed:
                member.missed = True
                _log.warning(
                    "%s has not come in %.0f s; the others do its work. %s It takes part as soon "
                    "as it comes.", member.peer, now - member.since,
                    "It is heard, and busy with something else." if member.peer.heard else
                    "It does not run, is out of reach, or has another STRATAGEM_CLUSTER_KEY (then "
                    "its log says that it refused a connection).",
                )  # fmt: skip

    def _warn(self, now: float) -> None:
        """Tells who takes long to give the first element of a dataset."""
        every = [each for opening in self._openings.values() for each in opening.at_work.items()]
        slow = {name: since for name, since in every if now - since >= _WARN_SECONDS}
        if slow:
            name = min(slow, key=lambda name: slow[name])
            _log.warning(
                "%s has been opening a dataset for %.0f s%s, and its first element has not come. "
                "What its function reads may be slow, or never there: look at that worker's log.",
                self._members[name].peer, now - slow[name],
                f" (and {len(slow) - 1} other workers)" if len(slow) > 1 else "",
            )  # fmt: skip

    def lost(self, name: str, why: str) -> None:
        """A worker has not answered, and will not."""
        member = self._members[name]
        if member.up is not None and not self.ending:
            self._down(member, why)

    def release(self, name: str) -> None:
        """A worker takes no part any more."""
        self._await_no_more(name)
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
                done=functools.partial(self._planned, member),
            )  # fmt: skip
            member.has.add(plan.number)

    def run(
        self, name: str, fields: dict[str, Any], arrays: Sequence[np.ndarray], done: Done,
        together: int = 1,
    ) -> None:  # fmt: skip
        """Has a worker execute a closure, now or at `flush`.

        Args:
            name: of the worker.
            fields: of the closure, see `worker`.
            arrays: its arguments.
            done: called with the incarnation that was asked, and the answer.
            together: how many may leave as one message.
        """
        if fields["family"] not in self._small or not several.are_small(arrays):
            together = 1
        if together == 1:
            self._leave(name)
        waiting = self._waiting.setdefault(name, [])
        waiting.append(Run(fields, arrays, functools.partial(done, self.incarnation(name))))
        if len(waiting) >= together:
            self._leave(name)

    def flush(self) -> None:
        """Sends the closures that wait for others."""
        for name in list(self._waiting):
            self._leave(name)

    def _leave(self, name: str) -> None:
        if runs := self._waiting.pop(name, None):
            self._send(self._members[name].peer, runs)

    def _send(self, peer: Any, runs: Sequence[Run]) -> None:
        each, arrays = several.join((run.fields, run.arrays) for run in runs)
        try:
            peer.post(
                "run", {"each": each}, arrays, seconds=_CLOSURE_SECONDS,
                done=functools.partial(self._answered, runs),
            )  # fmt: skip
        except Exception as error:
            if len(runs) == 1:  # what cannot be sent will not be answered
                runs[0].done(error)
                return
            for run in runs:  # one of them is at fault
                self._send(peer, [run])

    def _answered(self, runs: Sequence[Run], answer: Message | Exception) -> None:
        """Gives each of some closures its part of the answer to all of them, or the error."""
        if isinstance(answer, Exception):
            for run in runs:
                run.done(other_job(answer) or answer)
            return
        each = several.split(answer.fields["each"], answer.arrays)
        for run, (fields, arrays) in zip(runs, each, strict=True):
            note = self._small.add if several.are_small(arrays) else self._small.discard
            note(run.fields["family"])
            run.done(Message("ran", fields, arrays))

    def cancel(self, name: str, closure: int) -> None:
        """Tells a worker that it need not begin a closure."""
        member = self._members.get(name)
        if member is not None and member.up is not None:
            self._leave(name)  # it may be among these
            member.peer.post("cancel", {"closure": closure}, seconds=_SETUP_SECONDS)

    def opened(self, number: int, seconds: float) -> Any:
        """Waits for what some worker's first element of an iterator is like; None if none has one.

        Any thread.

        Raises:
            PeerTimeoutError: none could say in time.
            JobMismatchError: they serve another job.
        """
        try:
            return self._openings.setdefault(number, Opening()).first.result(seconds)
        except TimeoutError:
            raise PeerTimeoutError(
                f"Expected a worker to open the dataset within {seconds:g} s. None of "
                f"{self.names} did. Start the workers, and see what they log."
            ) from None

    def open_iterator(self, number: int, pickled: bytes) -> None:
        """Has all workers open an iterator, now or when they come."""
        self._iterators[number] = pickled
        opening = self._openings.setdefault(number, Opening())
        opening.awaited.update(n for n, m in self._members.items() if not m.lost)
        if self._over is not None:
            opening.fail(self._over)
        for member in self._members.values():
            if member.up is not None:
                self._open(member, number)

    def end(self, why: Exception) -> None:
        """Workers open nothing any more, for this reason."""
        self._over = why
        for opening in self._openings.values():
            opening.fail(why)

    def forget(self, number: int) -> None:
        """Has all workers forget an iterator, now or when they come back."""
        self._iterators.pop(number, None)
        self._openings.pop(number, None)
        for member in self._members.values():
            self._tidy(member)

    def _tidy(self, member: Member) -> None:
        """Has a worker forget what it was told of and nobody needs any more."""
        gone = sorted(member.iterators - self._iterators.keys())
        if gone and member.up is not None:
            member.peer.post(
                "forget", {"iterators": gone}, seconds=_SETUP_SECONDS,
                done=functools.partial(self._has_forgotten, member, gone),
            )  # fmt: skip

    def _has_forgotten(
        self, member: Member, gone: Sequence[int], answer: Message | Exception
    ) -> None:
        if not isinstance(answer, Exception):  # else it is lost, and is told when it is back
            member.iterators.difference_update(gone)

    def _open(self, member: Member, number: int) -> None:
        if number not in member.iterators:
            member.iterators.add(number)
            self._openings[number].awaited.add(member.name)
            self._openings[number].at_work[member.name] = time.monotonic()
            data = np.frombuffer(self._iterators[number], np.uint8)
            member.peer.post(
                "iterator", {"iterator": number}, [data], seconds=_PROGRAM_SECONDS,
                done=functools.partial(self._has_opened, member, number),
            )  # fmt: skip

    def _has_opened(self, member: Member, number: int, answer: Message | Exception) -> None:
        opening = self._openings.get(number)
        if opening is None:
            return
        if opening.first.done() or isinstance(answer, PeerLostError | PeerTimeoutError):
            pass  # it is known; or others say, or itself when it is back
        elif isinstance(answer, Exception):
            opening.fail(other_job(answer) or answer)
        elif "outcome" in answer.fields:  # an error of the dataset function
            where = str(member.peer)
            opening.fail(error_of(answer, where, "The dataset function ran on"))
        elif answer.method == "ended":
            opening.empty = True
        else:
            opening.first.set_result(cloudpickle.loads(answer.arrays[0].tobytes()))
        opening.settle(member.name)

    def _set_up(self, member: Member, answer: Message | Exception) -> None:
        if (error := other_job(answer)) is not None:  # for ever: it is not asked again
            self.end(error)
            self._event(functools.partial(_fail, error))
            return
        member.asked = False
        if isinstance(answer, Exception):
            return  # `look` asks again
        member.up, member.lost = member.peer.incarnation, False
        member.has.clear()
        member.iterators -= self._iterators.keys()  # it is told of these anew
        for number in self._iterators:
            self._open(member, number)
        self._tidy(member)
        up = member.up
        self._event(lambda s, now: s.worker_up(member.name, up, now))

    def _down(self, member: Member, why: str) -> None:
        was, member.up, member.lost = member.up, None, True
        self._await_no_more(member.name)
        _log.warning("%s is lost: %s. Its work is done by others.", member.peer, why)
        self._event(lambda s, now: s.worker_down(member.name, why, now, was))

    def _await_no_more(self, name: str) -> None:
        for opening in self._openings.values():
            opening.settle(name)

    def _planned(self, member: Member, answer: Message | Exception) -> None:
        self._refused(member, answer)
        if isinstance(answer, Message):  # it says which others it has let go of
            member.has.difference_update(answer.fields["gone"])

    def _refused(self, member: Member, answer: Message | Exception) -> None:
        if isinstance(answer, Exception) and not other_job(answer):  # else `run` is refused, too
            self.lost(member.name, str(answer))


def _fail(error: Exception, state: Any, now: float) -> Any:
    return state.server_failed(error, now)
