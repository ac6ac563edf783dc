"""What closures add to the coordinator's own variables: the state of metrics."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


class Tallies:
    """Sums that closures contribute to, each once, until they are added to their variables."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Any, np.ndarray]] = {}
        self._lock = threading.Lock()

    def add(self, local: Sequence[Any], parts: Sequence[np.ndarray]) -> None:
        """Adds a closure's parts of some variables. Any thread."""
        with self._lock:
            for variable, part in zip(local, parts, strict=True):
                known = self._sums.get(id(variable))
                total = part if known is None else known[1] + part
                self._sums[id(variable)] = (variable, total)

    def settle(self) -> None:
        """Adds the sums to the variables. A user's thread."""
        with self._lock:
            sums, self._sums = list(self._sums.values()), {}
        for variable, total in sums:
            variable._value = variable._value + jnp.asarray(total, variable._value.dtype)
