"""The coordinator's way to the parameter servers: called from any thread, done in one of its own.

That thread may wait for servers, so nothing else depends on it: workers are looked after, and lost
servers noticed, in the coordinator's other thread (coordinator/guard.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from stratagem.errors import BackupError, NotReadyError, PeerLostError, PeerTimeoutError
from stratagem.parameter_server import table_calls
from stratagem.parameter_server.client import Servers
from stratagem.parameter_server.keeper import Keeper
from stratagem.parameter_server.plan import Placement, Spec, Unit
from stratagem.parameter_server.policy import Policy
from stratagem.transport.thread import HubThread

_SECONDS = 300.0  # for one request of the user's program; a server may be restored meanwhile
_RETRY_SECONDS = 0.2
_SILENT_SECONDS = 5.0  # after which nobody waits for a server's last snapshot
_ASKED_SECONDS = 10.0  # more than requests have; then the thread itself is stuck

OUT_OF_REACH = (PeerLostError, PeerTimeoutError, NotReadyError)


class Link:
    """Variables on parameter servers, for the program that made them. Coordinator only.

    A request that finds a server lost is made again until the server is restored; changes carry
    numbers, so none is made twice.

    Args:
        thread: of the coordinator; it never waits for a server.
        asking: runs the hub that is connected to the servers.
        servers: all of them; used in the thread `asking` alone.
        placement: where new variables go.
        keeper: restores servers, and takes snapshots.

    Attributes:
        specs: the variables, by number.
        units: the updates that are installed.
        failed: why a server cannot be restored; what is asked for then fails with it.
    """

    def __init__(
        self,
        thread: HubThread,
        asking: HubThread,
        servers: Servers,
        placement: Placement,
        keeper: Keeper,
    ):
        self.thread, self._asking = thread, asking
        self.servers, self.keeper = servers, keeper
        self.specs: dict[int, Spec] = {}
        self.units: dict[Any, Unit] = {}
        self.failed: Exception | None = None
        self._placement = placement
        self._numbers = itertools.count()
        self._changes = itertools.count()
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._known = keeper.resume(placement)
        self._goes_on = bool(self._known)
        self.specs.update(self._known)

    def create(
        self, name: str, shape: Sequence[int], dtype: str, start: Any, beside: int | None = None,
        policy: Policy | None = None,
    ) -> Spec:  # fmt: skip
        """Makes a variable on the servers, and says where.

        In a job that goes on it may be there already: then it keeps its value.

        Args:
            name: as errors name it.
            shape: of the whole.
            dtype: NumPy's name.
            start: its initial value, or how it is drawn (parameter_server/initial.py).
            beside: number of the variable whose slot it is.
            policy: of a dynamic table; `shape` is nominal then.

        Raises:
            BackupMismatchError: the job had another variable in its place.
        """
        vid = next(self._numbers)
        if vid in self._known:
            return self.keeper.check(self._known[vid], name, shape, dtype)
        reference = None if beside is None else self.specs[beside]
        about = None
        if policy is not None or (reference is not None and reference.dynamic is not None):
            about = {"start": start, "policy": policy and dataclasses.asdict(policy)}
        spec = self._placement.place(vid, name, shape, dtype, reference, about)

        def work() -> None:
            self.servers.create([spec], {vid: start})
            self.keeper.created(spec, start)

        self._do(work, f"variable {name!r} to be made")
        self.specs[vid] = spec
        return spec

    def install(self, units: Sequence[Any]) -> None:
        """Gives the servers the updates that pushes will ask for."""
        new = [
            Unit(unit.uid, tuple(unit.vids), unit.program)
            for unit in units
            if unit.uid not in self.units
        ]
        if new:
            self._do(lambda: self.servers.install(new), "updates to be installed")
            self.units.update({unit.uid: unit for unit in new})

    def read(self, spec: Spec, start: int, stop: int) -> np.ndarray:
        """Rows of a variable; of a scalar its value."""
        return self._do(lambda: self.servers.read(spec, start, stop), f"the value of {spec.name!r}")

    def read_rows(self, spec: Spec, rows: np.ndarray) -> np.ndarray:
        """Rows by their numbers, int64, ascending and distinct (of a dynamic table: by ids, in
        the order of `tables.in_order`), in one request to each server."""
        return self._do(
            lambda: self.servers.pull(rows=[(spec, rows)]).rows[0], f"rows of {spec.name!r}"
        )

    def items(self, spec: Spec) -> tuple[np.ndarray, np.ndarray]:
        """All ids of a dynamic table, and their rows."""
        return self._do(lambda: table_calls.items(self.servers, spec), f"the rows of {spec.name!r}")

    def put(self, spec: Spec, ids: np.ndarray, rows: np.ndarray) -> None:
        """Sets rows of a dynamic table, and makes those that are not there."""

        def work() -> None:
            table_calls.put(self.servers, spec, ids, rows)
            self.keeper.touched()

        self._do(work, f"rows of {spec.name!r} to be set")

    def assign(self, spec: Spec, op: str, value: np.ndarray, start: int) -> None:
        """Changes rows of a variable from `start` on."""
        rows = (start, start + len(value)) if np.ndim(value) else None
        self._change(spec, op, value, rows, f"{spec.name!r} to be assigned")

    def scatter(self, spec: Spec, op: str, indices: np.ndarray, updates: np.ndarray) -> None:
        """Changes single rows of a variable."""
        self._change(spec, op, updates, indices, f"rows of {spec.name!r} to be assigned")

    def keep(self) -> None:
        """Before the first push to new variables: a snapshot, so that none is lost with its server.

        Raises:
            BackupError: it cannot be written.
        """
        self._goes_on = False
        while self.keeper.pending:
            if self.failed is not None:
                raise BackupError(str(self.failed))
            written: Future[None] = Future()
            self.snapshot(written.set_result)
            try:
                error = written.result(_SECONDS)
            except TimeoutError:
                raise PeerTimeoutError(
                    f"Expected a snapshot of the new variables within {_SECONDS:g} s, before the "
                    "first step. Got none. Look at the servers' logs and at their state directory."
                ) from None
            if isinstance(error, OUT_OF_REACH):
                time.sleep(_RETRY_SECONDS)
            elif error is not None:
                raise error

    @property
    def unkept(self) -> bool:
        """Whether `keep` is to be called before the next step."""
        return self._goes_on or self.keeper.pending

    # For the coordinator.

    def snapshot(self, done: Callable[[Any], None]) -> None:
        """Has all servers write a snapshot. Does not wait.

        Args:
            done: called in some thread with None or the error.
        """

        def asked(future: Future[None]) -> None:
            if (error := future.exception()) is not None:
                done(error)

        work = self._asking.submit(
            lambda hub: self.keeper.snapshot(list(self.specs.values()), done)
        )
        work.add_done_callback(asked)

    def keep_last(self) -> Exception | None:
        """A snapshot before the program ends; gives why there is none. Waits for servers that are
        there, as long as a request may take."""
        written: Future[Any] = Future()
        self.snapshot(written.set_result)
        end = time.monotonic() + _SECONDS
        while self.failed is None and time.monotonic() < end:
            try:
                return written.result(_RETRY_SECONDS)
            except TimeoutError:
                silent = [peer for peer in self.servers.peers if peer.silence > _SILENT_SECONDS]
            if silent:
                return PeerLostError(
                    f"Expected all servers to write it. Got nothing of {silent[0]} for "
                    f"{silent[0].silence:.1f} s"
                )
        return self.failed or PeerTimeoutError(
            f"Expected all servers to write it within {_SECONDS:g} s. Not all have"
        )

    def restore(self, server: int, done: Callable[[Any], None]) -> None:
        """Gives a server that is empty its content back. Does not wait.

        Args:
            server: which.
            done: called in some thread: how many pushes are lost, None where that is not known
                (then at most those since the snapshot), or the error.
        """

        def work(hub: Any) -> None:
            try:
                lost = self.keeper.restore(
                    server, list(self.specs.values()), list(self.units.values())
                )
            except Exception as error:
                done(error)
            else:
                done(lost)

        self._asking.submit(work)

    def fail(self, error: Exception) -> None:
        """A server cannot be restored."""
        self.failed = error

    def _change(self, spec: Spec, op: str, value: np.ndarray, rows: Any, what: str) -> None:
        if self._goes_on and spec.vid in self._known:  # it was done before, when the job began
            self.keeper.ignores(spec)
            return
        with self._lock:
            number = next(self._changes)
            self._open.add(number)

        def work() -> None:
            with self._lock:
                below = min(self._open)
            self.servers.assign(spec, op, value, rows=rows, token=(number, below))
            self.keeper.changed(spec, op, value, rows, number)

        try:
            self._do(work, what)
        finally:
            with self._lock:
                self._open.discard(number)

    def _do(self, work: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + _SECONDS
        while True:
            if self.failed is not None:
                raise BackupError(str(self.failed))
            left = max(0.0, end - time.monotonic())
            try:
                return self._asking.do(lambda hub: work(), what, left + _ASKED_SECONDS)
            except OUT_OF_REACH:
                if time.monotonic() >= end:
                    raise
            time.sleep(_RETRY_SECONDS)
