"""What a job's members and their service say to each other: lines of JSON, at most 64 KiB.

They are read as data, and checked: what listens may be told anything.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from stratagem.cluster.membership import Beat, Terms

LIMIT = 1 << 16
"""Bytes of a message."""

_MOST = 10**9  # No rank, step or number of seconds that is meant is larger.


@dataclass(frozen=True)
class Hello:
    """A task is ready to train.

    Args:
        task: such as "worker 1".
        rank: its place among the tasks of the job.
        terms: what the user allows.
        said: all that, as it was said and signed.
        challenge: what the service is to sign.
        proof: that the task has the key of the job.
    """

    task: str
    rank: int
    terms: Terms
    said: Any
    challenge: str
    proof: Any


@dataclass(frozen=True)
class Joined:
    """A task computes with the members of a generation."""

    generation: int


@dataclass(frozen=True)
class Admit:
    """A task is where others that wait can begin."""


@dataclass(frozen=True)
class Bye:
    """A task's program has ended: well, or with an error."""

    error: str | None


Message: TypeAlias = Hello | Beat | Joined | Admit | Bye


def encode(kind: str, said: Any) -> bytes:
    """One message."""
    return json.dumps({"kind": kind, "said": said}).encode() + b"\n"


def decode(text: bytes) -> Message | None:
    """What a task says; None where it is nothing that a task says."""
    try:
        message = json.loads(text)
        return _read(message["kind"], message["said"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _read(kind: str, said: Any) -> Message | None:
    if kind == "beat":
        beat = Beat(**said)
        good = isinstance(beat.busy, bool) and isinstance(beat.doing, str)
        return beat if good and _count(beat.step) and _seconds(beat.seconds) else None
    if kind == "joined":
        return Joined(said) if _count(said) else None
    if kind == "admit":
        return Admit()
    if kind == "bye":
        return Bye(said) if said is None or isinstance(said, str) else None
    if kind == "hello":
        me, challenge = said["me"], said["challenge"]
        terms = Terms(**me["terms"])
        if not (isinstance(me["task"], str) and isinstance(challenge, str)):
            return None
        if not (_count(me["rank"]) and _are_terms(terms)):
            return None
        return Hello(me["task"], me["rank"], terms, me, challenge, said["proof"])
    return None


def _are_terms(terms: Terms) -> bool:
    limits = (terms.stall_seconds, terms.silence_seconds, terms.warn_seconds)
    return (
        (terms.min_workers is None or _count(terms.min_workers))
        and (terms.wait_for_replacement is None or _seconds(terms.wait_for_replacement))
        and all(limit == math.inf or (_seconds(limit) and limit > 0) for limit in limits)
    )


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= _MOST  # not where it is no number
