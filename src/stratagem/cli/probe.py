"""Asks JAX for its devices, in a process of its own: a broken driver can hang or end who asks.

`python -m stratagem.cli.probe` prints one line of JSON behind `MARK`.
"""

from __future__ import annotations

import json
from typing import Any

import keras

from stratagem import config

MARK = "STRATAGEM-PROBE "


def probe() -> dict[str, Any]:
    """The devices as strategies see them, Keras' backend, and what is wrong with them."""
    found: dict[str, Any] = {"keras_backend": keras.config.backend(), "devices": [], "problem": ""}
    try:
        found["devices"] = config.list_devices()
        config.ensure_safe_cpu_pool(config.devices_of("cpu"))
    except RuntimeError as error:  # As JAX raises when a platform does not start.
        found["problem"] = str(error)
    return found


if __name__ == "__main__":
    print(MARK + json.dumps(probe()), flush=True)
