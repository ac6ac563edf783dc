"""Messages that are nearly right, for what listens to strangers."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

_VALUES: tuple[Any, ...] = (
    None, True, -1, 10**30, 1.5, math.nan, math.inf, "", "x", "\ud800", [], [[]], {}, {"a": 1},
    [None, None], "worker 1", 1e308,
)  # fmt: skip
_RAW = (
    b"\n", b"\x00\n", b"\xff\xfe\n", b"[" * 50000 + b"\n", b'{"a":' * 9000 + b"\n",
    b"9" * 9000 + b"\n", b"null\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 70000,
    b'"' + b"\\" * 999 + b"\n", b"",
)  # fmt: skip


def malformed(rng: random.Random, message: dict[str, Any]) -> bytes:
    """The message with one thing wrong in it, or something that is none."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice(_RAW)
    if kind < 0.2:
        text = bytearray(json.dumps(message).encode() + b"\n")
        text[rng.randrange(len(text) - 1)] = rng.randrange(256)
        return bytes(text)
    changed = copy.deepcopy(message)
    place: Any = changed
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        if isinstance(place[key], dict | list | tuple) and place[key] and rng.random() < 0.8:
            if isinstance(place[key], tuple):
                place[key] = list(place[key])
            place = place[key]
            continue
        break
    choice = rng.random()
    if choice < 0.2 and isinstance(place, dict):
        del place[key]
    elif choice < 0.3 and isinstance(place, dict):
        place["surplus"] = rng.choice(_VALUES)
    else:
        place[key] = rng.choice(_VALUES)
    return json.dumps(changed).encode() + b"\n"
