"""What travels: a method, plain data and arrays, as frames that are checked before they are read.

A header frame holds a fixed prefix (who, which request) and MessagePack (method, fields, the
arrays' dtypes and shapes); each array that is not in shared memory follows as a frame of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np

from stratagem.errors import MalformedMessageError

REQUEST, PING, REPEAT, ANSWER, ERROR, PONG = range(1, 7)
"""Kinds of messages; the first three go from who connects to who listens."""

NOBODY = bytes(16)
"""The incarnation of an end that was not heard yet."""

_PREFIX = struct.Struct("<4sB16s16sQQd")
_MAGIC = b"STG1"
_MOST_NUMBER = 1 << 62
_MOST_DIMENSIONS = 64
_BODY_PARTS = 3

_PLAIN = re.compile(r"[<>|=]?(b1|[iu][1248]|f(2|4|8)|c(8|16)|[SU]\d{1,9}|[mM]8(\[\w{1,9}\])?)")
_BY_NAME = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in dir(ml_dtypes)
    if re.fullmatch(r"bfloat16|float\d\w*|u?int[124]", name)
    and isinstance(getattr(ml_dtypes, name), type)
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


@dataclass(frozen=True)
class Limits:
    """What a message may hold at most; more is malformed, at either end.

    Args:
        arrays: how many.
        header_bytes: of method, fields and the arrays' descriptions.
        items: of one list or dict in the fields; longer ones should be arrays.
        array_bytes: of one array.
        message_bytes: of all arrays of a message.
    """

    arrays: int = 4096
    header_bytes: int = 64 << 20
    items: int = 1 << 17
    array_bytes: int = 8 << 30
    message_bytes: int = 16 << 30


LIMITS = Limits()


@dataclass(frozen=True)
class Message:
    """A method (of a request) with its data, or an answer (no method).

    Args:
        method: what is asked for.
        fields: plain data: None, bool, int (64 bits), float, str, bytes, lists and dicts of them.
            Tuples arrive as lists.
        arrays: any dtype but objects and structures. They are sent as they lie in memory, some
            time after they are handed over: whoever sends them does not change them any more.
            They arrive read-only.
    """

    method: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[np.ndarray, ...] = ()


class Prefix(NamedTuple):
    """The part of the header that says who and which request.

    Args:
        kind: one of the kinds above.
        sender: the incarnation of who sends it.
        to: the incarnation that it is for, `NOBODY` where that is not known yet.
        number: of the request.
        below: the sender awaits no answer of a request with a smaller number.
        seconds: how long the sender waits for an answer.
    """

    kind: int
    sender: bytes
    to: bytes = NOBODY
    number: int = 0
    below: int = 0
    seconds: float = 0.0

    def pack(self) -> bytes:
        """As bytes."""
        return _PREFIX.pack(
            _MAGIC, self.kind, self.sender, self.to, self.number, self.below, self.seconds
        )


Place = tuple[int, int]
"""Where an array lies in shared memory: slot and first byte."""


def pack(
    message: Message, limits: Limits = LIMITS, places: Sequence[Place | None] = ()
) -> tuple[bytes, list[np.ndarray], int]:
    """The body of a header, the arrays that follow it, and the bytes of all that.

    Args:
        message: what to send.
        limits: see `Limits`.
        places: where the arrays lie in shared memory; None for one that travels as a frame. Empty
            where all do.

    Raises:
        MalformedMessageError: the message is over a limit, or holds what is no plain data.
    """
    total = 0
    arrays: Sequence[np.ndarray] = ()
    if message.arrays:
        arrays = [np.asarray(array, order="C") for array in message.arrays]
        total = sum(array.nbytes for array in arrays)
        largest = max(array.nbytes for array in arrays)
        _within(len(arrays), limits.arrays, "arrays", message.method)
        _within(largest, limits.array_bytes, "bytes of an array", message.method)
        _within(total, limits.message_bytes, "bytes of arrays", message.method)
    described: list[list[Any]] = []
    frames = []
    for array, where in itertools.zip_longest(arrays, places):
        if where is None:
            described.append([_name(array.dtype), array.shape])
            frames.append(array)
        else:
            described.append([_name(array.dtype), array.shape, *where])
    try:
        body = msgpack.packb((message.method, message.fields, described), use_bin_type=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessageError(
            "Expected plain data in the fields of a message: None, bool, int of 64 bits, float, "
            f"str, bytes, and lists and dicts of them. Got {error} (method {message.method!r}). "
            "Send arrays as arrays, and anything else as one of these."
        ) from None
    _within(len(body), limits.header_bytes, "bytes of fields", message.method)
    return body, frames, total + len(body)


def read_prefix(header: bytes) -> Prefix:
    """The prefix of a header.

    Raises:
        MalformedMessageError: it is none.
    """
    if len(header) < _PREFIX.size:
        raise _malformed(f"a header of at least {_PREFIX.size} bytes", f"{len(header)}")
    magic, kind, sender, to, number, below, seconds = _PREFIX.unpack_from(header)
    if magic != _MAGIC:
        raise _malformed(f"a header that begins with {_MAGIC!r}", f"{magic!r}")
    if not REQUEST <= kind <= PONG:
        raise _malformed("a known kind of message", f"kind {kind}")
    if number > _MOST_NUMBER or below > _MOST_NUMBER:
        raise _malformed("a request number", f"{max(number, below)}")
    if not (0 <= seconds < math.inf) or sender == NOBODY:
        raise _malformed("a sender and how long it waits", f"{sender.hex()}, {seconds} s")
    return Prefix(kind, sender, to, number, below, seconds)


def unpack(
    header: bytes,
    frames: Sequence[Any],
    limits: Limits = LIMITS,
    shared: Callable[[int, int, int], np.ndarray] | None = None,
) -> Message:
    """The message of a header with its prefix, and the frames that came with it.

    Args:
        header: prefix and body.
        frames: buffers; the arrays are views of them.
        limits: see `Limits`.
        shared: the bytes of shared memory at (slot, first byte, number of bytes), as uint8;
            raises MalformedMessageError where there are none.

    Raises:
        MalformedMessageError: anything is not as `pack` makes it, or over a limit.
    """
    if len(header) - _PREFIX.size > limits.header_bytes:
        raise _malformed(f"a header of at most {limits.header_bytes} bytes", f"{len(header)}")
    try:
        body = msgpack.unpackb(
            memoryview(header)[_PREFIX.size :],
            raw=False,
            strict_map_key=False,
            max_array_len=limits.items,
            max_map_len=limits.items,
            ext_hook=_no_extension,
        )
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _malformed("MessagePack", f"{type(error).__name__}: {error}") from None
    if not isinstance(body, list) or len(body) != _BODY_PARTS:
        raise _malformed("method, fields and arrays", f"{type(body).__name__}")
    method, fields, described = body
    if not (isinstance(method, str) and isinstance(fields, dict) and isinstance(described, list)):
        raise _malformed("method, fields and arrays", "other types")
    if not all(isinstance(key, str) for key in fields):
        raise _malformed("names of fields", "a key that is no str")
    if not described and not frames:
        return Message(method, fields)
    return Message(method, fields, _arrays(described, frames, limits, shared))


def _arrays(
    described: list[Any],
    frames: Sequence[Any],
    limits: Limits,
    shared: Callable[[int, int, int], np.ndarray] | None,
) -> tuple[np.ndarray, ...]:
    if len(described) > limits.arrays:
        raise _malformed(f"at most {limits.arrays} arrays", f"{len(described)}")
    read = [_describe(each, limits) for each in described]
    outside = sum(where is None for *_, where in read)
    if outside != len(frames):
        raise _malformed(f"{outside} frames with arrays", f"{len(frames)}")
    if (total := sum(size for _, _, size, _ in read)) > limits.message_bytes:
        raise _malformed(f"at most {limits.message_bytes} bytes of arrays", f"{total}")
    rest = iter(frames)
    buffers = [None if where else memoryview(next(rest)).cast("B") for *_, where in read]
    for (_, _, size, _), buffer in zip(read, buffers, strict=True):
        if buffer is not None and buffer.nbytes != size:
            raise _malformed(f"a frame of {size} bytes", f"{buffer.nbytes}")
    arrays = []
    for (dtype, shape, size, where), buffer in zip(read, buffers, strict=True):
        if buffer is not None:
            flat = np.frombuffer(buffer, np.uint8) if size else np.empty(0, np.uint8)
        elif shared is None or where is None:
            raise _malformed("arrays in frames", "one in shared memory that is not shared")
        else:
            flat = shared(*where, size)
        array = flat.view(dtype).reshape(shape) if size else np.empty(shape, dtype)
        array.flags.writeable = False
        arrays.append(array)
    return tuple(arrays)


def _describe(each: Any, limits: Limits) -> tuple[np.dtype, list[int], int, Place | None]:
    """Dtype, shape, bytes and place of an array, checked."""
    if not (isinstance(each, list) and len(each) in (2, 4) and isinstance(each[0], str)):
        raise _malformed("dtype and shape of an array", "something else")
    dtype = _dtype(each[0])
    shape = each[1]
    where: Place | None = None
    if dtype is None:
        raise _malformed("the name of a dtype", f"{each[0][:32]!r}")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise _malformed(f"a shape of at most {_MOST_DIMENSIONS} dimensions", "something else")
    if not all(type(n) is int and 0 <= n <= _MOST_NUMBER for n in (*shape, *each[2:])):
        raise _malformed("a shape and place of whole numbers, 0 or more", f"{each[1:]!r:.64}")
    # What is empty along one dimension may still be too large for NumPy along the others.
    if math.prod(n for n in shape if n) * max(1, dtype.itemsize) > limits.array_bytes:
        raise _malformed(f"an array of at most {limits.array_bytes} bytes", f"shape {shape!r:.64}")
    if len(each) > 2:
        where = (each[2], each[3])
    return dtype, shape, math.prod(shape) * dtype.itemsize, where


@functools.lru_cache(maxsize=256)
def _dtype(name: str) -> np.dtype | None:
    if name in _BY_NAME:
        return _BY_NAME[name]
    if not _PLAIN.fullmatch(name):
        return None
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        return None


@functools.lru_cache(maxsize=256)
def _name(dtype: np.dtype) -> str:
    name = _NAMES.get(dtype) or dtype.str
    if _dtype(name) is None:
        raise MalformedMessageError(
            f"Expected an array of numbers, booleans, strings or times. Got dtype {dtype}. "
            "Convert it, or send its parts as arrays of their own."
        )
    return name


def _no_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"an extension, {code}")


def _within(got: int, most: int, what: str, method: str) -> None:
    if got > most:
        raise MalformedMessageError(
            f"Expected a message of at most {most} {what}. Got {got} (method {method!r}). Send it "
            "in several."
        )


def _malformed(expected: str, got: str) -> MalformedMessageError:
    return MalformedMessageError(
        f"Expected {expected} in a message. Got {got}. The other end runs another version, or is "
        "no Stratagem task."
    )
