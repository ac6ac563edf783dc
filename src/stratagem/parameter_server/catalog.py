"""Which variables a snapshot has, in a file beside it: a restarted coordinator reads it first."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from stratagem.errors import CorruptBackupError
from stratagem.parameter_server import files
from stratagem.parameter_server.plan import Spec

_NAME = re.compile(r"(\d+)-variables\.json")


def write(directory: Path, number: int, specs: Sequence[Spec]) -> None:
    """Says what a snapshot has, before it is written."""
    directory.mkdir(parents=True, exist_ok=True)
    files.replace(_path(directory, number), json.dumps([spec.wire() for spec in specs]))


def read(directory: Path, number: int) -> list[Spec]:
    """The variables of a snapshot, in the order in which they were made.

    Raises:
        CorruptBackupError: there is no such file, or it is not as it was written.
    """
    path = _path(directory, number)
    try:
        return [Spec.from_wire(wire) for wire in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise CorruptBackupError(
            f"{path}: expected the variables of snapshot {number}. Got {type(error).__name__}: "
            f"{error}. Name the state directory of the job, or an empty one to begin anew."
        ) from error


def numbers(directory: Path) -> list[int]:
    """Numbers of the snapshots that anything is said of, the oldest first."""
    names = os.listdir(directory) if directory.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def prune(directory: Path, before: int) -> None:
    """Removes what is said of snapshots before a number."""
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match and int(match[1]) < before:
            (directory / name).unlink(missing_ok=True)


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number}-variables.json"
