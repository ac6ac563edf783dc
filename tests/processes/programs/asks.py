"""Asks a server many times, in a process of its own, and says how it went, as JSON.

Arguments: address, key, how many requests, seconds between them.
"""

from __future__ import annotations

import json
import sys
import time

from stratagem.cluster.keys import Key
from stratagem.transport.hub import Hub


def main() -> None:
    address, secret, count, pause = sys.argv[1:5]
    with Hub("worker 0", Key(secret)) as hub:
        peer = hub.connect(address, "ps 0")
        hub.call(peer, "look", seconds=30)
        print("BEGINS", flush=True)
        tickets = []
        for n in range(int(count)):
            tickets.append(peer.post("add", {"n": n}, seconds=60))
            end = time.monotonic() + float(pause)
            while (left := end - time.monotonic()) > 0:
                hub.turn(left)
        hub.wait(tickets)
        answer = hub.call(peer, "stop", seconds=30)
        print("RESULT", json.dumps(answer.fields["executed"]), flush=True)


if __name__ == "__main__":
    main()
