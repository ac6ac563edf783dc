"""What a job with parameter servers has around it: a key, and a directory for its state."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stratagem.cluster.keys import VARIABLE as KEY
from stratagem.cluster.keys import Key
from stratagem.coordinator import journal
from stratagem.coordinator.record import NAME as JOURNAL
from stratagem.errors import BackupError
from stratagem.launcher.abstract import STATE_DIR, LaunchError

_PREFIX = "stratagem-"


@dataclass
class Surroundings:
    """The environment of the launcher of a job, and how the job went.

    Args:
        environment: the variables that tasks inherit.
        succeeded: set it to True when the job has: then its temporary directory is removed, and
            the journal in another one says that the job is done.
    """

    environment: Mapping[str, str]
    succeeded: bool = False


@contextmanager
def surroundings(
    environment: Mapping[str, str],
    state: Path | None,
    say: Callable[[str], None],
    *,
    machines: int = 1,
) -> Iterator[Surroundings]:
    """Gives a job a key of its own, if the user has none, and a directory.

    A temporary directory is removed at the end, but kept where there is something in it and the job
    did not succeed. The key is in the environment of the tasks, and nowhere else.

    Args:
        environment: the variables of this process.
        state: the directory; None for that in `STRATAGEM_STATE_DIR`, else a temporary one.
        say: is told where a directory is kept.
        machines: on how many of them this is done, each for itself.

    Raises:
        LaunchError: the key is too short, or missing where several machines must have the same; or
            the directory cannot be made.
    """
    told = dict(environment)
    told |= _key(environment, machines)
    given = state or (Path(environment[STATE_DIR]) if environment.get(STATE_DIR) else None)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX)) if given is None else _made(given)
    told[STATE_DIR] = str(directory)
    around = Surroundings(told)
    try:
        yield around
    finally:
        if given is None:
            if around.succeeded or not any(directory.iterdir()):
                shutil.rmtree(directory, ignore_errors=True)
            else:
                say(f"kept what the job had saved; go on from it with --state-dir {directory}")
        elif around.succeeded:
            _note_end(directory, say)


def _key(environment: Mapping[str, str], machines: int) -> dict[str, str]:
    try:
        key = Key.of(environment)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    if key.secret:
        return {}
    if machines > 1:
        raise LaunchError(
            f"--hosts with --ps: expected {KEY} in the environment, the same on all {machines} "
            "machines, for workers and servers listen only for those who know it. Got none. Make "
            "one with `openssl rand -hex 32`, and set it on each machine before the command."
        )
    return {KEY: secrets.token_hex(32)}


def _note_end(directory: Path, say: Callable[[str], None]) -> None:
    try:
        journal.succeeded(directory / JOURNAL)
    except BackupError as error:
        say(f"could not note that the job is done, and its program would go on with it: {error}")


def _made(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"--state-dir: expected a directory, or a place where one can be made. Got {directory}"
            f": {error.strerror}. Give another one, on a disk that stays."
        ) from error
    return directory.resolve()
