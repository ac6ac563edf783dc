"""A server's state in files, while it goes on serving.

The cut is exact: rows that change before they are copied are put aside first, so that the files
hold the state at the moment when the snapshot began, and the numbers of the pushes applied then.
The server's thread only copies, a piece at a time; a thread writes.

A snapshot is `<number>-ps<server>.data`, the shards one behind the other, each from a multiple of
64 bytes on, so that NumPy can map it; and `<number>-ps<server>.json`, which says what is where, and
has checksums of all. The latter comes last, by a rename: without it there is no snapshot.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import BackupError
from stratagem.parameter_server import files
from stratagem.parameter_server.block import Block
from stratagem.parameter_server.jobs import Steps
from stratagem.parameter_server.store import Rows, Store

FORMAT = 1
PIECE_BYTES = 2 << 20
"""How much has one checksum, and is copied at a time."""

_ALIGNMENT = 64
_BEHIND = 4  # pieces that wait for the writer; then copying waits
_NAME = re.compile(r"(\d+)-ps(\d+)\.(json|data)(\.tmp)?")


@dataclass(frozen=True)
class Written:
    """What a snapshot is.

    Attributes:
        number: of it.
        nbytes: of the data.
        version: how many pushes were applied when it began.
    """

    number: int
    nbytes: int
    version: int


def path_of(directory: Path, number: int, server: int, ending: str = "json") -> Path:
    """Where a server's part of a snapshot is."""
    return directory / f"{number}-ps{server}.{ending}"


def numbers(directory: Path, server: int | None = None) -> list[int]:
    """Numbers of the snapshots of a server, or of any, the oldest first."""
    found = set()
    for name in os.listdir(directory) if directory.is_dir() else ():
        match = _NAME.fullmatch(name)
        if match and match[3] == "json" and not match[4] and server in (None, int(match[2])):
            found.add(int(match[1]))
    return sorted(found)


def taking(store: Store, directory: Path, number: int, job: str, keep_from: int) -> Steps:
    """Writes a snapshot, as a job of `jobs.Jobs`; it returns a `Written`.

    Args:
        store: whose state.
        directory: where; created if need be.
        number: larger than that of any before it.
        job: whose state it is.
        keep_from: when it is complete, those before this number are removed; it keeps itself.

    Raises:
        BackupError: it cannot be written; those before it are unharmed.
    """
    facts = _facts(store, number, job)
    data = path_of(directory, number, store.server, "data")
    writer = _Writer(data)
    cut = _Cut(store)
    try:
        yield writer.open()
        pieces = []
        for key, block in cut.blocks:
            checksums: list[Future[int]] = []
            pieces.append((key, block, writer.align(), checksums))
            step = max(1, PIECE_BYTES // max(1, block.row_bytes))
            for first in range(0, block.stop - block.start, step):
                while writer.behind() >= _BEHIND:
                    yield writer.oldest()
                checksums.append(writer.put(cut.take(key, block, first, step)))
                yield None
        tables = []
        for vid, (names, arrays) in cut.tables.content():
            while writer.behind() >= _BEHIND:
                yield writer.oldest()
            named = zip(names, arrays, strict=True)
            tables.append((vid, [(n, a, writer.align(), writer.put(a)) for n, a in named]))
            yield None
        yield writer.sync()
        facts["tables"] = [[vid, [_column(*c) for c in columns]] for vid, columns in tables]
        facts["bytes"] = writer.nbytes
        facts["pieces"] = [_piece(*piece) for piece in pieces]
        yield writer.submit(lambda: _commit(directory, number, store.server, facts, keep_from))
    except OSError as e:
        raise BackupError(
            f"ps {store.server}: expected to write snapshot {number} to {directory}. Got "
            f"{type(e).__name__}: {e}. Those before it are unharmed. Look for a full disk, or a "
            "directory that was removed or made read-only."
        ) from e
    finally:
        cut.close()
        writer.close()
    return Written(number, writer.nbytes, facts["version"])


def sealed(content: Mapping[str, Any]) -> str:
    """JSON with a checksum of it."""
    text = json.dumps(content, sort_keys=True)
    return json.dumps({"checksum": zlib.crc32(text.encode()), "content": content}, sort_keys=True)


def _facts(store: Store, number: int, job: str) -> dict[str, Any]:
    return {
        "format": FORMAT, "number": number, "server": store.server, "job": job,
        "version": store.version, "applied": store.applied.wire(), "tokens": store.tokens.wire(),
        "committed": store.rounds.committed, "piece_bytes": PIECE_BYTES,
        "specs": [spec.wire() for spec in store.specs.values()],
    }  # fmt: skip


def _piece(
    key: tuple[int, int], block: Block, offset: int, checksums: Sequence[Future[int]]
) -> dict[str, Any]:
    return {
        "vid": key[0], "shard": key[1], "start": block.start, "stop": block.stop, "offset": offset,
        "dtype": block.array.dtype.name, "shape": list(block.array.shape),
        "checksums": [checksum.result() for checksum in checksums],
    }  # fmt: skip


def _column(name: str | int, array: np.ndarray, offset: int, checksum: Future[int]) -> list[Any]:
    return [name, array.dtype.name, list(array.shape), offset, checksum.result()]


def _commit(
    directory: Path, number: int, server: int, facts: Mapping[str, Any], keep_from: int
) -> None:
    files.replace(path_of(directory, number, server), sealed(facts))
    for name in sorted(os.listdir(directory), reverse=True):  # manifests before their data
        match = _NAME.fullmatch(name)
        if match and int(match[1]) < min(keep_from, number):
            # Another server may remove it at the same time.
            (directory / name).unlink(missing_ok=True)


class _Cut:
    """The state of a store at one moment, copied later."""

    def __init__(self, store: Store):
        if store.before_write is not None:
            raise BackupError(
                f"ps {store.server}: expected one snapshot at a time. Got a second one. Ask again "
                "when the first is complete."
            )
        self.blocks = list(store.blocks.items())
        self.tables = store.tables.cut(PIECE_BYTES)
        self._at = dict.fromkeys(store.blocks, 0)  # rows before these are copied
        self._aside: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
        self._saved: dict[tuple[int, int], np.ndarray] = {}
        self._store = store
        store.before_write = self._before_write

    def take(self, key: tuple[int, int], block: Block, first: int, count: int) -> np.ndarray:
        """A copy of rows as they were, which count as copied then."""
        if not block.array.ndim:
            found = self._aside.pop(key, None)
            self._at[key] = 1
            return found[0][1] if found else block.array.copy()
        piece = Block(block.array[first : first + count].copy())
        stop = first + len(piece.array)
        left = []
        for rows, values in self._aside.get(key, ()):
            low, high = np.searchsorted(rows, (first, stop))
            if high > low:
                piece.put(rows[low:high] - first, values[low:high])
            if high < len(rows):
                left.append((rows, values))
        self._at[key] = stop
        if stop < len(block.array):
            self._aside[key] = left
        else:
            self._aside.pop(key, None)
            self._saved.pop(key, None)
        return piece.array

    def close(self) -> None:
        """The store need not tell any more what changes."""
        self._store.before_write = None
        self.tables.close()

    def _before_write(self, vid: int, shard: int, rows: Rows) -> None:
        key = vid, shard
        block = self._store.blocks[key]
        at = self._at.get(key)
        if at is None or at >= block.stop - block.start:
            return  # it is new, or copied
        if not block.array.ndim:
            self._aside.setdefault(key, [(np.zeros(1, np.int64), block.array.copy())])
            return
        if key not in self._saved:
            self._saved[key] = np.zeros(len(block.array), bool)
        saved = self._saved[key]
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(block.array))
            new = np.arange(max(start, at), stop)
        else:
            new = rows if bool((rows[1:] > rows[:-1]).all()) else np.unique(rows)
            new = new[np.searchsorted(new, at) :]
        new = new[~saved[new]]
        if len(new):
            saved[new] = True
            self._aside.setdefault(key, []).append((new, block.take(new)))


class _Writer:
    """Writes pieces to a file one after the other, in a thread."""

    def __init__(self, path: Path):
        self.nbytes = 0
        self._path = path
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stratagem-snapshot")
        self._waiting: list[Future[Any]] = []
        self._file: Any = None

    def open(self) -> Future[None]:
        """Begins; the directory is made if need be."""

        def run() -> None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb", buffering=0)

        return self.submit(run)

    def align(self) -> int:
        """Begins a shard; where that is."""
        if padding := -self.nbytes % _ALIGNMENT:
            self.put(np.zeros(padding, np.uint8))
        return self.nbytes

    def put(self, array: np.ndarray) -> Future[int]:
        """Writes a piece that nobody changes; its checksum."""
        self.nbytes += array.nbytes

        def run() -> int:
            left = array.reshape(-1).view(np.uint8).data
            checksum = zlib.crc32(left)
            while left:
                left = left[self._file.write(left) :]
            return checksum

        return self.submit(run)

    def behind(self) -> int:
        """How many pieces wait."""
        self._waiting = [future for future in self._waiting if not future.done()]
        return len(self._waiting)

    def oldest(self) -> Future[Any]:
        """The one that is written now."""
        return self._waiting[0]

    def submit(self, work: Any) -> Future[Any]:
        """Does something after what was put."""
        future = self._pool.submit(work)
        self._waiting.append(future)
        return future

    def sync(self) -> Future[None]:
        """Waits until the disk has it."""

        def run() -> None:
            os.fsync(self._file.fileno())
            if (size := os.fstat(self._file.fileno()).st_size) != self.nbytes:
                raise OSError(f"{self._path} has {size} of {self.nbytes} bytes")

        return self.submit(run)

    def close(self) -> None:
        """Ends the thread, when it has written what waits."""
        self._pool.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()
