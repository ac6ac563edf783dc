"""Layers and losses that talk to the other replicas, in models that Keras builds and fits."""

from __future__ import annotations

import logging

import keras
import numpy as np
from keras import ops

import stratagem

ROWS = 7
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(ROWS, 1)).astype("float32")


class Centre(keras.layers.Layer):
    """Takes the mean over the global batch away: one collective in a forward pass."""

    def call(self, x):
        replica = stratagem.get_replica_context()
        count = ops.full((), x.shape[0], dtype=x.dtype)
        total, rows = replica.all_reduce("SUM", (ops.sum(x, axis=0), count))
        return x - total / rows


def most_different(y_true, y_pred):
    """Each row's distance to the row of the global batch that is farthest from it."""
    everyone = stratagem.get_replica_context().all_gather(y_pred, axis=0)
    return ops.max(ops.square(y_pred - ops.transpose(everyone)), axis=1) + ops.mean(
        ops.square(y_true - y_pred), axis=1
    )


def train(strategy, batch_size):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((3,))
        model = keras.Model(inputs, keras.layers.Dense(1)(Centre()(inputs)))
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=most_different)
    history = model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


def test_a_layer_and_a_loss_over_the_global_batch_train_as_on_one_device():
    losses, weights = train(stratagem.OneDeviceStrategy("CPU:0"), batch_size=4)
    got_losses, got_weights = train(stratagem.MirroredStrategy(["CPU:0", "CPU:1"]), batch_size=4)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
    for got, wanted in zip(got_weights, weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_shapes_are_inferred_as_on_a_replica():
    with stratagem.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
        gathered = keras.layers.Lambda(
            lambda x: stratagem.get_replica_context().all_gather(x, axis=1)
        )(keras.Input((4,)))
        assert gathered.shape == (None, 12)
        assert stratagem.in_cross_replica_context()


def test_fit_says_once_what_went_where(caplog):
    strategy = stratagem.MirroredStrategy(["CPU:0", "CPU:1"], stratagem.RingAllReduce())
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    with caplog.at_level(logging.INFO, logger="stratagem"):
        model.fit(X, Y, batch_size=5, verbose=0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "train: 5 rows a step, 3+2 on /device:CPU:0, /device:CPU:1; "
        "6 variables (8 values) on each; combined by RingAllReduce"
    )
