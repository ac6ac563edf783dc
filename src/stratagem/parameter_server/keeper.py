"""What keeps the content of parameter servers through their losses: snapshots and replicas.

A lost server gets back what its replica has, or the last complete snapshot and what the program
itself has changed since; never an initial value that was trained on. All is used in one thread,
which may wait for servers, but for `pending` and what is said to be for any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import BackupError, BackupMismatchError, StratagemError
from stratagem.parameter_server import catalog
from stratagem.parameter_server.client import Servers
from stratagem.parameter_server.plan import Placement, Spec, Unit

_RESTORE_SECONDS = 600.0
_SNAPSHOT_SECONDS = 600.0
_LOG_BYTES = 8 << 20  # of changes that are kept until the next snapshot; then one is due

_log = logging.getLogger("stratagem")


class Keeper:
    """See the module. Coordinator only.

    Args:
        servers: all of them.
        directory: where snapshots are; None: none are written.
        replicated: whether each server's state is on another one, too.
        complete: number of the last snapshot that is complete on all servers.
        written: number of the last snapshot that any server has.
        noted: is told the number of each snapshot that is complete, and None when one is asked for.

    Attributes:
        complete: the last one, or None.
    """

    def __init__(
        self,
        servers: Servers,
        directory: Path | None,
        replicated: bool,
        complete: int | None = None,
        written: int = 0,
        noted: Callable[[int | None], None] = lambda number: None,
    ):
        self._servers, self._directory, self._replicated = servers, directory, replicated
        self.complete, self._number, self._noted = complete, max(written, complete or 0), noted
        # What no snapshot has yet: how variables start, and what the program has changed.
        self._starts: dict[int, tuple[Spec, Any]] = {}
        self._changes: list[tuple[Spec, str, np.ndarray, Any, int]] = []
        self._bytes = 0
        self._whole = True  # whether `_changes` has all changes since the last snapshot
        self._pushed = complete is not None
        self._writing = False
        self._later: list[Callable[[], None]] = []
        self._ignored: set[int] = set()
        self._saved: set[int] = set()  # variables of the last complete snapshot

    # Before there is anything.

    def resume(self, placement: Placement) -> dict[int, Spec]:
        """The variables of a job that goes on, by number, as they are placed on these servers."""
        if self.complete is None or self._directory is None:
            return {}
        found: dict[int, Spec] = {}
        for old in catalog.read(self._directory, self.complete):
            beside = None if old.beside is None else found[old.beside]
            known = old.vid, old.name, old.shape, old.dtype
            found[old.vid] = placement.place(*known, beside, old.dynamic)
        self._servers.know(found.values())
        self._saved = set(found)
        return found

    def check(self, spec: Spec, name: str, shape: Sequence[int], dtype: Any) -> Spec:
        """The variable of a job that goes on, where the program makes the same one again."""
        if (spec.name, spec.shape, spec.dtype) != (name, tuple(shape), str(np.dtype(dtype))):
            raise BackupMismatchError(
                f"variable {spec.vid}: expected {spec.name!r}, {spec.dtype}{list(spec.shape)}, as "
                f"in the job that {self._directory} is the state of. Got {name!r}, "
                f"{np.dtype(dtype)}{list(shape)}. Start the program of that job again as it was, "
                "or give this one another state directory."
            )
        return spec

    def ignores(self, spec: Spec) -> None:
        """The program changes a variable, before its first step, that goes on as it was."""
        if spec.vid not in self._ignored:
            self._ignored.add(spec.vid)
            _log.warning(
                "This job goes on from %s: variable %r keeps its value; what the program assigns "
                "to it before its first step was done when the job began.",
                self._directory, spec.name,
            )  # fmt: skip

    # What happens to variables.

    @property
    def pending(self) -> bool:
        """Whether there are new variables that are in no snapshot. Any thread."""
        if self._directory is None:
            if self._pushed:
                return False
            self._pushed = True
            self._forget(len(self._changes), list(self._starts))
            return False
        return bool(self._starts) or not self._whole

    def created(self, spec: Spec, start: Any) -> None:
        """A variable was made."""
        if self._directory is not None or not self._pushed:
            self._starts[spec.vid] = spec, start

    def changed(self, spec: Spec, op: str, value: np.ndarray, rows: Any, number: int) -> None:
        """The program has changed a variable."""
        if self._directory is None and self._pushed:
            return
        size = np.asarray(value).nbytes
        if self._bytes + size > _LOG_BYTES:
            self._whole = False
        else:
            self._changes.append((spec, op, np.array(value), rows, number))
            self._bytes += size

    def touched(self) -> None:
        """The program has changed what is not kept one by one: a snapshot is due."""
        if self._directory is not None or not self._pushed:
            self._whole = False

    def _forget(self, changes: int, starts: Sequence[int]) -> None:
        del self._changes[:changes]
        self._bytes = sum(value.nbytes for _, _, value, _, _ in self._changes)
        for vid in starts:
            self._starts.pop(vid, None)

    # Snapshots.

    def snapshot(self, specs: Sequence[Spec], done: Callable[[Any], None]) -> None:
        """Has all servers write one, after the one that is being written.

        Args:
            specs: all variables.
            done: called with None or the error.
        """
        if self._writing:

            def again() -> None:
                try:
                    self.snapshot(specs, done)
                except Exception as error:  # the hub was closed
                    done(error)

            self._later.append(again)
            return
        if self._directory is None:
            done(BackupError("Expected a state directory for snapshots. Got none. Give state_dir."))
            return
        self._number += 1
        number = self._number
        changes, whole = len(self._changes), self._whole
        starts = [spec.vid for spec in specs if spec.vid in self._starts]
        self._whole = True
        left = len(self._servers.peers)
        errors: list[Exception] = []

        def one(result: Any) -> None:
            nonlocal left
            left -= 1
            if isinstance(result, Exception):
                errors.append(result)
            if not left:
                self._writing = False
                if errors:
                    self._whole = whole and self._whole
                else:
                    self._written(number, specs, changes, starts)
                later, self._later = self._later, []
                done(errors[0] if errors else None)
                for each in later:
                    each()

        self._writing = True
        try:
            catalog.write(self._directory, number, specs)
        except OSError as error:
            left = 1
            one(BackupError(
                f"Expected to write to the state directory {self._directory}. Got {error}. Make "
                "room there, or give another one."
            ))  # fmt: skip
            return
        self._noted(None)
        keep = number if self.complete is None else self.complete
        try:
            self._servers.post_snapshot(number, keep, _SNAPSHOT_SECONDS, one)
        except Exception as error:  # what cannot be sent, as the program ends, is not answered
            left = 1
            one(error)

    def _written(
        self, number: int, specs: Sequence[Spec], changes: int, starts: Sequence[int]
    ) -> None:
        if self.complete is not None and self._directory is not None:
            catalog.prune(self._directory, self.complete)
        self.complete, self._pushed = number, True
        self._saved = {spec.vid for spec in specs}
        self._forget(changes, starts)
        self._noted(number)

    # Restoring.

    def restore(self, server: int, specs: Sequence[Spec], units: Sequence[Unit]) -> int | None:
        """Fills an empty server; gives how many pushes it has lost, None where that is not known.

        Raises:
            PeerLostError, PeerTimeoutError, NotReadyError: it was lost again.
            BackupError: there is nothing to restore it from.
        """
        # Before anything else: after the first push, which is noted first, they may be forgotten.
        starts, changes = list(self._starts.values()), list(self._changes)
        if self._replicated and (self._pushed or self.complete is None):
            try:
                self._servers.recover(server, _RESTORE_SECONDS)
                return 0
            except BackupError as error:
                if self.complete is None and self._pushed:
                    raise BackupError(self._nothing(server)) from None
                _log.warning("%s", error)
        lost: int | None = 0
        if self.complete is not None:
            saved = [spec for spec in specs if spec.vid in self._saved]
            known = [unit for unit in units if set(unit.vids) <= self._saved]
            self._servers.restore(self.complete, saved, known, [server], _RESTORE_SECONDS)
            lost = None
        elif not self._pushed and self._whole:
            self._servers.begin(server)
        else:
            raise BackupError(self._nothing(server))
        for spec, start in starts:
            self._servers.create([spec], {spec.vid: start}, only=server)
        self._servers.install(units, only=server)
        for spec, op, value, rows, number in changes:
            self._servers.assign(spec, op, value, rows=rows, token=(number, 0), only=server)
        return lost

    def _nothing(self, server: int) -> str:
        peer = self._servers.peers[server]
        return (
            f"Expected {peer.name} at {peer.address} to be restored: it was started again, and is "
            "empty. Got neither a state directory with snapshots nor a replica that is complete, "
            "so what it held is lost. Start the job again, with `stratagem run` or "
            "STRATAGEM_STATE_DIR, state_dir=... or replication=2, so that the next loss costs less."
        )


def is_final(error: Exception) -> bool:
    """Whether trying again to restore a server would give the same error."""
    return not isinstance(error, StratagemError) or isinstance(error, BackupError)
