"""The data and the models' sizes, the same for all contenders. Needs NumPy alone."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

REPLICAS = 2
LOOP_BATCH = 64
LOOP_BATCHES = 16
LOOP_RATE = 0.05
WIDE_BATCH = 128
FIT_BATCH = 256
SIZES = {"4 KB": 4 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "32 MB": 32 << 20}
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist


def loop_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of a regression: x `[64, 10]`, y `[64, 1]`."""
    rng = np.random.default_rng(0)
    slope = rng.normal(size=(10, 1))
    batches = []
    for _ in range(LOOP_BATCHES):
        x = rng.normal(size=(LOOP_BATCH, 10))
        batches.append((x.astype(np.float32), np.tanh(x @ slope).astype(np.float32)))
    return batches


def loop_weights() -> list[np.ndarray]:
    """Initial weights of the 10-16-1 MLP, in Keras' order."""
    rng = np.random.default_rng(1)
    w1, w2 = rng.normal(size=(10, 16)) / 4, rng.normal(size=(16, 1)) / 4
    return [a.astype(np.float32) for a in (w1, np.zeros(16), w2, np.zeros(1))]


def wide_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Global batches of a classification: x `[128, 784]`, y `[128]`; 64 rows for each worker."""
    rng = np.random.default_rng(2)
    return [
        (
            rng.normal(size=(WIDE_BATCH, 784)).astype(np.float32),
            rng.integers(0, 10, WIDE_BATCH).astype(np.int32),
        )
        for _ in range(8)
    ]


def wide_weights() -> list[np.ndarray]:
    """Initial weights of the 784-1024-10 MLP, in Keras' order."""
    rng = np.random.default_rng(3)
    w1, w2 = rng.normal(size=(784, 1024)) / 28, rng.normal(size=(1024, 10)) / 32
    return [a.astype(np.float32) for a in (w1, np.zeros(1024), w2, np.zeros(10))]


def images(rows: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Fashion-MNIST: x `[rows, 28, 28, 1]` in 0..1, y `[rows]`, and where they are from.

    Without Debian's package the pictures are noise, which takes as long to train on.
    """
    if not (FASHION_MNIST / "train-images-idx3-ubyte.gz").exists():
        rng = np.random.default_rng(0)
        x = rng.random((rows, 28, 28, 1), np.float32)
        return x, rng.integers(0, 10, rows).astype(np.int32), "noise of Fashion-MNIST's shape"
    with gzip.open(FASHION_MNIST / "train-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(16 + rows * 784), np.uint8, offset=16)
    with gzip.open(FASHION_MNIST / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(8 + rows), np.uint8, offset=8)
    x = (pixels.reshape(rows, 28, 28, 1) / np.float32(255)).astype(np.float32)
    return x, labels.astype(np.int32), "Fashion-MNIST"
