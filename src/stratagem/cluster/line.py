"""A connection to another task that carries JSON, each wait with a deadline and a reason.

Messages are one line of JSON, at most 1 MiB, read as data and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from stratagem.cluster.rollcall import split_address

LIMIT = 1 << 20
"""Bytes of a message."""

TRY_SECONDS = 5.0
"""For one try to connect, and for an answer."""

BULK = 32 << 20
"""Bytes that are sent to see how fast they pass."""

NOBODY_LISTENS = "the machine refuses: nothing listens there"
OTHER = "something that is no stratagem doctor listens there"
SILENT = "it is connected, but does not answer: stopped, or another program"

_CHUNK = 1 << 18  # bytes


class Unreached(Exception):
    """Why a task was not reached."""


class Line:
    """A connection that carries JSON objects."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, message: Mapping[str, Any]) -> None:
        with _as_unreached():
            self._writer.write(json.dumps(message).encode() + b"\n")
            async with asyncio.timeout(TRY_SECONDS):
                await self._writer.drain()

    async def receive(self, seconds: float) -> dict[str, Any]:
        with _as_unreached():
            async with asyncio.timeout(seconds):
                text = await self._reader.readline()
            message = json.loads(text) if text else None
        if not isinstance(message, dict):
            raise Unreached("it closes the connection: no stratagem doctor, or one that has ended")
        return message

    async def send_bulk(self, seconds: float) -> None:
        await self.send({"bulk": True})
        with _as_unreached():
            async with asyncio.timeout(seconds):
                for _ in range(BULK // _CHUNK):
                    self._writer.write(bytes(_CHUNK))
                    await self._writer.drain()

    async def receive_bulk(self, seconds: float) -> None:
        with _as_unreached():
            async with asyncio.timeout(seconds):
                for _ in range(BULK // _CHUNK):
                    await self._reader.readexactly(_CHUNK)


@contextlib.asynccontextmanager
async def connected(address: str, seconds: float) -> AsyncIterator[Line]:
    """A connection to a task; raises Unreached."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(seconds):
            ip, *_ = await resolve(host, port)
            reader, writer = await asyncio.open_connection(ip, port, limit=LIMIT)
    except TimeoutError:
        raise Unreached(
            f"no answer within {seconds:.0f} s: a firewall drops it, or no machine is there"
        ) from None
    except ConnectionRefusedError:
        raise Unreached(NOBODY_LISTENS) from None
    except OSError as error:
        raise Unreached(error.strerror or str(error)) from None
    with contextlib.closing(writer):
        yield Line(reader, writer)


async def resolve(host: str, port: int) -> tuple[str, ...]:
    """IP addresses of a host. The thread that asks may stay: a name service has no deadline."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[str, ...] | OSError] = loop.create_future()

    def put(value: tuple[str, ...] | OSError) -> None:
        if not answer.done():
            answer.set_result(value)

    def ask() -> None:
        value: tuple[str, ...] | OSError
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            value = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
        except OSError as error:
            value = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(put, value)

    threading.Thread(target=ask, daemon=True).start()
    got = await answer
    if isinstance(got, OSError):
        raise Unreached(f"the host name {host!r} is unknown ({got.strerror})")
    return got


@contextlib.contextmanager
def _as_unreached() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise Unreached(SILENT) from None
    except (ValueError, RecursionError, EOFError):
        raise Unreached(OTHER) from None
    except OSError as error:
        raise Unreached(f"the connection breaks ({error.strerror or error})") from None
