"""Sizes and data of the parameter-server cases, the same for all contenders. Needs NumPy alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

ROWS, WIDTH = 1_000_000, 64
BATCH, FIELDS = 1024, 26
ID_BATCHES = 32
RATE = 0.05
ZIPF = 1.1
WIDE_BATCH = 512


def id_batches(kind: str, seed: int = 0) -> np.ndarray:
    """Ids `[32, 1024, 26]`, int64: "uniform", or "zipf" with P(rank) ~ rank ** -1.1.

    Which id has which rank is random, so that often used rows lie all over the table.
    """
    rng = np.random.default_rng(seed)
    shape = (ID_BATCHES, BATCH, FIELDS)
    if kind == "uniform":
        return rng.integers(0, ROWS, shape)
    cumulated = np.cumsum(np.arange(1, ROWS + 1) ** -ZIPF)
    ranks = np.searchsorted(cumulated, rng.random(shape) * cumulated[-1])
    return rng.permutation(ROWS)[ranks]


def clock(keras: Any, measure: Any, rows: int) -> Any:
    """A callback that takes an epoch as a sample, in rows per second; the first one warms up."""

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch:
                measure.wait_for_turn()
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seconds = time.perf_counter() - self.start
            measure.say(**({"sample": rows / seconds} if epoch else {"first": seconds}))

    return Clock()


def endless(kind: str, seed: int) -> Iterator[np.ndarray]:
    """The batches of ids in random order, again and again, made beforehand."""
    batches, rng = id_batches(kind), np.random.default_rng(seed)
    while True:
        yield from batches[rng.permutation(len(batches))]
