"""Consistent cuts of a whole job: all processes take part, the chief writes, all get it back."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from stratagem.cluster import runtime
from stratagem.errors import BackupError, CorruptBackupError
from stratagem.recovery import state
from stratagem.recovery.peers import Peers
from stratagem.recovery.storage import Storage

Groups = Mapping[str, Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Cut:
    """What was read back.

    Attributes:
        path: where it is, on the chief.
        arrays: by name.
        facts: what `Archive.save` was given.
        processes: what each process said of itself, by rank.
        entries: what describes the variables.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]
    processes: list[Any]
    entries: dict[str, list[state.Entry]]

    def check(self, groups: Groups) -> None:
        """Raises BackupMismatchError where the variables are others."""
        state.check(self.entries, groups, str(self.path))

    def apply(self, groups: Groups) -> None:
        """Gives the variables their values back; they were checked."""
        state.apply(self.entries, self.arrays, groups)

    @classmethod
    def of_this_process(
        cls, groups: Groups, facts: Mapping[str, Any], process: Any,
        arrays: Mapping[str, np.ndarray], value: Callable[[Any], Any],
    ) -> Cut:  # fmt: skip
        """A cut that asks no other process, for one that joins; arguments as `Archive.save`."""
        taken = {**state.snapshot(groups, value), **arrays}
        where = Path("the memory of another process")
        return cls(where, taken, dict(facts), [process], state.entries(groups, components=False))

    def packed(self) -> bytes:
        """All of it but the path, as bytes."""
        head = {
            "facts": self.facts,
            "processes": self.processes,
            "entries": described(self.entries),
            "arrays": {n: [str(a.dtype), a.shape] for n, a in self.arrays.items()},
        }
        text = json.dumps(head).encode()
        parts = [a.tobytes() for a in self.arrays.values()]
        return b"".join([len(text).to_bytes(8, "big"), text, *parts])

    @classmethod
    def unpacked(cls, data: bytes) -> Cut:
        """What `packed` was."""
        start = 8 + int.from_bytes(data[:8], "big")
        head = json.loads(data[8:start])
        arrays = {}
        for name, (kind, shape) in head["arrays"].items():
            dtype = jnp.dtype(kind)
            count = math.prod(shape)
            arrays[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
            start += count * dtype.itemsize
        where = Path("the memory of another process")
        return cls(where, arrays, head["facts"], head["processes"], as_entries(head["entries"]))


def described(entries: Mapping[str, Sequence[state.Entry]]) -> dict[str, Any]:
    """Entries as JSON can hold them."""
    return {name: [dataclasses.asdict(e) for e in group] for name, group in entries.items()}


def as_entries(found: Mapping[str, Any]) -> dict[str, list[state.Entry]]:
    """What `described` was given."""
    return {name: [state.Entry(**e) for e in group] for name, group in found.items()}


class Archive:
    """The cuts in one directory. Every process of the job makes the same calls on its own.

    Args:
        directory: where the chief writes; the others need not see it.
        keep: how many stay; None keeps all.
        peers: the processes of the job.
        prefix: of the names.
    """

    def __init__(self, directory: str | Path, keep: int | None, peers: Peers, prefix: str = ""):
        self.storage = Storage(directory, keep, prefix)
        self.peers = peers
        runtime.keep_compilations()  # the program that goes on from a backup compiles the same

    def prepare(self) -> None:
        """Finds out now whether the directory can be written.

        Raises:
            BackupError: it cannot; on every process.
        """
        if not self.peers.is_waiting:  # the others write there now
            self.peers.together(lambda: self._on_chief(self.storage.check_writable))

    def save(
        self, groups: Groups, facts: Mapping[str, Any], process: Any = None,
        arrays: Mapping[str, np.ndarray] | None = None, name: str | None = None,
        give: Callable[[], bytes] | None = None,
    ) -> Path:  # fmt: skip
        """Takes a cut, and begins to write it.

        What was written before it and failed is a warning: training goes on.

        Args:
            groups: variables by name.
            facts: what JSON can hold, the same on all processes.
            process: what this process says of itself, as JSON can hold it.
            arrays: more arrays, the same on all processes, by names without a slash.
            name: instead of the prefix and the next number.
            give: what a process that joins here needs; None where none can.

        Returns:
            Where it will be, on the chief.
        """

        def gather() -> list[Any]:
            waits = give is not None and self.peers.others_wait
            said = self.peers.gather([process, waits], "what a backup holds of each process")
            if any(waits for _, waits in said):
                self.peers.admit()
            return [process for process, _ in said]

        def take() -> tuple[list[Any], dict[str, np.ndarray], Any]:
            processes = gather()
            cut = {**state.snapshot(groups), **(arrays or {})}
            return processes, cut, described(state.entries(groups))

        processes, cut, about = self.peers.together(take, lambda _: gather(), give)
        if not self.peers.is_chief:
            return self.storage.directory
        try:
            self.storage.wait()
        except BackupError as e:
            warnings.warn(str(e), RuntimeWarning, stacklevel=3)
        content = {"facts": dict(facts), "processes": processes, "entries": about}
        return self.storage.save(cut, content, name)

    def wait(self) -> None:
        """Returns when the last cut is written.

        Raises:
            BackupError: it could not be; on every process.
        """
        self.peers.together(lambda: self._on_chief(self.storage.wait))

    def load(self, path: Path | None = None) -> Cut | None:
        """Reads the newest cut, or the one before it where that is damaged, and so on.

        Args:
            path: reads this one and no other.

        Returns:
            None when there is none. A RuntimeWarning names each damaged one that was passed over.

        Raises:
            BackupError: all are damaged (CorruptBackupError: the one asked for); on every process.
        """
        return self.peers.together(lambda: self._load(path))

    def _load(self, path: Path | None) -> Cut | None:
        found: list[Any] = []
        self._on_chief(lambda: found.append(self._newest(path)))
        mine = found[0] if found else None
        newest = self.peers.from_chief(mine and str(mine[0]), "which backup is restored")
        if newest is None:
            return None
        arrays, content = self._share(Path(newest), mine)
        entries = as_entries(content["entries"])
        return Cut(Path(newest), arrays, content["facts"], content["processes"], entries)

    def remove_all(self) -> None:
        """Deletes all cuts. The chief does it."""
        self.peers.together(lambda: self._on_chief(self.storage.remove_all))

    def _newest(self, wanted: Path | None) -> tuple[Path, Any, Any] | None:
        damaged: dict[Path, str] = {}
        for path in [wanted] if wanted is not None else reversed(self.storage.paths()):
            try:
                arrays, content = self.storage.read(path)
            except CorruptBackupError as e:
                if wanted is not None:
                    raise
                damaged[path] = str(e)
            else:
                self._pass_over(damaged, path)
                return path, arrays, content
        if damaged:
            raise BackupError(
                f"Expected a backup that can be read in {self.storage.directory}. Got "
                f"{len(damaged)}, all damaged:\n" + "\n".join(f"  {e}" for e in damaged.values())
                + "\nNothing was deleted. Restore the files from elsewhere, or move the directory "
                "away (or name another one) to start anew."
            )  # fmt: skip
        return None

    def _pass_over(self, damaged: Mapping[Path, str], used: Path) -> None:
        if not damaged:
            return
        for path in damaged:
            self.storage.mark_bad(path)
        warnings.warn(
            f"Damaged, and not used: {'; '.join(damaged.values())}. Going on with {used}, which is "
            "older.",
            RuntimeWarning,
            stacklevel=5,
        )

    def _share(self, path: Path, mine: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The chief's arrays and content; read from the directory by those who see it."""
        if self.peers.size == 1:
            return mine[1], mine[2]
        content = self.peers.from_chief(mine and mine[2], "a backup's content")
        if mine is None:
            try:
                mine = path, *self.storage.read(path)
            except CorruptBackupError:  # this process does not see the chief's directory
                pass
        complete = mine is not None and mine[2] == content
        if all(self.peers.gather(complete, "who sees the backup's directory")):
            return mine[1], content
        sent = mine[1] if self.peers.is_chief else {}
        about = self.peers.from_chief(
            {n: [str(a.dtype), a.shape] for n, a in sent.items()}, "a backup's arrays"
        )
        arrays = {}
        for name, (dtype, shape) in about.items():
            own = sent[name].tobytes() if self.peers.is_chief else b""
            data = self.peers.bytes_from_chief(own, "a backup's arrays")
            arrays[name] = np.frombuffer(data, jnp.dtype(dtype)).reshape(shape)
        return arrays, content

    def _on_chief(self, action: Any) -> None:
        """What the chief does; the others fail as it fails."""
        failure: BackupError | None = None
        if self.peers.is_chief:
            try:
                action()
            except BackupError as e:
                failure = e
        said = self.peers.from_chief(failure and str(failure), "the outcome of a backup")
        if failure is not None:
            raise failure
        if said is not None:
            raise BackupError(f"On the chief: {said}")
