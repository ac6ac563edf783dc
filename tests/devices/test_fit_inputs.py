"""What `fit`, `evaluate` and `predict` accept as data, on several replicas as on one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import stratagem

random = np.random.default_rng(0)
X = random.normal(size=(11, 3)).astype("float32")
Y = random.normal(size=(11, 2)).astype("float32")
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in (0, 4, 8)]


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def two():
    return stratagem.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="module")
def expected():
    model = make()
    history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    scores = model.evaluate(X, Y, batch_size=4, verbose=0)
    return history, model.get_weights(), scores, model.predict(X, batch_size=4, verbose=0)


def check(two, expected, data, **fit):
    """Trains, evaluates and predicts with `data()`, a fresh dataset at each call."""
    history, weights, scores, predictions = expected
    with two.scope():
        model = make()
    got = model.fit(data(), epochs=2, shuffle=False, verbose=0, **fit).history
    for name, values in history.items():
        np.testing.assert_allclose(got[name], values, rtol=2e-5, err_msg=name)
    for mine, theirs in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)
    steps = {"steps": fit["steps_per_epoch"]} if "steps_per_epoch" in fit else {}
    np.testing.assert_allclose(model.evaluate(data(), verbose=0, **steps), scores, rtol=2e-5)
    got = model.predict(data(), verbose=0, **steps)
    np.testing.assert_allclose(got, predictions, rtol=2e-5, atol=1e-6)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(BATCHES)

    def __getitem__(self, index):
        return BATCHES[index]


def test_py_dataset(two, expected):
    check(two, expected, Batches)


def test_generator(two, expected):
    def endless():
        while True:
            yield from BATCHES

    check(two, expected, endless, steps_per_epoch=3)


def test_grain(two, expected):
    grain = pytest.importorskip("grain", reason="grain is not installed")
    rows = grain.MapDataset.source(list(zip(X, Y, strict=True)))
    check(two, expected, lambda: rows.to_iter_dataset(grain.ReadOptions(num_threads=0)).batch(4))


def test_torch_data_loader(two, expected):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    check(two, expected, lambda: torch.utils.data.DataLoader(rows, batch_size=4))


def test_tf_data(two, expected):
    tensorflow = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    check(two, expected, lambda: tensorflow.data.Dataset.from_tensor_slices((X, Y)).batch(4))


def test_jax_arrays(two, expected):
    jnp = pytest.importorskip("jax.numpy")
    history, _, _, predictions = expected
    with two.scope():
        model = make()
    got = model.fit(jnp.asarray(X), jnp.asarray(Y), batch_size=4, epochs=2, shuffle=False,
                    verbose=0).history  # fmt: skip
    np.testing.assert_allclose(got["loss"], history["loss"], rtol=2e-5)
    np.testing.assert_allclose(model.predict(jnp.asarray(X), verbose=0), predictions, rtol=1e-4)


def test_nested_inputs_of_several_dtypes(two):
    def build():
        keras.utils.set_random_seed(1)
        ids, numbers = (
            keras.Input((2,), dtype="int32", name="ids"),
            keras.Input((3,), name="numbers"),
        )
        flat = layers.Flatten()(layers.Embedding(5, 2)(ids))
        out = layers.Dense(2, name="out")(layers.Concatenate()([flat, numbers]))
        model = keras.Model({"ids": ids, "numbers": numbers}, {"out": out})
        model.compile(keras.optimizers.SGD(0.1), {"out": "mse"})
        return model

    data = {"ids": random.integers(0, 5, (11, 2)).astype("int64"), "numbers": X.astype("float64")}
    plain = build()
    with two.scope():
        model = build()
    for m in (plain, model):
        m.fit(data, {"out": Y}, batch_size=4, shuffle=False, verbose=0)
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)
    got, want = model.predict(data, verbose=0), plain.predict(data, verbose=0)
    np.testing.assert_allclose(got["out"], want["out"], rtol=2e-5, atol=1e-6)


def test_a_dataset_of_unknown_length_ends_the_epoch(two):
    with two.scope():
        model = make()
    rows = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rows.append(batch)
    )
    model.fit((batch for batch in BATCHES), shuffle=False, verbose=0, callbacks=[count])
    assert len(rows) == 3
