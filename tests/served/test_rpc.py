"""`tf.distribute.experimental.rpc`: functions that other processes call."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from stratagem.compat import tensorflow as tf
from stratagem.coordinator.rpc import pack, unpack
from stratagem.errors import MalformedMessageError, PeerTimeoutError, RemoteError
from stratagem.launcher.local import free_ports


@pytest.fixture
def address():
    return f"127.0.0.1:{free_ports(1)[0]}"


def test_functions_are_called(address):
    rpc = tf.distribute.experimental.rpc
    server = rpc.Server.create("grpc", address)
    server.register("add", lambda x, y: {"sum": x + y, "texts": ("a", None, [True])})
    server.register("fail", lambda: 1 / 0)
    with pytest.raises(ValueError, match="which is registered"):
        server.register("add", len)
    with contextlib.closing(server):
        server.start()
        with contextlib.closing(rpc.Client.create("grpc", address, name="here")) as client:
            found = client.call("add", [np.arange(3), 2])
            assert found.is_ok()
            assert found.get_error() is None
            value = found.get_value()
            assert value["sum"].tolist() == [2, 3, 4]
            assert value["texts"] == ("a", None, [True])
            assert client.add_blocking(np.float32(1), 2.0)["sum"] == 3.0
            assert client.add(1, 2).get_value()["sum"] == 3
            failed = client.fail()
            assert not failed.is_ok()
            assert "ZeroDivisionError" in str(failed.get_error())
            unknown = client.call("nothing")
            assert not unknown.is_ok()
            with pytest.raises(RemoteError, match="Expected a method of this server"):
                unknown.get_value()


def test_without_a_server(address):
    with pytest.raises(PeerTimeoutError):
        tf.distribute.experimental.rpc.Client.create("grpc", address, timeout_in_ms=200)


def test_what_is_refused():
    with pytest.raises(ValueError, match="rpc_layer: expected 'grpc'"):
        tf.distribute.experimental.rpc.Server.create("http", "x:1")
    with pytest.raises(TypeError, match="Expected tensors, numbers, texts"):
        pack([object()], [])
    for wrong in (None, ["array", 3], ["set", []], ["dict", [1]], 7):
        with pytest.raises(ValueError, match="Expected a structure of a call"):
            unpack(wrong, [])


def test_what_cannot_be_sent_is_an_error(address):
    """Each number of a list is an array, and there may be 4096."""
    rpc = tf.distribute.experimental.rpc
    server = rpc.Server.create("grpc", address)
    server.register("add", len)
    with contextlib.closing(server):
        server.start()
        with contextlib.closing(rpc.Client.create("grpc", address)) as client:
            found = client.call("add", [list(range(5000))])
            with pytest.raises(MalformedMessageError, match="4096"):
                found.get_value()
            assert not found.is_ok()
