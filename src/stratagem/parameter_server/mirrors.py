"""Copies of other servers' state that this server keeps; the other end of `replica.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stratagem.errors import BackupError
from stratagem.parameter_server import protocol
from stratagem.parameter_server.carry import pack_state, unpack_state
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.jobs import Jobs
from stratagem.parameter_server.plan import is_count
from stratagem.parameter_server.protocol import Answer, Fields
from stratagem.parameter_server.store import Store
from stratagem.transport.incoming import Request

_HELD = 1 << 14  # parts of a stream that came before their turn


@dataclass
class Mirror:
    """The copy of one server.

    Attributes:
        session: of the stream that it follows; None after its state was given back.
        next: number of the stream's next part.
        complete: whether all rows are there.
        held: parts by number that came before their turn.
        busy: whether a part is carried out that takes long.
    """

    store: Store
    job: str
    session: tuple[str, int] | None
    next: int = 1
    complete: bool = False
    held: dict[int, tuple[Request, str, Fields]] = field(default_factory=dict)
    busy: bool = False


class Mirrors:
    """All copies that a server keeps.

    Args:
        jobs: of this server.
        own: this server's own state, which counts towards the limit of memory too.
    """

    def __init__(self, jobs: Jobs, own: Store):
        self._jobs, self._own = jobs, own
        self._mirrors: dict[int, Mirror] = {}

    @property
    def nbytes(self) -> int:
        """Size of all copies."""
        return sum(m.store.nbytes + m.store.rounds.nbytes for m in self._mirrors.values())

    def mirror(self, of: int) -> Mirror:
        """The copy of one server."""
        return self._mirrors[of]

    def store(self, of: int) -> Store:
        """Its content."""
        return self._mirrors[of].store

    def status(self) -> dict[str, Any]:
        """Whose copies are here, and whether they are complete."""
        return {"mirrors": [[of, m.complete] for of, m in sorted(self._mirrors.items())]}

    def serve(self, request: Request, said: Fields) -> Answer | None:
        """Answers `mirror`, `mirror_state` or `mirror_rows`."""
        of = said.count("of")
        if request.method == "mirror":
            self._stream(of, request, said)
            return None
        mirror = self._mirrors.get(of)
        if mirror is None or not mirror.complete or mirror.job != said.text("job"):
            raise BackupError(
                f"Expected a complete copy of ps {of} of the job {said.text('job')!r}. Got "
                f"{'none' if mirror is None else 'one that is not'}. Restore a snapshot."
            )
        if request.method == "mirror_state":
            # Whoever still sends changes of the old one is not heard any more.
            mirror.session = None
            for waiting, _, _ in mirror.held.values():
                waiting.fail(BackupError(f"ps {of} was given its state back."))
            mirror.held.clear()
            return pack_state(mirror.store)
        return protocol.read(mirror.store, said)

    def _stream(self, of: int, request: Request, said: Fields) -> None:
        """Takes a part of a stream, in its turn."""
        session = said.get("session", "a hub's id and a number", _is_session)
        session = session[0], session[1]
        number, what = said.count("number"), said.text("what")
        fields = said.get("fields", "a dict", lambda x: isinstance(x, dict))
        part = Fields(what, fields, request.arrays)
        if number == 0:
            self._begin(of, said.text("job"), session, what, part, request)
            request.answer(fields={})
            return
        mirror = self._mirrors.get(of)
        if mirror is None or mirror.session != session or not mirror.next <= number:
            raise BackupError(
                f"Expected the stream of ps {of} that this server follows. Got part {number} of "
                f"{session}. Begin anew."
            )
        if len(mirror.held) >= _HELD:
            raise BackupError(f"Expected at most {_HELD} parts of ps {of} before their turn.")
        mirror.held[number] = request, what, part
        self._go_on(mirror)

    def _go_on(self, mirror: Mirror) -> None:
        """Carries out parts whose turn it is."""
        while not mirror.busy and (found := mirror.held.pop(mirror.next, None)):
            request, what, said = found
            mirror.next += 1
            try:
                self._part(mirror, request, what, said)
            # A copy that is not the same is none.
            except Exception as e:
                mirror.session, mirror.complete = None, False
                request.fail(e)

    def _part(self, mirror: Mirror, request: Request, what: str, said: Fields) -> None:
        store = mirror.store
        if what == "create":
            specs, starts = said.specs(), protocol.starts(said)
            mirror.busy = True
            self._jobs.start(
                store.creating(specs, starts), lambda result: self._created(mirror, request, result)
            )
            return
        if what == "rows":
            start, stop = said.count("start"), said.count("stop")
            place = said.count("vid"), said.count("shard")
            store.assign(*place, "set", said.array(0, "rows"), (start, stop))
        elif what == "complete":
            mirror.complete = True
        elif what in protocol.CHANGES:
            protocol.CHANGES[what](store, said)
        else:
            said.refuse("what", "a part of a stream", what)
        request.answer(fields={})

    def _created(self, mirror: Mirror, request: Request, result: Any) -> None:
        mirror.busy = False
        if isinstance(result, Exception):
            mirror.session, mirror.complete = None, False
            request.fail(result)
        else:
            request.answer(fields={})
        self._go_on(mirror)

    def _begin(
        self, of: int, job: str, session: tuple[str, int], what: str, said: Fields, request: Request
    ) -> None:
        old = self._mirrors.get(of)
        if what == "adopt":
            good = old is not None and old.complete and old.session is None and old.job == job
            if old is None or not good or old.store.version != said.count("version"):
                raise BackupError(f"Expected the copy that ps {of} was restored from. Got none.")
            old.session, old.next = session, 1
            return
        if what != "begin":
            said.refuse("what", "the beginning of a stream", what)
        if old is not None:
            del self._mirrors[of]
            for waiting, _, _ in old.held.values():
                waiting.fail(BackupError(f"The stream of ps {of} has begun anew."))
        store = Store(of, self._own.memory_limit)
        store.elsewhere = lambda: self._own.nbytes + self.nbytes - store.nbytes
        arrays = {}
        for spec in store.check_new(said.specs()):
            for index in spec.blocks_on(of):
                arrays[spec.vid, index] = np.zeros(spec.shard_shape(index), dtype_of(spec.dtype))
        unpack_state(store, said.raw, request.arrays, arrays)
        self._mirrors[of] = Mirror(store, job, session)


def _is_session(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and isinstance(value[0], str)
        and is_count(value[1])
    )
