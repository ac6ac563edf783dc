"""The program of a ps task: requests that come over a hub, carried out by a store.

What takes long (creating, writing and reading snapshots, copying to a replica) is done in pieces
between requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stratagem.errors import BackupError, JobMismatchError, NotReadyError
from stratagem.parameter_server import protocol, restore, snapshot
from stratagem.parameter_server.holder import Holder
from stratagem.parameter_server.jobs import Jobs, Steps
from stratagem.parameter_server.mirrors import Mirrors
from stratagem.parameter_server.protocol import Answer, Fields
from stratagem.parameter_server.replica import Replicator
from stratagem.parameter_server.store import Store
from stratagem.transport.hub import Hub
from stratagem.transport.incoming import Request
from stratagem.transport.message import Message
from stratagem.transport.outgoing import Peer

SLICE_SECONDS = 0.004
"""How long pieces of long work keep a request waiting at most, but for the last of them."""


class ParameterServer:
    """One ps task.

    Args:
        hub: of this end; `hub.listen(address, server.serve)` makes it serve.
        index: which ps this is.
        directory: of the snapshots; None: none are written.
        memory_limit: bytes; see `Store`.
        eager: does long work at once, in the handler. For tests on a network of one thread.

    Attributes:
        store: its state.
        job: whose state that is; empty before the first.
        ready: whether it has all state that it should have.
        stopped: whether it was asked to end.
        holder: whom it belongs to.
    """

    def __init__(
        self, hub: Hub, index: int, directory: str | Path | None = None,
        memory_limit: int | None = None, eager: bool = False,
    ):  # fmt: skip
        self.hub, self.index = hub, index
        self.directory = None if directory is None else Path(directory)
        self.store = Store(index, memory_limit)
        self.job = ""
        self.ready = False
        self.stopped = False
        self.holder = Holder(index)
        self.jobs = Jobs(eager)
        self.mirrors = Mirrors(self.jobs, self.store)
        self.replicator: Replicator | None = None
        self.store.elsewhere = lambda: self.mirrors.nbytes
        self._snapshot: int | None = None
        self._begun = 0  # how often the state was replaced

    def replicate_to(self, peer: Peer, seconds: float = 5.0) -> None:
        """Lets another ps keep a copy of this one's state.

        Args:
            peer: which.
            seconds: without an answer for so long, this one goes on without it, with a warning;
                when it is back it gets everything anew.
        """
        self.replicator = Replicator(self.hub, self.jobs, self.store, self.index, peer, seconds)

    def turn(self, seconds: float) -> None:
        """Serves for about so long, or less where there is other work."""
        self.hub.turn(0.0 if self.jobs.ready else min(seconds, 0.005 if self.jobs else seconds))
        self._tick()
        self.jobs.run(SLICE_SECONDS)

    def run(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Serves until it is stopped, or `goes_on` says no; looks at that twice a second."""
        try:
            while not self.stopped and goes_on():
                self.turn(0.5)
        finally:
            self.close()

    def close(self) -> None:
        """Ends long work. The hub stays open."""
        self.jobs.close()

    def serve(self, request: Request) -> Message | None:
        """Answers a request; for `Hub.listen`."""
        self._tick()
        said = Fields(request.method, request.fields, request.arrays)
        handler = self._handlers.get(request.method)
        if handler is None:
            raise ValueError(
                f"Expected a method of a parameter server. Got {request.method!r:.100}. Use the "
                "client of this version."
            )
        answer = handler(self, request, said)
        return None if answer is None else _message(answer)

    # Each takes a request, and gives its answer or None: that comes later.

    def _hello(self, request: Request, said: Fields) -> Answer:
        job = said.text("job")
        if said.raw.get("who") is not None:
            self.holder.take(job, request.client, said.text("who"), self.hub.now())
        if said.raw.get("replica") is not None and self.replicator is None:
            name, address = said.get("replica", "name and address of a server", _is_place)
            self.replicate_to(self.hub.connect(address, name))
            if self.ready:
                self._replicate_anew()
        if said.flag("start") and (job != self.job or not self.ready):
            if self._snapshot is not None:
                raise BackupError("Expected no job to start while a snapshot is written. Wait.")
            self._begin(job)
            self.ready = True
            self._replicate_anew()
        return self._about(), ()

    def _status(self, request: Request, said: Fields) -> Answer:
        return {**self.store.status(), **self._about(), **self.mirrors.status()}, ()

    def _stop(self, request: Request, said: Fields) -> Answer:
        self._check_same(said.text("job"))
        self.stopped = True
        return {}, ()

    def _leave(self, request: Request, said: Fields) -> Answer:
        self.holder.leave(said.text("job"))
        return {}, ()

    def _pull(self, request: Request, said: Fields) -> Answer:
        self._check_job(said)
        return protocol.pull(self.store, said, request.allocate, request.shares_memory)

    def _read(self, request: Request, said: Fields) -> Answer:
        self._check_job(said)
        return protocol.read(self.store, said)

    def _squares(self, request: Request, said: Fields) -> Answer:
        self._check_job(said)
        return protocol.squares(self.store, said)

    def _table(self, request: Request, said: Fields) -> Answer:
        self._check_job(said)
        return protocol.table(self.store, said)

    def _change(self, request: Request, said: Fields) -> Answer | None:
        self._check_job(said)
        answer = protocol.CHANGES[request.method](self.store, said)
        return self._replicated(request, answer)

    def _create(self, request: Request, said: Fields) -> None:
        self._check_job(said)
        specs, starts = said.specs(), protocol.starts(said)
        job = self.job

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                request.fail(result)
            elif job != self.job or not self.ready:
                request.fail(NotReadyError("Another job has begun, or this one was restored."))
            else:
                answer = self._replicated(request, ({}, ()))
                if answer is not None:
                    request.answer(_message(answer))

        self.jobs.start(self._while_here(self.store.creating(specs, starts)), done)

    def _take_snapshot(self, request: Request, said: Fields) -> None:
        self._check_job(said)
        if self.directory is None:
            raise BackupError(
                f"ps {self.index}: expected a directory for snapshots. Got none. Name one where "
                "the task is started."
            )
        if self._snapshot is not None:
            raise BackupError(
                f"ps {self.index}: expected one snapshot at a time. Got number "
                f"{said.count('number')} while {self._snapshot} is written. Ask again later."
            )
        number, began = said.count("number"), time.monotonic()
        work = snapshot.taking(
            self.store, self.directory, number, self.job, said.count("keep_from")
        )
        self._snapshot = number

        def done(result: Any) -> None:
            self._snapshot = None
            if isinstance(result, Exception):
                request.fail(result)
                return
            seconds = time.monotonic() - began
            fields = {"number": number, "bytes": result.nbytes, "version": result.version}
            request.answer(fields={**fields, "seconds": seconds})

        self.jobs.start(work, done)

    def _restore(self, request: Request, said: Fields) -> None:
        job, number, directory = said.text("job"), said.count("number"), self.directory
        specs, units = said.specs(), said.units()
        if directory is None:
            raise BackupError(
                f"ps {self.index}: expected a directory of snapshots. Got none. Name one where the "
                "task is started."
            )
        self._fill(
            request,
            job,
            lambda: restore.restoring(self.store, directory, number, job, specs, units),
        )

    def _recover(self, request: Request, said: Fields) -> None:
        job, replicator = said.text("job"), self.replicator
        if replicator is None:
            raise BackupError(
                f"ps {self.index}: expected a server that replicates this one. Got none. Restore a "
                "snapshot, or start the job with replication=2."
            )
        self._fill(request, job, lambda: replicator.recovering(job))

    def _fill(self, request: Request, job: str, steps: Callable[[], Steps]) -> None:
        """Replaces the state by one from elsewhere; until then this server is not ready."""
        self.holder.check(job, request.client, self.hub.now())
        if self._snapshot is not None:
            raise BackupError("Expected no snapshot to be written during a restore. Wait for it.")
        self._begin(job)
        begun = self._begun

        def done(result: Any) -> None:
            if isinstance(result, Exception):
                if begun == self._begun:
                    self._begin("")
                request.fail(result)
                return
            self.ready = True
            self._replicate_anew()
            request.answer(fields=result)

        self.jobs.start(self._while_here(steps()), done)

    def _while_here(self, steps: Steps) -> Steps:
        """A job that ends with NotReadyError where the state that it writes is replaced."""
        return self._until(self._begun, steps)

    def _until(self, begun: int, steps: Steps) -> Steps:
        error = None
        try:
            while True:
                try:
                    wait = next(steps) if error is None else steps.throw(error)
                except StopIteration as end:
                    return end.value
                error = None
                try:
                    yield wait
                except Exception as e:  # of what it waits for
                    error = e
                if begun != self._begun:
                    raise NotReadyError(
                        f"ps {self.index}: expected the state to stay until this was done. "
                        "Another job has begun, or a later request restores it. Ask again."
                    )
        finally:
            steps.close()

    def _mirror(self, request: Request, said: Fields) -> Answer | None:
        return self.mirrors.serve(request, said)

    _handlers: Mapping[str, Callable[[ParameterServer, Request, Fields], Answer | None]] = {
        "hello": _hello, "status": _status, "stop": _stop, "leave": _leave,
        "pull": _pull, "read": _read, "table": _table, "squares": _squares,
        "create": _create, "snapshot": _take_snapshot, "restore": _restore, "recover": _recover,
        "mirror": _mirror, "mirror_state": _mirror, "mirror_rows": _mirror,
        **dict.fromkeys(protocol.CHANGES, _change),
    }  # fmt: skip

    # Inside

    def _about(self) -> dict[str, Any]:
        numbers = [] if self.directory is None else snapshot.numbers(self.directory, self.index)
        replica = "none" if self.replicator is None else self.replicator.state
        return {
            "job": self.job, "ready": self.ready, "version": self.store.version,
            "server": self.index, "incarnation": self.hub.incarnation, "snapshots": numbers,
            "replica": replica,
        }  # fmt: skip

    def _begin(self, job: str) -> None:
        self._begun += 1
        self.store.clear()
        self.job, self.ready = job, False

    def _check_job(self, said: Fields) -> None:
        job = said.text("job")
        self._check_same(job)
        if not self.ready:
            raise NotReadyError(
                f"ps {self.index}: expected the state of job {job!r}. Got none: this task has just "
                "been started. Restore a snapshot, or wait until the coordinator has done so."
            )

    def _check_same(self, job: str) -> None:
        if self.job and job != self.job:
            raise JobMismatchError(
                f"ps {self.index}: expected requests of the job {self.job!r}. Got one of {job!r}. "
                "Stop the tasks of the other job, or give this one servers of its own."
            )

    def _replicated(self, request: Request, answer: Answer) -> Answer | None:
        """Gives the answer now, or lets it follow when the replica has the change too."""
        if self.replicator is None or not self.replicator.active:
            return answer
        self.replicator.forward(
            request.method, request.fields, request.arrays,
            lambda: request.answer(_message(answer)),
        )  # fmt: skip
        return None

    def _replicate_anew(self) -> None:
        if self.replicator is not None:
            self.replicator.begin(self.job)

    def _tick(self) -> None:
        if self.replicator is not None:
            self.replicator.tick()


def _message(answer: Answer) -> Message:
    return Message("", answer[0], tuple(answer[1]))


def _is_place(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(x, str) and 0 < len(x) <= 1000 for x in value)
    )
