"""A server's rows from a snapshot of any number of servers, however its tables were cut."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import BackupError, BackupMismatchError, CorruptBackupError
from stratagem.parameter_server import snapshot
from stratagem.parameter_server.applied import Applied, Tokens
from stratagem.parameter_server.block import Block
from stratagem.parameter_server.dtypes import dtype_of
from stratagem.parameter_server.jobs import Steps
from stratagem.parameter_server.plan import Spec, Unit
from stratagem.parameter_server.store import Store

_ADVICE = "Put the file back from a copy; or, to begin anew, give another state directory."


def restoring(
    store: Store,
    directory: Path,
    number: int,
    job: str,
    specs: Sequence[Spec],
    units: Sequence[Unit],
) -> Steps:
    """Fills a store that is empty, as a job of `jobs.Jobs`; it returns what it read, as a dict.

    Where the rows come from several servers, a closure counts as applied if it was on any of them:
    it is never applied twice to a row, but perhaps to some of its rows not at all. That is so only
    for closures that were at work when the snapshot was taken.

    Args:
        store: of a server; empty.
        directory: where the files of all servers are whose rows are needed.
        number: of the snapshot.
        job: whose it must be.
        specs: the variables as they are placed now.
        units: their updates.

    Raises:
        BackupError: rows are missing in all files.
        CorruptBackupError: a file is not as it was written.
        BackupMismatchError: it has other variables under these numbers, or is of another job.
    """
    found = _manifests(directory, number, job)
    arrays: dict[tuple[int, int], np.ndarray] = {}
    used: set[int] = set()
    for spec in store.check_new(specs):
        for index in spec.blocks_on(store.server):
            array = np.empty(spec.shard_shape(index), dtype_of(spec.dtype))
            arrays[spec.vid, index] = array
            shard = Block(array, spec.shards[index].start)
            sources = _sources(found, spec, shard, directory, number)
            for content, piece, start, stop in sources:
                used.add(content["server"])
                path = snapshot.path_of(directory, number, content["server"], "data")
                yield from _read(path, piece, content["piece_bytes"], shard, start, stop)
    store.keep(specs, arrays)
    for spec in specs:
        if spec.dynamic is not None and spec.beside is None:
            yield from _read_table(store, spec, found, directory, number, used)
    store.install(units)
    facts = [c for c in found if c["server"] in used]
    own = [c for c in found if c["server"] == store.server]
    _count(store, own if used <= {store.server} and own else facts)
    return {"number": number, "version": store.version}


def _read_table(
    store: Store, spec: Spec, found: Sequence[Any], directory: Path, number: int, used: set[int]
) -> Iterator[None]:
    """Takes in the ids of a dynamic table that are this server's: buckets move as a whole."""
    _check_same(found, spec, directory, number)
    there = [s for c in found for s in c["specs"] if s["vid"] == spec.vid]
    servers = {len(s["shards"]) for s in there}
    files = [c for c in found if servers != {len(spec.shards)} or c["server"] == store.server]
    missing = max(servers, default=1) - len(found)
    if not files or (missing > 0 and servers != {len(spec.shards)}):
        raise BackupError(
            f"dynamic table {spec.name!r}: expected its rows in snapshot {number} in {directory}, "
            f"of {servers} servers. Got files of servers {[c['server'] for c in found]}. Put the "
            "files of all servers there."
        )
    for content in files:
        used.add(content["server"])
        path = snapshot.path_of(directory, number, content["server"], "data")
        for vid, columns in content["tables"]:
            if vid == spec.vid:
                arrays = [_read_column(path, *column[1:]) for column in columns]
                names = [column[0] for column in columns]
                store.tables.fill(vid, names, arrays, store.server)
                yield


def _read_column(
    path: Path, dtype: str, shape: Sequence[int], offset: int, checksum: int
) -> np.ndarray:
    array = np.empty(shape, dtype_of(dtype))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(array.nbytes)
    except OSError as e:
        raise CorruptBackupError(
            f"{path}: expected to read it. Got {type(e).__name__}: {e}. {_ADVICE}"
        ) from e
    if len(data) != array.nbytes or zlib.crc32(data) != checksum:
        raise CorruptBackupError(
            f"{path}: expected rows of a dynamic table as they were written. Got other bytes. "
            f"{_ADVICE}"
        )
    return np.frombuffer(data, array.dtype).reshape(shape)


def _count(store: Store, facts: Sequence[Mapping[str, Any]]) -> None:
    store.applied, store.tokens = Applied(), Tokens()
    store.version = max((c["version"] for c in facts), default=0)
    store.rounds.committed = max((c["committed"] for c in facts), default=-1)
    for content in facts:
        store.applied.merge(Applied.from_wire(content["applied"]))
        store.tokens.merge(Tokens.from_wire(content["tokens"]))


def _manifests(directory: Path, number: int, job: str) -> list[Any]:
    """The content of all servers' manifests of a snapshot."""
    paths = sorted(directory.glob(f"{number}-ps*.json"))
    if not paths:
        raise BackupError(
            f"Expected snapshot {number} in {directory}. Got none: there are "
            f"{snapshot.numbers(directory)}. Give all servers the same directory, or one that has "
            "the files of all."
        )
    found = []
    for path in paths:
        try:
            sealed = json.loads(path.read_text())
            content = sealed["content"]
            text = json.dumps(content, sort_keys=True)
            if zlib.crc32(text.encode()) != sealed["checksum"]:
                raise ValueError("it does not have the checksum that was written with it")
            if content["format"] != snapshot.FORMAT:
                raise ValueError(
                    f"it has format {content['format']}, this version reads {snapshot.FORMAT}"
                )
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise CorruptBackupError(
                f"{path}: expected what was written. Got {type(e).__name__}: {e}. {_ADVICE}"
            ) from e
        if content["job"] != job:
            raise BackupMismatchError(
                f"{path}: expected a snapshot of the job {job!r}. Got one of {content['job']!r}. "
                "Name its directory, or begin anew in an empty one."
            )
        found.append(content)
    return found


def _sources(
    found: Sequence[Any], spec: Spec, shard: Block, directory: Path, number: int
) -> Iterator[tuple[Any, Any, int, int]]:
    """Which rows of which pieces make up a shard."""
    _check_same(found, spec, directory, number)
    pieces = [
        (piece["start"], piece["stop"], content, piece)
        for content in found
        for piece in content["pieces"]
        if piece["vid"] == spec.vid
    ]
    at = shard.start
    for start, stop, content, piece in sorted(pieces, key=lambda p: p[:2]):
        if start <= at < stop and at < shard.stop:
            yield content, piece, at, min(stop, shard.stop)
            at = min(stop, shard.stop)
    if at < shard.stop:
        raise BackupError(
            f"variable {spec.name!r}: expected rows up to {shard.stop} in snapshot {number} in "
            f"{directory}. Got none from {at} on, in the files of servers "
            f"{[c['server'] for c in found]}. Put the files of all servers there."
        )


def _check_same(found: Sequence[Any], spec: Spec, directory: Path, number: int) -> None:
    """Raises BackupMismatchError for a variable that is another one in a snapshot."""
    same = {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype}
    for content in found:
        for there in content["specs"]:
            if there["vid"] == spec.vid and any(there[n] != x for n, x in same.items()):
                raise BackupMismatchError(
                    f"variable {spec.vid}: expected {spec.name!r}, {spec.dtype}{list(spec.shape)}. "
                    f"Got {there['name']!r}, {there['dtype']}{there['shape']} in snapshot {number} "
                    f"in {directory}. Restore into the program that wrote it."
                )


def _read(
    path: Path, piece: Mapping[str, Any], size: int, shard: Block, start: int, stop: int
) -> Iterator[None]:
    """Copies rows from a file to a shard, checking all that it reads."""
    dtype, shape = dtype_of(piece["dtype"]), piece["shape"]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    rows_of_one = max(1, size // max(1, row_bytes))
    first = (start - piece["start"]) // rows_of_one
    last = -(-(stop - piece["start"]) // rows_of_one)
    try:
        with path.open("rb", buffering=0) as file:
            for i in range(first, last):
                low = piece["start"] + i * rows_of_one
                high = min(piece["stop"], low + rows_of_one)
                data = bytearray((high - low) * row_bytes)
                file.seek(piece["offset"] + (low - piece["start"]) * row_bytes)
                got = file.readinto(data)
                if got != len(data) or zlib.crc32(data) != piece["checksums"][i]:
                    raise CorruptBackupError(
                        f"{path}: expected rows {low} to {high} of variable {piece['vid']} as they "
                        f"were written. Got other bytes. {_ADVICE}"
                    )
                rows = np.frombuffer(data, dtype).reshape(high - low, *shape[1:])
                a, b = max(low, start), min(high, stop)
                values = rows[a - low : b - low]
                shard.write(a - shard.start, values if shape else values.reshape(()))
                yield
    except OSError as e:
        raise CorruptBackupError(
            f"{path}: expected to read it. Got {type(e).__name__}: {e}. {_ADVICE}"
        ) from e
