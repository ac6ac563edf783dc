"""fit, evaluate and predict on a dataset that is already distributed (R40)."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem
from stratagem.data import batches

X = np.random.RandomState(0).rand(11, 3).astype("float32")
Y = np.random.RandomState(1).rand(11, 1).astype("float32")


def model():
    keras.utils.set_random_seed(3)
    net = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    net.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return net


@pytest.fixture(scope="module")
def two():
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1"])


def test_an_epoch_is_one_pass_without_steps(two):
    plain = model()
    expected = plain.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    with two.scope():
        net = model()
    data = two.experimental_distribute_dataset(batches((X, Y), 4))
    got = net.fit(data, validation_data=data, epochs=2, verbose=0).history
    np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["mae"], expected["mae"], rtol=1e-5)
    np.testing.assert_allclose(net.evaluate(data, verbose=0), plain.evaluate(X, Y, verbose=0), 1e-4)
    np.testing.assert_allclose(
        net.predict(two.experimental_distribute_dataset(batches(X, 4)), verbose=0),
        plain.predict(X, verbose=0),
        rtol=1e-4,
    )


def test_a_dealt_dataset_with_an_empty_last_part(two):
    with two.scope():
        net = model()
    per_replica = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]
    data = two.distribute_datasets_from_function(lambda _: per_replica)
    plain = model()
    plain.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    net.fit(data, verbose=0)
    for a, b in zip(net.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_empty_first_part_is_dealt_anew(two):
    with two.scope():
        net = model()
    parts = [(X[:0], Y[:0]), (X[:5], Y[:5])]
    net.fit(two.distribute_datasets_from_function(lambda _: parts), verbose=0)
    plain = model()
    plain.fit(X[:5], Y[:5], batch_size=5, shuffle=False, verbose=0)
    for a, b in zip(net.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
