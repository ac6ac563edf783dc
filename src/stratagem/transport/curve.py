"""CurveZMQ (ZeroMQ RFC 26): who knows the job's secret is let in, and nobody reads what is said.

All tasks of a job know one secret. Two pairs of keys are derived from it with scrypt (RFC 7914):
one for who listens, one for who connects. Who listens accepts the second and no other, as ZAP
(ZeroMQ RFC 27) lets it decide.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from stratagem.cluster.keys import FILE_VARIABLE, VARIABLE, Key
from stratagem.cluster.own_host import is_loopback

ZAP = "inproc://zeromq.zap.01"

_KEY_BYTES = 32
_SALT = b"stratagem transport 1"
_COST, _BLOCK = 1 << 14, 8  # of scrypt: 16 MiB and some 50 ms, once in a process


@dataclass(frozen=True)
class Pair:
    """Keys of one end, in the printable form of ZeroMQ."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class Pairs:
    """The keys of a job: of who listens, and of who connects."""

    listener: Pair
    connector: Pair


@functools.lru_cache(maxsize=8)
def pairs(secret: str) -> Pairs:
    """The keys that a secret stands for; the same everywhere."""
    drawn = hashlib.scrypt(
        secret.encode(), salt=_SALT, n=_COST, r=_BLOCK, p=1, dklen=2 * _KEY_BYTES
    )
    return Pairs(_pair(drawn[:_KEY_BYTES]), _pair(drawn[_KEY_BYTES:]))


def _pair(drawn: bytes) -> Pair:
    secret = z85.encode(drawn)
    return Pair(zmq.curve_public(secret), secret)


def check_address(address: str, key: Key, name: str, does: str) -> None:
    """Refuses an address beyond this machine for a key that is only for it.

    Args:
        address: "host:port".
        key: what protects the connection.
        name: of this end.
        does: "listen" or "connect".

    Raises:
        ValueError: the key is not one of the job, and the address is no loopback one.
    """
    host = address.rpartition(":")[0]
    if key.users and not is_loopback(host):
        raise ValueError(
            f"Expected {VARIABLE} (or {FILE_VARIABLE}) to be set where {name} is to {does} at "
            f"{address}, which is beyond this machine. Got none, so only loopback addresses such "
            "as 127.0.0.1 are used. Set it to the same secret on all tasks, such as the output of "
            "`openssl rand -hex 32`."
        )


class Doorkeeper:
    """Answers ZeroMQ's questions (ZAP) about who may connect.

    Args:
        socket: a REP socket bound at `ZAP`.
        public: of the one key that may.
    """

    def __init__(self, socket: zmq.Socket[bytes], public: bytes):
        self._socket, self._good = socket, z85.decode(public)

    def answer(self) -> str | None:
        """Answers one question; gives the address of who is refused."""
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        version, number, address = frames[0], frames[1], frames[3]
        good = frames[5:] == [b"CURVE", self._good]
        status = (b"200", b"OK") if good else (b"400", b"unknown key")
        self._socket.send_multipart([version, number, *status, b"", b""])
        return None if good else address.decode("ascii", "replace")
