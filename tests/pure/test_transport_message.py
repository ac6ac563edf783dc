"""Messages: what is sent arrives, and what is malformed is refused."""

from __future__ import annotations

import random

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from stratagem.errors import MalformedMessageError
from stratagem.transport.message import (
    LIMITS,
    REQUEST,
    Limits,
    Message,
    Prefix,
    pack,
    read_prefix,
    unpack,
)

SENDER = b"s" * 16
PREFIX = Prefix(REQUEST, SENDER, b"t" * 16, 7, 5, 2.5)

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
dtypes = st.sampled_from(
    [np.dtype(t) for t in "? b B h H i I l L e f d F D >f4 <U3 S5 M8[ns] m8[s]".split()]
    + [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.int4)]
)
shapes = st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def travel(message: Message, limits: Limits = LIMITS) -> Message:
    body, arrays, _ = pack(message, limits)
    frames = [array.reshape(-1).view(np.uint8).tobytes() for array in arrays]
    return unpack(PREFIX.pack() + body, frames, limits)


@settings(max_examples=50)
@given(st.text(), st.dictionaries(st.text(), plain), st.lists(st.tuples(dtypes, shapes)))
def test_what_is_sent_arrives(method, fields, kinds):
    arrays = []
    for dtype, shape in kinds:
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.frombuffer(bytes(i % 2 for i in range(size)), np.uint8)
        arrays.append(raw.view(dtype).reshape(shape) if size else np.empty(shape, dtype))
    got = travel(Message(method, fields, tuple(arrays)))
    assert (got.method, got.fields) == (method, fields)
    assert len(got.arrays) == len(arrays)
    for array, other in zip(got.arrays, arrays, strict=True):
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array.tobytes() == other.tobytes()
        assert not array.flags.writeable


def test_arrays_are_not_copied_either_way():
    array = np.arange(12.0).reshape(3, 4)
    body, (sent,), size = pack(Message("m", {}, (array,)))
    assert np.shares_memory(array, sent)
    assert size == len(body) + array.nbytes
    frame = bytearray(array.tobytes())
    (got,) = unpack(PREFIX.pack() + body, [frame]).arrays
    assert np.shares_memory(got, np.frombuffer(frame, np.uint8))


def test_what_is_not_contiguous_arrives_as_it_is():
    array = np.arange(12).reshape(3, 4).T
    np.testing.assert_array_equal(travel(Message("m", {}, (array,))).arrays[0], array)


def test_the_prefix_arrives():
    body, _, _ = pack(Message("m"))
    assert read_prefix(PREFIX.pack() + body) == PREFIX


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("m", {"a": object()}), r"Expected plain data .* Got can not serialize 'object'"),
        (Message("m", {"a": 2**70}), "Expected plain data"),
        (Message("m", {"a": {1, 2}}), r"Expected plain data .*set.*method 'm'"),
        (Message("m", {}, (np.array([None]),)), "Got dtype object"),
        (Message("m", {}, (np.zeros(2, "f4,i4"),)), "Expected an array of numbers"),
        (Message("m", {}, (np.zeros(1),) * 3), r"at most 2 arrays. Got 3 \(method 'm'\)"),
        (Message("m", {}, (np.zeros(9),)), "at most 64 bytes of an array. Got 72"),
        (Message("m", {}, (np.zeros(8),) * 2), "at most 100 bytes of arrays. Got 128"),
        (Message("m", {"a": b"x" * 300}), "at most 256 bytes of fields. Got 3"),
    ],
)
def test_what_cannot_be_sent_says_why(message, text):
    limits = Limits(arrays=2, header_bytes=256, array_bytes=64, message_bytes=100)
    with pytest.raises(MalformedMessageError, match=text):
        pack(message, limits)


def body(*parts) -> bytes:
    return PREFIX.pack() + msgpack.packb(parts)


DEEP = b"\x91" * 5000  # lists in lists


def test_what_is_deep_is_refused():
    with pytest.raises(MalformedMessageError, match="Expected MessagePack"):
        unpack(PREFIX.pack() + DEEP, [])


@pytest.mark.parametrize(
    ("header", "frames", "text"),
    [
        (b"", [], "Expected a header of at least 61 bytes in a message. Got 0."),
        (b"x" * 61, [], "Expected a header that begins with b'STG1'"),
        (Prefix(99, SENDER).pack(), [], "Expected a known kind of message in a message. Got kind"),
        (Prefix(1, SENDER, number=2**63).pack(), [], "Expected a request number"),
        (Prefix(1, bytes(16)).pack(), [], "Expected a sender and how long it waits"),
        (Prefix(1, SENDER, seconds=float("nan")).pack(), [], "how long it waits"),
        (PREFIX.pack(), [], "Expected MessagePack"),
        (PREFIX.pack() + b"\xdd\xff\xff\xff\xff", [], "Expected MessagePack"),
        (PREFIX.pack() + msgpack.packb(msgpack.ExtType(5, b"x")), [], "an extension, 5"),
        (PREFIX.pack() + b"x" * 300, [], "Expected a header of at most 256 bytes"),
        (body("m", {}), [], "Expected method, fields and arrays"),
        (body(1, {}, []), [], "Expected method, fields and arrays"),
        (body("m", {1: 2}, []), [], "Expected names of fields"),
        (body("m", {}, []), [b"x"], "Expected 0 frames with arrays in a message. Got 1."),
        (body("m", {}, [["<f4", [1]]]), [], "Expected 1 frames with arrays in a message. Got 0."),
        (body("m", {}, [["<f4", [1]]]), [b"xxx"], "Expected a frame of 4 bytes in a message. Got"),
        (body("m", {}, [["|O", [1]]]), [b"x" * 8], r"Expected the name of a dtype .* Got '\|O'"),
        (body("m", {}, [["f4,f4", [1]]]), [b"x" * 8], "Expected the name of a dtype"),
        (body("m", {}, [["<f4", [-1]]]), [b"x"], "Expected a shape and place of whole numbers"),
        (body("m", {}, [["<f4", [True]]]), [b"x"], "Expected a shape and place of whole numbers"),
        (body("m", {}, [["<f4", [1] * 65]]), [b"x"], "Expected a shape of at most 64 dimensions"),
        (body("m", {}, [["<f4", [2**61, 0]]]), [b""], "Expected an array of at most 64 bytes"),
        (body("m", {}, [["<f4", [2**40, 2**40]]]), [b""], "Expected an array of at most 64 bytes"),
        (body("m", {}, [7]), [], "Expected dtype and shape of an array"),
        (body("m", {}, [["<f4", [1], 9, 9]]), [], "Expected arrays in frames in a message. Got"),
        (body("m", {}, [["|b1", [0]]] * 3), [b""] * 3, "Expected at most 2 arrays"),
        (body("m", {}, [["<f8", [8]]] * 2), [b"x" * 64] * 2, "at most 100 bytes of arrays"),
    ],
)
def test_what_is_malformed_is_refused(header, frames, text):
    limits = Limits(arrays=2, header_bytes=256, array_bytes=64, message_bytes=100)

    def read() -> None:
        read_prefix(header)
        unpack(header, frames, limits)

    with pytest.raises(MalformedMessageError, match=text):
        read()


def test_whatever_comes_is_read_or_refused():
    """90,000 messages that are cut, changed, or noise: nothing but MalformedMessageError."""
    chance = random.Random(1)
    array = np.arange(6, dtype=np.int32)
    packed, _, _ = pack(Message("push", {"closure": 3, "items": [[1, {"a": b"x"}]]}, (array,) * 2))
    good = PREFIX.pack() + packed
    frames = [array.tobytes()] * 2
    read = 0
    for i in range(90_000):
        header, parts = bytearray(good), frames
        if i % 3 == 0:
            for _ in range(chance.randint(1, 4)):
                header[chance.randrange(len(header))] = chance.randrange(256)
        elif i % 3 == 1:
            del header[chance.randrange(len(header)) :]
        else:
            header = PREFIX.pack() + chance.randbytes(chance.randrange(60))
        if i % 5 == 0:
            parts = [frames[0][: chance.randrange(25)]] * chance.randrange(4)
        try:
            read_prefix(bytes(header))
            unpack(bytes(header), parts)
            read += 1
        except MalformedMessageError:
            pass
    assert 0 < read < 50_000
