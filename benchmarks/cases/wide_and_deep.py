"""The wide-and-deep model (Cheng et al. 2016, arXiv 1606.07792) of flights, in plain layers.

The wide part is linear in the ids, the deep part an MLP over embeddings; both tables are
`keras.layers.Embedding` over one space of ids, and so are sharded under parameter servers.
"""

from __future__ import annotations

from typing import Any

import flights
import numpy as np

WIDTH = 16
RATE = 1e-3


def build(keras: Any, vocabulary: int) -> Any:
    """A compiled model of `((ids [rows, 9], numbers [rows, 9]), late [rows])`; gives logits."""
    layers = keras.layers
    columns = len(flights.COLUMNS)
    ids = keras.Input((columns,), dtype="int32", name="ids")
    numbers = keras.Input((len(flights.NUMBERS),), name="numbers")

    wide = layers.Embedding(vocabulary, 1, embeddings_initializer="zeros", name="wide")(ids)
    wide = layers.Flatten()(wide)
    wide = layers.Dense(1, name="linear")(layers.Concatenate()([wide, numbers]))

    deep = layers.Embedding(vocabulary, WIDTH, name="deep")(ids)
    deep = layers.Concatenate()([layers.Flatten()(deep), numbers])
    for units in (128, 64):
        deep = layers.Dense(units, activation="relu")(deep)
    deep = layers.Dense(1)(deep)

    late = layers.Reshape(())(layers.Add()([wide, deep]))
    model = keras.Model([ids, numbers], late)
    model.compile(
        optimizer=keras.optimizers.Adagrad(0.05),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def quality(logits: np.ndarray, late: np.ndarray) -> dict[str, float]:
    """Area under the ROC curve (by the ranks, ties shared) and log loss."""
    logits, late = np.asarray(logits, np.float64).ravel(), np.asarray(late, np.float64).ravel()
    _, place, counts = np.unique(logits, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = late.sum()
    area = rank[late == 1].sum() - positive * (positive + 1) / 2
    loss = np.mean(np.logaddexp(0, logits) - late * logits)
    return {"auc": float(area / positive / (len(late) - positive)), "log_loss": float(loss)}
