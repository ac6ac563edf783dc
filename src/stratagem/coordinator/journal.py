"""What is finished, on disk: a coordinator that is started again goes on from here.

A file of lines, each a CRC-32 of the rest and a JSON array. It only grows, until it is rewritten
as short as it can be (to another file, then renamed). A last line that was not written in full is
ignored: nobody was told of it.
"""

from __future__ import annotations

import copy
import fcntl
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stratagem.coordinator.instructions import Lease
from stratagem.coordinator.progress import DataProgress, Progress
from stratagem.coordinator.watermark import Watermark
from stratagem.errors import BackupError, CorruptBackupError, JobMismatchError
from stratagem.parameter_server.files import sync_folder

Fsync: TypeAlias = float | Literal["always", "never"]
"""When what was written is forced to the disk: after every record, never, or after so many seconds.
A coordinator's own death loses nothing, whatever is chosen; the machine's may lose the records
since. Then the batches they tell of are executed a second time; none is left out."""

_FORMAT = "stratagem journal 2"
_BLOCK = 4096  # Tokens that are set aside at once.
_HEADER = 1024  # A first line is shorter.
_WORTH = 1 << 20  # Bytes from which on a journal is worth rewriting.


class Journal:
    """The journal of one job, open for writing. One thread at a time; one process at a time.

    Args:
        path: the file; it is made if need be, with its folder.
        job: id of the job; None where that of the file is to be taken.
        fsync: when records are forced to the disk.
        clock: the seconds of a monotonic clock.

    Attributes:
        progress: what was finished when it was opened.

    Raises:
        JobMismatchError: the file is that of another job.
        CorruptBackupError: the file was damaged, other than at its end.
        BackupError: another process has it open, or it cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        job: str | None = None,
        fsync: Fsync = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(path)
        self._every = _seconds(fsync)
        self._clock = clock
        self._synced = clock()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._path)
        self._file = -1
        try:
            self._now, good = _read(self._path)
            if job is not None and self._now.job not in ("", job):
                raise JobMismatchError(
                    f"Expected the journal of job {job!r} at {self._path}. Got that of job "
                    f"{self._now.job!r}. Give each job a state directory of its own"
                )
            self._now.job = job or self._now.job
            self.progress = copy.deepcopy(self._now)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.ftruncate(self._file, good)
            self._size = good
            self._short = 0  # Its size when it was rewritten last.
            if not good:
                self._append(True, _FORMAT, self._now.job)
                sync_folder(self._path.parent)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def used(self, number: int) -> None:
        """A closure has this number. Numbers are set aside in blocks, always on the disk."""
        if number >= self._now.next_token:
            self._append(True, "tokens", number + _BLOCK)

    def data(self, key: str) -> None:
        """A dataset is accounted for from now on; one that is known already goes on."""
        if key not in self._now.data:
            self._append(False, *_whole(key, DataProgress()))

    def leased(self, token: int, lease: Lease) -> None:
        """A batch will be pushed under a token; before its `Dispatch` is sent."""
        self._append(False, "lease", token, *lease)

    def counted(self, lease: Lease | None) -> None:
        """A `Counted` instruction. Of one without a lease only that there was a push."""
        if lease is not None:
            self._append(False, "done", *lease)
        else:
            self._append(False, "push")

    def released(self, key: str) -> None:
        """A dataset is not needed any more: its epoch is over."""
        self._append(False, "release", key)

    def lost(self, pushes: int) -> None:
        """So many pushes have been lost with servers, in all."""
        self._append(True, "lost", pushes)

    def asked(self) -> None:
        """A snapshot has been asked for: what is finished from now on may not be in it."""
        self._append(False, "asked")

    def snapshot(self, number: int) -> None:
        """All servers have written the snapshot that was asked for last."""
        self._append(True, "snapshot", number)

    def mark(self, **where: Any) -> None:
        """Where the program is, such as its epoch and step: plain values that JSON can hold."""
        self._append(True, "mark", where)

    def logs(self, key: str, logs: Mapping[str, Any]) -> None:
        """What an epoch has reported so far: plain values that JSON can hold."""
        self._append(True, "logs", key, dict(logs))

    def ended(self) -> None:
        """The job is done: nothing is to be gone on with."""
        self._append(True, "ended")

    def perhaps(self, ended: bool) -> None:
        """Whether the job is done if its coordinator ends with exit code 0."""
        self._append(True, "perhaps", ended)

    def begin(self, job: str) -> None:
        """Another job begins in place of the one that was there."""
        self._now = Progress(job=job)
        try:
            self._rewrite()
        except OSError as error:
            raise self._unwritten(error) from error
        self.progress = copy.deepcopy(self._now)

    def sync(self) -> None:
        """Force all that was written to the disk."""
        os.fsync(self._file)
        self._synced = self._clock()

    def close(self) -> None:
        """Write no more. Twice is fine."""
        if self._file >= 0:
            if self._every < math.inf:
                os.fsync(self._file)
            os.close(self._file)
            self._file = -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _append(self, important: bool, *record: Any) -> None:
        line = _line(record)
        try:
            self._write(self._file, line)
            _apply(self._now, record)
            self._size += len(line)
            if self._size > _WORTH + 2 * self._short:
                self._rewrite()
            elif self._every < math.inf:
                if important or self._clock() - self._synced >= self._every:
                    self.sync()
        except OSError as error:
            os.ftruncate(self._file, self._size)  # No part of a line stays.
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> BackupError:
        return BackupError(
            f"Expected to write the journal {self._path}. Got {error}. Make room there, or give "
            "another state directory, and start the job again: it goes on from what was written"
        )

    @staticmethod
    def _write(file: int, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(file, rest) :]

    def _rewrite(self) -> None:
        """Replace the file by one that says the same in as few lines as possible."""
        other = self._path.with_name(self._path.name + ".new")
        file = os.open(other, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            text = b"".join(_line(record) for record in _records(self._now))
            self._write(file, text)
            os.fsync(file)
            other.replace(self._path)
        except BaseException:
            os.close(file)
            raise
        sync_folder(self._path.parent)
        os.close(self._file)
        self._file, self._size, self._short = file, len(text), len(text)
        self._synced = self._clock()


def _seconds(fsync: Fsync) -> float:
    if fsync == "always":
        return 0.0
    if fsync == "never":
        return math.inf
    if isinstance(fsync, str) or fsync < 0:
        raise ValueError(
            f"Expected fsync to be 'always', 'never' or a number of seconds. Got {fsync!r}. Leave "
            "it away for once a second"
        )
    return fsync


def resume(path: str | os.PathLike[str]) -> Progress:
    """What a journal says is finished; nothing, where there is none. Writes nothing.

    Raises:
        CorruptBackupError: the file was damaged, other than at its end.
    """
    return _read(Path(path))[0]


def succeeded(path: str | os.PathLike[str]) -> None:
    """The coordinator whose journal this is has ended with exit code 0; any process may say so.

    Raises:
        BackupError: as for `Journal`.
    """
    if resume(path).perhaps:
        with Journal(path) as journal:
            journal.ended()


def _read(path: Path) -> tuple[Progress, int]:
    """What a file says, and how many of its bytes do."""
    progress = Progress()
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return progress, 0
    good = 0
    bad: int | None = None
    start = 0
    while start < len(content):
        end = content.find(b"\n", start)
        record = _record(content[start:end]) if end >= 0 else None
        end = len(content) if end < 0 else end + 1
        if record is None:
            bad = start if bad is None else bad
        elif bad is not None or (start == 0) != (record[0] == _FORMAT):
            where = start if bad is None else bad
            raise CorruptBackupError(
                f"Expected whole records in the journal {path}. Got one that is not as it was "
                f"written at byte {where}, with more after it. Put it back from a copy of its "
                "directory, with the snapshots of then; or, to begin anew, give another state "
                "directory"
            )
        else:
            _apply(progress, record)
            good = end
        start = end
    if not good and len(content) > _HEADER:
        raise CorruptBackupError(
            f"Expected a journal at {path}. Got a file of {len(content)} bytes that is none. Give "
            "the path of a journal, or of a file that there is not yet"
        )
    return progress, good


def _record(line: bytes) -> list[Any] | None:
    """The content of a line; None where it is not as it was written."""
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    return json.loads(text)


def _line(record: Any) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _apply(progress: Progress, record: Any) -> None:
    kind, *values = record
    if kind == "lease":
        token, key, batch = values
        progress.data.setdefault(key, DataProgress()).open[batch] = token
    elif kind == "push":
        progress.since += 1
        progress.asked += 1
    elif kind == "asked":
        progress.asked = 0
    elif kind == "done":
        key, batch = values
        progress.since += 1
        progress.asked += 1
        data = progress.data.setdefault(key, DataProgress())
        data.open.pop(batch, None)
        data.done.add(batch)
    elif kind == "data":
        key, below, above, opened = values
        progress.data[key] = DataProgress(Watermark(below, above), dict(opened))
    elif kind == "release":
        progress.data.pop(values[0], None)
    elif kind == "tokens":
        progress.next_token = values[0]
    elif kind == "lost":
        progress.lost_pushes = values[0]
    elif kind == "snapshot":
        progress.snapshot = values[0]
        progress.since, progress.asked = values[1:] or (progress.asked, progress.asked)
    elif kind == "mark":
        progress.mark = dict(values[0])
    elif kind == "logs":
        key, logs = values
        progress.logs[key] = logs
    elif kind == "ended":
        progress.ended = True
    elif kind == "perhaps":
        progress.perhaps = values[0]
    elif kind == _FORMAT:
        progress.job = values[0]


def _whole(key: str, data: DataProgress) -> tuple[Any, ...]:
    opened = [[batch, token] for batch, token in data.open.items()]
    return "data", key, data.done.below, sorted(data.done.above), opened


def _records(progress: Progress) -> Iterator[tuple[Any, ...]]:
    yield _FORMAT, progress.job
    yield "tokens", progress.next_token
    yield "lost", progress.lost_pushes
    yield "snapshot", progress.snapshot, progress.since, progress.asked
    yield "mark", progress.mark
    for key, logs in progress.logs.items():
        yield "logs", key, logs
    if progress.perhaps:
        yield "perhaps", True
    if progress.ended:
        yield ("ended",)
    for key, data in progress.data.items():
        yield _whole(key, data)


def _lock(path: Path) -> int:
    """Hold a job's journal against other processes, as long as this one lives."""
    file = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise BackupError(
            f"Expected to be the only coordinator with the journal {path}. Got another process "
            "that has it open. End that one, or give this job another state directory"
        ) from error
    return file
