"""Keras `fit`, `evaluate` and `predict` with variables on parameter servers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem

ROWS, FEATURES = 70, 6


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = (x.sum(axis=1, keepdims=True) > 0).astype(np.float32)
    return x, y


def make_model(optimizer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        optimizer=optimizer,
        loss="binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc")],
    )
    return model


def on_one_device(optimizer, **arguments):
    x, y = data()
    model = make_model(optimizer())
    history = model.fit(x, y, verbose=0, shuffle=False, **arguments)
    return model, history.history


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=1.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_one_device(served, name):
    """With one worker nothing is stale: weights, history and slots are those of plain Keras."""
    arguments = {"epochs": 2, "batch_size": 16}
    expected, history = on_one_device(OPTIMIZERS[name], **arguments)
    strategy = served(
        1, 2, variable_partitioner=stratagem.experimental.partitioners.FixedShardsPartitioner(2),
        max_staleness=0,
    )  # fmt: skip
    x, y = data()
    with strategy.scope():
        model = make_model(OPTIMIZERS[name]())
    found = model.fit(x, y, verbose=0, shuffle=False, **arguments).history
    for key, values in history.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-4, atol=1e-6, err_msg=key)
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(model.optimizer.variables, expected.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6, err_msg=theirs.path)


IN_STEP = {
    "sgd": OPTIMIZERS["sgd"],
    # Of the mean gradient, and not of each worker's own.
    "clipped": lambda: keras.optimizers.SGD(0.1, clipvalue=0.003),
    "lion": lambda: keras.optimizers.Lion(0.001),
    # Updates over whole weights: squares and norms are those of the mean gradient.
    "lamb": lambda: keras.optimizers.Lamb(0.01, clipnorm=0.05),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(0.01)),
}


@pytest.mark.parametrize("name", IN_STEP)
def test_synchronous_training_is_one_device(served, name):
    """Two workers in step: one update of the joint batch."""
    arguments = {"epochs": 2, "batch_size": 16}
    expected, history = on_one_device(IN_STEP[name], **arguments)
    strategy = served(2, 2, consistency="synchronous")
    x, y = data()
    with strategy.scope():
        model = make_model(IN_STEP[name]())
    found = model.fit(x, y, verbose=0, shuffle=False, **arguments).history
    for key, values in history.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-4, atol=1e-6, err_msg=key)
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert int(model.optimizer.iterations.numpy()) == int(expected.optimizer.iterations)


def test_a_finite_dataset_is_an_epoch(served):
    """R81: no steps_per_epoch, no repeat; each row once; callbacks and validation work."""
    strategy = served()
    x, y = data()
    with strategy.scope():
        model = make_model(keras.optimizers.SGD(0.1))

    def batches():
        for start in range(0, ROWS, 16):
            yield x[start : start + 16], y[start : start + 16]

    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: seen.append((b, logs)))
    history = model.fit(
        batches(), epochs=1, verbose=0, callbacks=[note], validation_data=(x, y), shuffle=False,
    ).history  # fmt: skip
    assert int(model.optimizer.iterations.numpy()) == 5
    assert [b for b, _ in seen] == list(range(5))
    assert all(logs["loss"] > 0 for _, logs in seen)  # never a zero that stands for "not known"
    assert set(history) >= {"loss", "accuracy", "val_loss", "val_accuracy"}


def test_a_metric_of_several_numbers(served):
    """As in Keras' own loop: arrays in batch logs, history and `evaluate`."""
    strategy = served(2, 1)
    x, y = data()
    y = np.concatenate([y > 0, y <= 0], 1).astype("float32")
    seen = []

    def trained(**arguments):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(2, "sigmoid")])
        f1 = keras.metrics.F1Score(average=None, threshold=0.5)
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse", metrics=[f1])
        history = model.fit(x, y, batch_size=16, verbose=0, **arguments).history
        return history, model.evaluate(x, y, verbose=0, return_dict=True)

    expected = trained()
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs))
    with strategy.scope():
        found = trained(callbacks=[note])
    np.testing.assert_allclose(found[0]["f1_score"], expected[0]["f1_score"], rtol=1e-6)
    np.testing.assert_allclose(found[1]["f1_score"], expected[1]["f1_score"], rtol=1e-6)
    assert seen[-1]["f1_score"].shape == (2,)
    assert isinstance(seen[-1]["loss"], float)


def test_evaluate_and_predict(served):
    expected, _ = on_one_device(OPTIMIZERS["sgd"], epochs=1, batch_size=16)
    strategy = served(2, 1)
    x, y = data()
    with strategy.scope():
        model = make_model(keras.optimizers.SGD(0.1))
    model.set_weights(expected.get_weights())
    mine = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    theirs = expected.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
    for key, value in theirs.items():
        np.testing.assert_allclose(mine[key], value, rtol=1e-5, err_msg=key)
    np.testing.assert_allclose(
        model.predict(x, batch_size=16, verbose=0),
        expected.predict(x, batch_size=16, verbose=0),
        rtol=1e-5,
    )


def embedding_model(optimizer):
    keras.utils.set_random_seed(5)
    ids = keras.Input((4,), dtype="int32")
    rows = keras.layers.Embedding(50, 3, name="table")(ids)
    out = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    model = keras.Model(ids, out)
    model.compile(optimizer=optimizer, loss="mse")
    return model


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adagrad])
def test_tables_are_looked_up_by_row(served, optimizer, caplog):
    """Only rows that the batch needs travel; SGD and Adagrad are as on one device."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 50, size=(24, 4))
    y = rng.normal(size=(24, 1)).astype(np.float32)
    arguments = {"epochs": 2, "batch_size": 8, "verbose": 0, "shuffle": False}
    expected = embedding_model(optimizer(0.1))
    expected.fit(ids, y, **arguments)
    strategy = served(
        1, 2, variable_partitioner=stratagem.experimental.partitioners.FixedShardsPartitioner(2),
        max_staleness=0,
    )  # fmt: skip
    with strategy.scope():
        model = embedding_model(optimizer(0.1))
    model.fit(ids, y, **arguments)
    for mine, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert "whole" not in caplog.text


def test_dropout_and_batch_normalization(served):
    strategy = served()
    x, y = data()
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer="adam", loss="mse")
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    moving = model.layers[1].moving_mean.numpy()
    assert np.abs(moving).sum() > 0
    assert int(model.optimizer.iterations.numpy()) == 10


def test_a_saved_model_is_whole(served, tmp_path):
    """R61: what the servers hold is pulled through the network."""
    strategy = served(
        1, 2, variable_partitioner=stratagem.experimental.partitioners.FixedShardsPartitioner(2)
    )
    x, y = data()
    with strategy.scope():
        model = make_model(keras.optimizers.SGD(0.1))
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for mine, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
