"""fit, evaluate and predict on a dataset that is already distributed (R40)."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest

import stratagem
from stratagem.data import AutoShardPolicy, batches, from_files, with_options
from stratagem.keras_bridge.distributed_input import adapt

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


def test_what_this_package_makes_needs_no_distributing(two, tmp_path):
    np.savez(tmp_path / "0.npz", x=X[:7], y=Y[:7])
    np.savez(tmp_path / "1.npz", x=X[7:], y=Y[7:])

    def read(path):
        with np.load(path) as rows:
            return rows["x"], rows["y"]

    off = AutoShardPolicy.OFF
    for data in (
        batches((X, Y), 4),
        from_files(str(tmp_path / "*.npz"), read, 4),
        with_options(batches((X, Y), 4), auto_shard_policy=off),
    ):
        with two.scope():
            net = model()
        net.build((None, 3))
        plain = model()
        plain.build((None, 3))
        net.fit(data, validation_data=data, epochs=2, verbose=0)
        for _ in range(2):
            for x, y in data:
                plain.train_on_batch(x, y)
        for a, b in zip(net.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_keras_iterates_knows_where_it_is(two):
    data = adapt(batches((X, Y), 4, shuffle_seed=1), two)
    iterator = data.get_jax_iterator()
    next(iterator)
    state = iterator.get_state()
    expected = [np.asarray(two.gather(x, 0)).tolist() for x, _ in iterator]
    again = adapt(batches((X, Y), 4, shuffle_seed=1), two).get_jax_iterator()
    again.set_state(state)
    assert [np.asarray(two.gather(x, 0)).tolist() for x, _ in again] == expected
    assert len(expected) == 2


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


def test_keras_does_not_move_our_batches_ahead(two, monkeypatch):
    """Where the backend is no CPU, Keras puts the next batch on a device; it does not know ours."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with two.scope():
        net = model()
    data = two.experimental_distribute_dataset(batches((X, Y), 4))
    assert len(net.fit(data, epochs=2, verbose=0).history["loss"]) == 2
