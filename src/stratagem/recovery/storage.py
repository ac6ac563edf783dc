"""Numbered, checked, atomically committed states in a directory, on Orbax.

A state is a dict of arrays and a dict of facts. Orbax writes it under a temporary name and renames
it when it is complete, so that a crash while saving leaves the others as they were. What it does
not do is notice a byte that changed later: so the facts hold a checksum of every array as it was
in memory, and one of themselves.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import math
import re
import shutil
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from stratagem.errors import BackupError, CorruptBackupError

_PACK_BYTES = 64 << 20
_FORMAT = 1
# Ends of the names that Orbax gives to what it is writing, and we to what we are deleting.
_UNFINISHED = (".orbax-checkpoint-tmp", ".deleted")


class Storage:
    """The states in one directory, each with a number that is larger than those before it.

    One process (the chief) writes; no other process needs to see the directory.

    Args:
        directory: where; created at the first save.
        keep: how many states stay; None keeps all. The oldest go when a new one is complete.
        prefix: a state's name is the prefix and its number.
    """

    def __init__(self, directory: str | Path, keep: int | None = None, prefix: str = ""):
        self.directory = Path(directory).absolute()
        self.prefix = prefix
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._last: int | None = None
        self._path = self.directory
        self._bad: set[Path] = set()
        _files()  # now, rather than in the pause of the first save

    def path(self, number: int) -> Path:
        """Where the state of a number is."""
        return self.directory / f"{self.prefix}{number}"

    def numbers(self) -> list[int]:
        """Numbers of the states that were committed, the oldest first."""
        if not self.directory.is_dir():
            return []
        name = re.compile(re.escape(self.prefix) + r"(0|[1-9]\d*)")
        matches = (name.fullmatch(p.name) for p in self.directory.iterdir() if p.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def paths(self) -> list[Path]:
        """The states that were committed, the oldest first."""
        return [self.path(number) for number in self.numbers()]

    def check_writable(self) -> None:
        """Creates the directory, and removes what a crash left unfinished in it.

        Raises:
            BackupError: it cannot be created or written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f"{self.prefix}.deleted"
            probe.mkdir(exist_ok=True)
            self._remove_unfinished()
        except OSError as e:
            raise BackupError(
                f"Expected a directory that can be written to save in. Got {self.directory}: {e}. "
                "Name another one, or change its permissions."
            ) from e

    def _remove_unfinished(self) -> None:
        for path in self.directory.glob(f"{glob.escape(self.prefix)}*"):
            if path.is_dir() and any(suffix in path.name for suffix in _UNFINISHED):
                shutil.rmtree(path)

    def save(
        self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any], name: str | None = None
    ) -> Path:
        """Begins to write a state in a thread, once the one before it is written.

        Args:
            arrays: by name; not changed by anyone from now on.
            facts: what JSON can hold.
            name: instead of the prefix and the next number; what has that name is replaced.

        Returns:
            Where it will be.

        Raises:
            BackupError: the state before this one could not be written, or the directory cannot.
        """
        self.wait()
        if self._last is None:
            self.check_writable()
            self._last = max(self.numbers(), default=0)
        if name is None:
            self._last += 1
        self._path = self.path(self._last) if name is None else self.directory / name
        self._thread = threading.Thread(
            target=self._write, args=(self._path, dict(arrays), dict(facts)), name="stratagem-save"
        )
        self._thread.start()
        return self._path

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            BackupError: the last state could not be written; those before it are unharmed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise BackupError(
                f"Expected to write {self._path}. Got {type(failure).__name__}: {failure}. The "
                "states before it are unharmed. Look for a full disk, or a directory that was "
                "removed or made read-only."
            ) from failure

    def read(self, path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """A state's arrays and facts, as they were saved.

        Raises:
            CorruptBackupError: what was written cannot be read back as it was.
        """
        try:
            packs, sealed = _files().restore(path)
            content = _unsealed(sealed)
            return _unpacked(packs, content["arrays"]), content["facts"]
        # Damage shows as errors of many libraries.
        except Exception as e:
            reason = str(e).partition("\n")[0][:200] or "no more is known"
            raise CorruptBackupError(f"{path}: {type(e).__name__}: {reason}") from e

    def mark_bad(self, path: Path) -> None:
        """Lets a state that cannot be read go, when the next one is complete."""
        self._bad.add(path)

    def remove_all(self) -> None:
        """Deletes all states; the directory too, when nothing else is in it."""
        with contextlib.suppress(BackupError):  # what could not be written need not be deleted
            self.wait()
        for path in self.paths():
            self._remove(path)
        if self.directory.is_dir():
            self._remove_unfinished()
            with contextlib.suppress(OSError):  # somebody else's files are in it
                self.directory.rmdir()

    def _write(self, path: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
        try:
            packs, about = _packed(arrays)
            _files().save(path, packs, _sealed(about, facts))
            for old in self._outdated():
                self._remove(old)
        # Whatever it is, it is told to whoever waits.
        except Exception as e:
            self._failure = e

    def _outdated(self) -> set[Path]:
        paths = self.paths()
        bad = self._bad & set(paths)
        sound = [path for path in paths if path not in bad]
        return bad if self._keep is None else bad.union(sound[: -self._keep])

    def _remove(self, path: Path) -> None:
        doomed = path.with_name(path.name + _UNFINISHED[1])
        path.rename(doomed)  # so that nobody takes half of it for a state
        shutil.rmtree(doomed)


def _files() -> ModuleType:
    """What uses Orbax, whose import takes 0.4 s: for those who save or restore alone."""
    return importlib.import_module("stratagem.recovery.orbax_files")


def _packed(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The bytes of the arrays in few large arrays, and what it takes to find and check each.

    Orbax takes about as long for an array of ten bytes as for one of a megabyte, and models have
    hundreds of small ones. It stores no empty arrays, so each pack has a byte more than it needs.
    """
    packs: list[list[bytes | memoryview]] = []
    size, about = 0, {}
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if not packs or (size and size + len(data) > _PACK_BYTES):
            packs.append([])
            size = 0
        packs[-1].append(data)
        about[name] = [str(array.dtype), list(array.shape), zlib.crc32(data), len(packs) - 1, size]
        size += len(data)
    joined = {
        str(i): np.frombuffer(b"".join([*parts, b"\0"]), np.uint8) for i, parts in enumerate(packs)
    }
    return joined or {"0": np.zeros(1, np.uint8)}, about


def _sealed(about: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with what it takes to check them and the arrays."""
    content = {"format": _FORMAT, "facts": dict(facts), "arrays": dict(about)}
    return {"content": content, "checksum": _json_checksum(content)}


def _unsealed(sealed: dict[str, Any]) -> dict[str, Any]:
    content = sealed["content"]
    if _json_checksum(content) != sealed["checksum"]:
        raise ValueError("the facts do not have the checksum that was written with them")
    if content["format"] != _FORMAT:
        raise ValueError(f"it has format {content['format']}, this version reads {_FORMAT}")
    return content


def _unpacked(packs: dict[str, np.ndarray], about: dict[str, Any]) -> dict[str, np.ndarray]:
    arrays, bad = {}, []
    for name, (dtype, shape, checksum, pack, start) in about.items():
        kind = jnp.dtype(dtype)
        data = packs[str(pack)][start : start + math.prod(shape) * kind.itemsize]
        if zlib.crc32(data.data) != checksum:
            bad.append(name)
        else:
            arrays[name] = np.frombuffer(data.tobytes(), kind).reshape(shape)
    if bad:
        raise ValueError(f"arrays are not what was written: {', '.join(bad)}")
    return arrays


def _json_checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
