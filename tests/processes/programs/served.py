"""Serves requests in a process of its own, for tests of the transport.

Arguments: address, key (the user's own where it is "-").
"""

from __future__ import annotations

import os
import sys

import numpy as np

from stratagem.cluster.keys import Key
from stratagem.transport.hub import Hub
from stratagem.transport.incoming import Request
from stratagem.transport.message import Message


def main() -> None:
    address, secret = sys.argv[1:3]
    key = Key.always(os.environ) if secret == "-" else Key(secret)
    executed: list[int] = []
    stopped = False

    def serve(request: Request) -> Message | None:
        nonlocal stopped
        if request.method == "add":
            executed.append(request.fields["n"])
        if request.method == "fill":
            array = request.allocate(request.fields["size"], np.uint8)
            array[:] = 7
            return Message("", {}, (array,))
        if request.method == "later":
            return None
        stopped = request.method == "stop"
        sums = [float(array.sum()) for array in request.arrays]
        return Message("", {"executed": executed, "sums": sums})

    with Hub("ps 0", key) as hub:
        print("LISTENS", hub.listen(address, serve), flush=True)
        while not stopped:
            hub.turn(1.0)


if __name__ == "__main__":
    main()
