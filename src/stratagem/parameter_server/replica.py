"""The state of a parameter server, kept a second time by another one (replication=2).

The primary carries out a change, sends the same request on, and answers when the other has it too.
Both do the same in the same order, so both have the same bits (on processors for which NumPy
computes alike). All goes through one numbered stream: where the replica begins anew, copies of the
rows travel in it between the changes. A change to rows that were not copied yet does no harm, as
their copy is taken later; one to rows that were is repeated there. So nothing stands still.

State machine replication (Schneider, Implementing fault-tolerant services using the state machine
approach, ACM Computing Surveys 22 (4), 1990) with one replica.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratagem.errors import BackupError, RemoteError, StratagemError
from stratagem.parameter_server.block import Block
from stratagem.parameter_server.carry import pack_state, ranges, unpack_state
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.jobs import WAITING, Jobs, Steps
from stratagem.parameter_server.plan import Spec
from stratagem.parameter_server.store import Store
from stratagem.transport.hub import Hub
from stratagem.transport.outgoing import Peer

_AHEAD = 8  # copies on their way
_IN_FLIGHT = 64 << 20  # bytes that the other end has not confirmed; more waits here
_RETRY_SECONDS = 1.0

_log = logging.getLogger("stratagem")


@dataclass
class _Part:
    """One part of the stream."""

    fields: dict[str, Any]
    arrays: Sequence[np.ndarray]
    then: Callable[[], None]
    bytes: int


class Replicator:
    """The end of the server whose state it is.

    Args:
        hub: of this server.
        jobs: of this server.
        store: its state.
        index: which ps this is.
        peer: the server that keeps the copy.
        seconds: deadline for what is sent there.

    Attributes:
        state: "off" (it has no copy), "copying" or "on".
    """

    def __init__(self, hub: Hub, jobs: Jobs, store: Store, index: int, peer: Peer, seconds: float):
        self._hub, self._jobs, self._store = hub, jobs, store
        self._index, self._peer, self._seconds = index, peer, seconds
        self.state = "off"
        self._job = ""
        self._session = 0
        self._number = 0
        self._waiting: deque[_Part] = deque()
        self._flying: dict[int, _Part] = {}
        self._bytes = 0
        self._copies = 0
        self._next_try = 0.0
        self._adopts = False
        self._alone = False  # whether it was said, or is known, that a copy was lost
        self._with: str | None = None

    @property
    def active(self) -> bool:
        """Whether changes are to be forwarded."""
        return self.state != "off"

    def begin(self, job: str) -> None:
        """Sends everything anew, and what changes from now on."""
        self._give_up("")
        self._job = job
        self._session += 1
        self._number = 0
        self._copies = 0
        self._with = self._peer.incarnation
        self.state = "copying"
        session = self._session
        self._jobs.start(self._copying(session), lambda result: self._copied(session, result))

    def tick(self) -> None:
        """Tries again where the other server was lost, or was restarted."""
        seen = self._peer.incarnation
        if self.active and seen is not None and seen != self._with:
            if self._with is not None:
                self._give_up("it was restarted")
            self._with = seen
        if self.state == "off" and self._job and self._hub.now() >= self._next_try:
            self.begin(self._job)

    def forward(
        self, method: str, fields: Mapping[str, Any], arrays: Sequence[np.ndarray],
        then: Callable[[], None],
    ) -> None:  # fmt: skip
        """Sends a change on; `then` is called when the other has it, or is lost."""
        told = {
            "job": self._job, "of": self._index, "number": self._number, "what": method,
            "session": [self._hub.incarnation, self._session], "fields": dict(fields),
        }  # fmt: skip
        self._number += 1
        self._waiting.append(_Part(told, arrays, then, sum(x.nbytes for x in arrays)))
        self._pump()

    def recovering(self, job: str) -> Steps:
        """Fills the store, which is empty, from the other server's copy; a job of `Jobs`."""
        store = self._store
        about = yield from self._ask("mirror_state", {"job": job, "of": self._index})
        arrays = {}
        for spec in store.check_new([Spec.from_wire(x) for x in about.fields["specs"]]):
            for index in spec.blocks_on(store.server):
                array = np.empty(spec.shard_shape(index), dtype_of(spec.dtype))
                arrays[spec.vid, index] = array
                block = Block(array, spec.shards[index].start)
                for start, stop in ranges(spec, index):
                    fields = {
                        "job": job, "of": self._index, "vid": spec.vid, "shard": index,
                        "start": start, "stop": stop,
                    }  # fmt: skip
                    answer = yield from self._ask("mirror_rows", fields)
                    block.write(start - block.start, answer.arrays[0])
        unpack_state(store, about.fields, about.arrays, arrays)
        self._adopts = self._alone = True
        return {"version": store.version}

    def _ask(self, method: str, fields: Mapping[str, Any]) -> Steps:
        came: list[Any] = []

        def done(result: Any) -> None:
            came.append(result)
            self._jobs.poke()

        self._peer.post(method, fields, seconds=self._seconds, done=done)
        while not came:
            yield WAITING
        if isinstance(error := came[0], Exception):
            why = error.text if isinstance(error, RemoteError) else str(error)
            raise BackupError(
                f"ps {self._index}: expected its state from {self._peer.name}. It is not there: "
                f"{why}"
            ) from None
        return came[0]

    def _copying(self, session: int) -> Steps:
        store = self._store
        if self._adopts:  # the state came from there
            self._adopts = False
            fields = {"version": store.version}
            self.forward("adopt", fields, (), lambda: self._complete(session))
            return
        facts, arrays = pack_state(store)
        keys = list(store.blocks)
        self.forward("begin", facts, arrays, lambda: None)
        for vid, index in keys:
            spec = store.specs.get(vid)
            if spec is None:
                continue
            for start, stop in ranges(spec, index):
                while self._copies >= _AHEAD and session == self._session:
                    yield WAITING
                if session != self._session or self.state != "copying":
                    return
                if (vid, index) not in store.blocks:
                    break
                self._copies += 1
                rows = store.read(vid, index, start, stop)
                fields = {"vid": vid, "shard": index, "start": start, "stop": stop}
                self.forward("rows", fields, (rows,), self._one_copied)
                yield None
        self.forward("complete", {}, (), lambda: self._complete(session))

    def _one_copied(self) -> None:
        self._copies -= 1
        self._jobs.poke()

    def _complete(self, session: int) -> None:
        if session == self._session and self.state == "copying":
            self.state = "on"
            if self._alone:
                self._alone = False
                _log.warning(
                    "ps %d has its replica on %s again: what it holds is in two places.",
                    self._index, self._peer.name,
                )  # fmt: skip

    def _copied(self, session: int, result: Any) -> None:
        if isinstance(result, Exception) and session == self._session:
            self._give_up(f"{type(result).__name__}: {result}")

    def _pump(self) -> None:
        """Sends what may be sent, in order."""
        while self._waiting:
            part = self._waiting[0]
            if self._flying and self._bytes + part.bytes > _IN_FLIGHT:
                return
            self._waiting.popleft()
            session, number = self._session, part.fields["number"]
            self._flying[number] = part
            self._bytes += part.bytes
            try:
                done = functools.partial(self._confirmed, session, number)
                self._peer.post(
                    "mirror", part.fields, part.arrays, seconds=self._seconds, done=done
                )
            except StratagemError as e:
                self._give_up(f"{type(e).__name__}: {e}")
                return

    def _confirmed(self, session: int, number: int, result: Any) -> None:
        if session != self._session or number not in self._flying:
            return
        if isinstance(result, Exception):
            self._give_up(f"{type(result).__name__}: {result}")
            return
        part = self._flying.pop(number)
        self._bytes -= part.bytes
        part.then()
        self._pump()

    def _give_up(self, why: str) -> None:
        """Goes on without the other; those who wait for it get their answers."""
        if why:
            self._alone = True
            _log.warning(
                "ps %d goes on without its replica on %s: %s. What it holds is in one place until "
                "that server is back.", self._index, self._peer.name, why,
            )  # fmt: skip
        self.state = "off"
        self._session += 1
        self._next_try = self._hub.now() + _RETRY_SECONDS
        parts = [*(self._flying[n] for n in sorted(self._flying)), *self._waiting]
        self._flying, self._bytes = {}, 0
        self._waiting.clear()
        for part in parts:
            part.then()
        self._jobs.poke()
