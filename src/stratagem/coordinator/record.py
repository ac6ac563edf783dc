"""The journal of a job while it runs: who writes in it, and how a job begins and ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.coordinator.instructions import Counted, Lease
from stratagem.coordinator.journal import Journal, resume
from stratagem.coordinator.progress import Progress
from stratagem.coordinator.watermark import Watermark
from stratagem.errors import BackupError
from stratagem.parameter_server import catalog, snapshot

NAME = "journal"

_log = logging.getLogger("stratagem")


class Record:
    """A journal that several threads may write in.

    Args:
        directory: of the job's state.
        new_job: id of the job, if it begins now.

    Attributes:
        resumed: what was finished when this process began; None where the job begins.
        job: id of the job.
        began: whether any step was ever begun: otherwise there is nothing to go on with.

    Raises:
        BackupError: another process has the journal open, or it cannot be written; or there are
            snapshots, and no journal.
        CorruptBackupError: it is damaged.
    """

    def __init__(self, directory: Path, new_job: str):
        self._path = directory / NAME
        self._lock = threading.Lock()
        job = resume(self._path).job
        snapshots = {*snapshot.numbers(directory), *catalog.numbers(directory)}
        if snapshots and not job:
            raise BackupError(
                f"Expected the journal of a job in {directory}, where its snapshots "
                f"{sorted(snapshots)} are. Got none: what they have in them is not known. Put the "
                "file 'journal' back; or, to begin anew, give another state directory, or remove "
                "the snapshots."
            )
        self._journal = Journal(self._path, job or new_job)
        self.resumed: Progress | None = self._journal.progress
        if self.resumed.ended or not self.resumed.next_token:  # it is done, or never began a step
            if self.resumed.ended and snapshots:
                _log.warning(
                    "The job that %s is the state of has ended: another one begins, and its "
                    "snapshots take the place of %s.",
                    directory, sorted(snapshots),
                )  # fmt: skip
            self._journal.begin(new_job)
            self.resumed = None
        if self.resumed is not None and self.resumed.perhaps:
            self._journal.perhaps(False)
        self.job = self._journal.progress.job
        self.began = self.resumed is not None
        self._frozen = False

    def used(self, number: int) -> None:
        """A closure has this number."""
        with self._lock:
            self.began = True
            self._journal.used(number)

    def leased(self, token: int, lease: Lease) -> None:
        """A batch is going to be pushed under a token."""
        with self._lock:
            self._journal.leased(token, lease)

    def counted(self, what: Counted) -> None:
        """A closure's effects are in; of one that has none and took no batch nothing is noted."""
        with self._lock:
            if (what.pushes or what.lease is not None) and not (self._frozen and what.lease):
                self._journal.counted(what.lease)

    def freeze(self) -> None:
        """Before the last snapshot: no batch is noted as finished any more, as it may not be in it.

        Each runs again under its number, and changes nothing where it was.
        """
        with self._lock:
            self._frozen = True

    def lost(self, pushes: int) -> None:
        """So many pushes were lost in all."""
        with self._lock:
            self._journal.lost(pushes)

    def asked(self) -> None:
        """A snapshot is asked for."""
        with self._lock:
            self._journal.asked()

    def snapshot(self, number: int) -> None:
        """A snapshot is complete."""
        with self._lock:
            self._journal.snapshot(number)

    def mark(self, **where: Any) -> None:
        """Where the program is."""
        with self._lock:
            self._journal.mark(**where)

    def logs(self, key: str, logs: Mapping[str, Any]) -> None:
        """What an epoch has reported so far."""
        with self._lock:
            self._journal.logs(key, logs)

    def logs_of(self, key: str) -> dict[str, Any] | None:
        """What an epoch had reported before this process began, if it had."""
        return None if self.resumed is None else self.resumed.logs.get(key)

    @property
    def at(self) -> dict[str, Any]:
        """Where the program was when the job was left; empty in a job that begins."""
        return {} if self.resumed is None else self.resumed.mark

    def begin(self, key: str) -> Watermark:
        """A dataset is accounted for; gives its batches that are finished already."""
        with self._lock:
            self._journal.data(key)
        known = None if self.resumed is None else self.resumed.data.get(key)
        done = Watermark() if known is None else known.done
        return Watermark(done.below, done.above)

    def release(self, key: str) -> None:
        """A dataset is done with."""
        with self._lock:
            self._journal.released(key)

    def end(self) -> None:
        """The job is done, and the next one in this directory begins anew. On the disk at once."""
        with self._lock:
            self._journal.ended()

    def perhaps(self) -> None:
        """The job is done if this process ends with exit code 0, which it does not know."""
        with self._lock:
            self._journal.perhaps(True)

    def close(self) -> None:
        """Ends writing."""
        with self._lock:
            self._journal.close()
