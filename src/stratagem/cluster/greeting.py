"""How a task says hello to its job's service."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from stratagem.cluster.keys import VARIABLE, Key, challenge
from stratagem.cluster.messages import LIMIT, encode
from stratagem.cluster.tries import fair
from stratagem.errors import JobMismatchError, PeerTimeoutError

_RETRY_SECONDS = 0.05


def greet(address: str, hello: Any, seconds: float, key: Key) -> tuple[socket.socket, bytes]:
    """Connects to a service and says hello, again until it answers.

    Args:
        address: of the service.
        hello: the task, its rank and its terms.
        seconds: until when to try; a try that has begun has a second at least.
        key: of the job.

    Returns:
        The connection, and what has come on it after the answer.

    Raises:
        PeerTimeoutError: the service does not answer.
        JobMismatchError: it has another key.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        line = None
        try:
            line = socket.create_connection((host.strip("[]"), int(port)), fair(deadline))
            return line, _exchange(line, address, hello, key)
        except BaseException as error:
            if line is not None:
                line.close()
            if not isinstance(error, OSError | ValueError | KeyError | TypeError):
                raise
            if time.monotonic() >= deadline:
                raise PeerTimeoutError(
                    f"Expected the job's coordination service at {address} within {seconds:g} s "
                    f"(this is {hello['task']}). Got {type(error).__name__}: {error}. Look whether "
                    "the launcher, or the task that hosts it, runs and can be reached."
                ) from None
            time.sleep(_RETRY_SECONDS)


def _exchange(line: socket.socket, address: str, hello: Any, key: Key) -> bytes:
    """Says hello, each end proving to the other that it has the key.

    Returns:
        What came after its answer.
    """
    received = bytearray()

    def read() -> tuple[str, Any]:
        while (at := received.find(b"\n")) < 0:
            data = line.recv(LIMIT)
            if not data:
                raise ConnectionError("it has closed the connection")
            received.extend(data)
            if len(received) > LIMIT and b"\n" not in received:
                raise ValueError(f"it says a line of more than {LIMIT} bytes")
        message, received[: at + 1] = json.loads(received[:at]), b""
        return message["kind"], message["said"]

    _, theirs = read()
    mine = challenge()
    proof = key.proof("member", theirs, mine, hello)
    line.sendall(encode("hello", {"me": hello, "challenge": mine, "proof": proof}))
    kind, said = read()
    fault = said
    if kind == "welcome":
        fault = key.fault(said, "service", mine, theirs)
        fault = fault and f"the service {fault}"
    if fault:
        raise JobMismatchError(
            f"Expected this task to have the same {VARIABLE} as the job's coordination service at "
            f"{address} (this is {hello['task']}). Got: {fault}. Set the variable to the same "
            "secret on all tasks and for their launcher, or nowhere."
        )
    return bytes(received)
