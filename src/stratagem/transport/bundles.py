"""Small messages to one end, sent as one, as most of what one costs is its way and not itself.

A bundle is one frame: a magic word, and MessagePack with a list of messages, each a list of frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

MOST_BYTES = 1 << 12
"""Of a message, with its arrays: larger ones travel alone."""

_MAGIC = b"STGB"


def join(messages: Sequence[Sequence[bytes]]) -> bytes:
    """The frame of some messages."""
    return _MAGIC + bytes(msgpack.packb(messages, use_bin_type=True))


def split(frame: bytes, most: int) -> list[list[Any]] | None:
    """The messages of a frame; None where it is no bundle, or a malformed one.

    Args:
        frame: what came.
        most: messages, and frames of one, that there may be.
    """
    if not frame.startswith(_MAGIC):
        return None
    try:
        found = msgpack.unpackb(
            memoryview(frame)[len(_MAGIC) :], raw=True, max_array_len=most, max_map_len=0,
            max_ext_len=0,
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    if not isinstance(found, list):
        return None
    for message in found:
        if not isinstance(message, list) or not all(type(part) is bytes for part in message):
            return None
    return found
