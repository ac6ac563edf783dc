"""Checkpoint and CheckpointManager, as TensorFlow has them in tf.train."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from stratagem.recovery import state
from stratagem.recovery.archive import Archive
from stratagem.recovery.backup import check_keep
from stratagem.recovery.peers import Peers

_COUNTER = "save_counter"
_NUMBERED = re.compile(r"(.*-)(\d+)")


class Checkpoint:
    """Objects whose variables are saved and restored together; they are its attributes too.

    Every process of a job makes the same calls; the chief writes. Unlike in TensorFlow, variables
    must exist when they are restored: build models before. (Optimizers are built here, where their
    model is known.)

    Args:
        objects: models, layers, optimizers, metrics, variables, and lists and dicts of them.
    """

    def __init__(self, **objects: Any):
        state.collect(**objects)
        self._objects = dict(objects)
        self._counter = counter(_COUNTER)
        for name, thing in objects.items():
            setattr(self, name, thing)

    @property
    def save_counter(self) -> Any:
        """A variable: how often `save` was called, restored with the rest."""
        return self._counter

    def track(self, name: str, thing: Any) -> None:
        """Adds an object."""
        state.collect(**{name: thing})
        self._objects[name] = thing
        setattr(self, name, thing)

    def save(self, file_prefix: str | Path, options: Any = None) -> str:
        """Writes a new numbered checkpoint; returns when it is complete.

        Args:
            file_prefix: such as "/dir/ckpt".
            options: accepted for TF's sake.

        Returns:
            Its path, such as "/dir/ckpt-3".

        Raises:
            BackupError: it cannot be written; on every process.
        """
        del options
        self._counter.assign_add(1)
        return self.write(f"{file_prefix}-{int(np.asarray(self._counter.value))}")

    def write(self, file_prefix: str | Path, options: Any = None) -> str:
        """Writes a checkpoint at exactly this path, replacing what is there; else as `save`."""
        del options
        path = Path(file_prefix).absolute()
        archive = _archive(path.parent, None)
        archive.save(self.groups(), {}, name=path.name)
        archive.wait()
        return str(path)

    def restore(self, save_path: str | Path | None, options: Any = None) -> Status:
        """Gives the variables the values of a checkpoint; of None: changes nothing.

        Raises:
            BackupMismatchError: it is of other variables; lists every difference.
            CorruptBackupError: it is missing or damaged.
        """
        del options
        if save_path is None:
            return Status()
        path = Path(save_path).absolute()
        self.restore_from(_archive(path.parent, None), path)
        return Status()

    read = restore

    def restore_from(self, archive: Archive, path: Path | None = None) -> Path | None:
        """Restores from an archive: a path in it, or its newest that is sound."""
        cut = archive.load(path)
        if cut is None:
            return None
        groups = self.groups()
        cut.check(groups)
        cut.apply(groups)
        return cut.path

    def groups(self) -> dict[str, list[Any]]:
        """The variables by the names of the objects."""
        state.build_optimizers(**self._objects)
        return state.collect(**{**self._objects, _COUNTER: self._counter})


class Status:
    """What `restore` returns, in TensorFlow's shape; it is only returned when all matched."""

    def assert_consumed(self) -> Status:
        """Holds already: a difference is an error in `restore`."""
        return self

    assert_existing_objects_matched = assert_consumed
    assert_nontrivial_match = assert_consumed
    expect_partial = assert_consumed


class CheckpointManager:
    """Numbered checkpoints in a directory, of which the newest stay.

    Args:
        checkpoint: what is saved.
        directory: where the chief writes.
        max_to_keep: how many stay; None keeps all.
        checkpoint_name: prefix of their names.
        step_counter: a variable, whose value `checkpoint_interval` looks at.
        checkpoint_interval: `save` does nothing until the counter has grown by so much.
        init_fn: called by `restore_or_initialize` when there is nothing to restore.

    Raises:
        ValueError: `max_to_keep` is below 1, or an interval has no counter.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | Path,
        max_to_keep: int | None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
    ):
        if max_to_keep is not None:
            check_keep(max_to_keep)
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                f"Expected a step_counter with checkpoint_interval={checkpoint_interval}. Got "
                "none. Pass the variable that counts the steps."
            )
        self.checkpoint = checkpoint
        self._archive = _archive(directory, max_to_keep, f"{checkpoint_name}-")
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._last_step: int | None = None

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._archive.storage.directory)

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints, the oldest first; the chief's view. Every process calls it."""
        found = [str(path) for path in self._archive.storage.paths()]
        return self._archive.peers.from_chief(found, "the list of checkpoints")

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint, None when there is none. Every process calls it."""
        return next(reversed(self.checkpoints), None)

    def save(
        self, checkpoint_number: Any = None, check_interval: bool = True, options: Any = None
    ) -> str | None:
        """Writes a checkpoint; returns when it is complete. Every process calls it.

        Args:
            checkpoint_number: an int or a variable; by default the checkpoint's save counter.
            check_interval: False saves whatever the interval says.
            options: accepted for TF's sake.

        Returns:
            Its path; None when the interval has not passed.

        Raises:
            BackupError: it cannot be written.
        """
        del options
        step = None if self._step_counter is None else _number(self._step_counter)
        if check_interval and self._interval is not None and step is not None:
            if self._last_step is not None and step < self._last_step + self._interval:
                return None
        self._last_step = step
        self.checkpoint.save_counter.assign_add(1)
        number = self.checkpoint.save_counter if checkpoint_number is None else checkpoint_number
        storage = self._archive.storage
        name = f"{storage.prefix}{_number(number)}"
        self._archive.save(self.checkpoint.groups(), {}, name=name)
        self._archive.wait()
        return str(storage.directory / name)

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint that is sound; where there is none, calls `init_fn`.

        Returns:
            The path of what was restored, or None.

        Raises:
            BackupError: there are checkpoints, and all are damaged.
            BackupMismatchError: it is of other variables.
        """
        path = self.checkpoint.restore_from(self._archive)
        if path is not None:
            return str(path)
        if self._init_fn is not None:
            self._init_fn()
        return None


def latest_checkpoint(checkpoint_dir: str | Path, latest_filename: Any = None) -> str | None:
    """Path of the checkpoint in a directory that was written last, as this process sees it."""
    del latest_filename
    directory = Path(checkpoint_dir).absolute()
    if not directory.is_dir():
        return None
    found = [p for p in directory.iterdir() if p.is_dir() and _NUMBERED.fullmatch(p.name)]
    newest = max(found, key=lambda p: (p.stat().st_mtime_ns, _index(p)), default=None)
    return None if newest is None else str(newest)


def counter(name: str) -> Any:
    """A variable that counts from 0, the same on all replicas."""
    return keras.Variable(0, dtype="int32", trainable=False, name=name)


def _index(path: Path) -> int:
    match = _NUMBERED.fullmatch(path.name)
    return int(match[2]) if match else -1


def _number(value: Any) -> int:
    return int(np.asarray(value.value if isinstance(value, keras.Variable) else value))


def _archive(directory: str | Path, keep: int | None, prefix: str = "") -> Archive:
    # Not by directory: in TensorFlow's tutorials each worker names one of its own.
    peers = Peers.of_this_process("checkpoints")
    return Archive(directory, keep, peers, prefix)
