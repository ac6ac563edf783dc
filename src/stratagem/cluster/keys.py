"""The key of a job: who knows it may take part. Without one, whoever reaches the job's ports may.

What moves a job's data (`transport`) always has a key: without one of the job it takes one of the
user, kept in a file, with which it uses this machine alone.

Who listens sends a challenge, a number used once; who connects answers with a number of its own
and an HMAC (RFC 2104) of both and of what it says; what it hears back carries one too, so that each
end knows that the other has the key. The key itself never travels. It keeps strangers out; it does
not hide what is said, nor what JAX and Gloo send, from who can read the network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "STRATAGEM_CLUSTER_KEY"
FILE_VARIABLE = "STRATAGEM_CLUSTER_KEY_FILE"
_LEAST_CHARACTERS = 16


@dataclass(frozen=True)
class Key:
    """A secret that all tasks of a job share; empty where there is none.

    Args:
        secret: the key.
        users: whether it is the one of the user, for programs on this machine.

    Raises:
        ValueError: it is so short that it can be guessed from one answer.
    """

    secret: str = field(default="", repr=False)
    users: bool = False

    def __post_init__(self) -> None:
        if self.secret and len(self.secret) < _LEAST_CHARACTERS:
            raise ValueError(
                f"{VARIABLE}: expected at least {_LEAST_CHARACTERS} characters. Got "
                f"{len(self.secret)}. Make one with `openssl rand -hex 32`, and give it to all "
                "tasks."
            )

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Key:
        """The key in some environment variables, or in the file that they name.

        Raises:
            ValueError: both are there, the file cannot be read, or the key is too short.
        """
        secret, named = environment.get(VARIABLE, ""), environment.get(FILE_VARIABLE, "")
        if not named:
            return cls(secret)
        if secret:
            raise ValueError(
                f"Expected {VARIABLE} or {FILE_VARIABLE}. Got both. Unset one of them."
            )
        return cls(_read(Path(named), f"{FILE_VARIABLE}: "))

    @classmethod
    def always(cls, environment: Mapping[str, str]) -> Key:
        """The key in some environment variables, or else the user's, which is made if need be.

        The user's lies in a file that only the user reads: `stratagem/key` in XDG_RUNTIME_DIR, or
        else in the user's cache.

        Raises:
            ValueError: see `of`; or others can read the user's key.
        """
        key = cls.of(environment)
        return key if key.secret else cls(_users(environment), users=True)

    def proof(self, *said: Any) -> str:
        """Shows that who says it has the key; empty without a key."""
        if not self.secret:
            return ""
        text = json.dumps(said, sort_keys=True).encode()
        return hmac.new(self.secret.encode(), text, hashlib.sha256).hexdigest()

    def fault(self, proof: Any, *said: Any) -> str:
        """What is wrong with the other end's proof of what it said; empty if nothing."""
        if not self.secret:
            return f"has a {VARIABLE}, and this end has none" if proof else ""
        if not proof:
            return f"has no {VARIABLE}"
        good = self.proof(*said).encode()
        if hmac.compare_digest(str(proof).encode("utf-8", "replace"), good):
            return ""
        return f"has another {VARIABLE}"


def own_cache(environment: Mapping[str, str]) -> Path:
    """The folder of Stratagem in the user's cache, whether it is there or not."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stratagem"


def challenge() -> str:
    """A number used once."""
    return secrets.token_hex(16)


def open_to_all(host: str) -> str:
    """The warning of who listens without a key where other machines reach it."""
    return (
        f"Listening at {host} without a key: every program that reaches this machine's ports can "
        f"take part in the job. Set {VARIABLE} to the same secret on all tasks, such as the output "
        "of `openssl rand -hex 32`, or see that only the job's machines reach each other."
    )


def _users(environment: Mapping[str, str]) -> str:
    """The user's own key."""
    if base := environment.get("XDG_RUNTIME_DIR", ""):
        folder = Path(base) / "stratagem"
    else:
        folder = own_cache(environment)
    path = folder / "key"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
    except OSError as error:
        raise ValueError(
            f"Expected to keep the user's key in {path}. Got: {error.strerror or error}. Set "
            f"{VARIABLE} to a secret, such as the output of `openssl rand -hex 32`, on all tasks."
        ) from None
    if (owner := path.stat().st_uid) != os.getuid():
        raise ValueError(
            f"Expected the user's key in {path}. Got a file of user {owner}. Remove it, or set "
            f"{VARIABLE}."
        )
    return _read(path, "")


def _make(path: Path) -> None:
    """Makes a key; where two programs do at once, both find the first one's."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _read(path: Path, where: str) -> str:
    """The key in a file that nobody else can read."""
    try:
        with path.open() as file:
            found = os.fstat(file.fileno())
            text = file.read(1 << 16).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"{where}expected a file with a key. Got {path}: {reason}. Make one with "
            f"`(umask 077; openssl rand -hex 32 > {path})`."
        ) from None
    # Files that a cluster mounts for its tasks belong to root and may be for a group.
    if found.st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ValueError(
            f"{where}expected a key that others cannot read. Got {path} with mode "
            f"{stat.S_IMODE(found.st_mode):o}. Run `chmod 600 {path}`, and make a new key where "
            "others may have seen this one. (In Kubernetes: `defaultMode: 0400` of the volume.)"
        )
    if not text:
        raise ValueError(f"{where}expected a key in {path}. Got an empty file. Remove it.")
    return text
