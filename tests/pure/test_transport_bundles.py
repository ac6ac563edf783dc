"""Small messages that travel as one."""

from __future__ import annotations

import msgpack
import pytest

from stratagem.transport import bundles


def test_a_bundle_holds_its_messages():
    messages = [[b"header"], [b"header 2", b"", b"array"]]
    assert bundles.split(bundles.join(messages), 10) == messages


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"STG1" + msgpack.packb([[b"x"]]),  # a message of its own
        b"STGB",
        b"STGB\xc1",
        b"STGB" + msgpack.packb([[b"x"]]) + b"more",
        b"STGB" + msgpack.packb({}),
        b"STGB" + msgpack.packb([b"x"]),
        b"STGB" + msgpack.packb([[1]]),
        b"STGB" + msgpack.packb([[[b"x"]]]),
        b"STGB" + msgpack.packb([[b"x"]] * 11),  # over the limit
        b"STGB" + msgpack.packb([[msgpack.ExtType(1, b"x")]]),
    ],
)
def test_anything_else_is_no_bundle(frame):
    assert bundles.split(frame, 10) is None
