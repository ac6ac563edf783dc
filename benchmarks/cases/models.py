"""The Keras models, made from whichever Keras a contender uses."""

from __future__ import annotations

from typing import Any


def wide_mlp(keras: Any) -> Any:
    """784-1024-10, logits."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((784,)), layers.Dense(1024, activation="relu"), layers.Dense(10)]
    )


def loop_mlp(keras: Any) -> Any:
    """10-16-1."""
    return keras.Sequential(
        [
            keras.layers.Input((10,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def classifier(keras: Any, kind: str) -> Any:
    """A compiled classifier of `[28, 28, 1]` images: "mlp" (784-256-10) or "cnn"."""
    layers = keras.layers
    if kind == "mlp":
        body = [layers.Flatten(), layers.Dense(256, activation="relu")]
    else:
        body = [
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
        ]
    model = keras.Sequential([layers.Input((28, 28, 1)), *body, layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
