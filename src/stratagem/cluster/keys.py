"""The key of a job: who knows it may take part. Without one, whoever reaches the job's ports may.

Who listens sends a challenge, a number used once; who connects answers with a number of its own
and an HMAC (RFC 2104) of both and of what it says; what it hears back carries one too, so that each
end knows that the other has the key. The key itself never travels. It keeps strangers out; it does
not hide what is said, nor what JAX and Gloo send, from who can read the network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VARIABLE = "STRATAGEM_CLUSTER_KEY"
_LEAST_CHARACTERS = 16


@dataclass(frozen=True)
class Key:
    """A secret that all tasks of a job share; empty where there is none.

    Raises:
        ValueError: it is so short that it can be guessed from one answer.
    """

    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.secret and len(self.secret) < _LEAST_CHARACTERS:
            raise ValueError(
                f"{VARIABLE}: expected at least {_LEAST_CHARACTERS} characters. Got "
                f"{len(self.secret)}. Make one with `openssl rand -hex 32`, and give it to all "
                "tasks."
            )

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Key:
        """The key in some environment variables."""
        return cls(environment.get(VARIABLE, ""))

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
