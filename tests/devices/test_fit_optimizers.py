"""Optimizers under `fit`: gradients are averaged by rows first, then everything else happens."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import stratagem

random = np.random.default_rng(0)
X = random.normal(size=(11, 3)).astype("float32")
Y = random.normal(size=(11, 2)).astype("float32")
ONCE = {"batch_size": 4, "shuffle": False, "verbose": 0}


def strategy(replicas: int = 2):
    return stratagem.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def dense(optimizer, **layer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input((3,)), layers.Dense(4, "tanh", **layer), layers.Dense(2, **layer),
    ])  # fmt: skip
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def compare(make, replicas: int = 2, epochs: int = 2, rtol: float = 5e-5, x=X, y=Y):
    """`fit` on several replicas and plainly: history, weights and optimizer state agree."""
    plain = make()
    want = plain.fit(x, y, epochs=epochs, **ONCE).history
    with strategy(replicas).scope():
        model = make()
    got = model.fit(x, y, epochs=epochs, **ONCE).history
    assert got.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=rtol, atol=1e-5, err_msg=name)
    pairs = zip([*model.variables, *model.optimizer.variables],
                [*plain.variables, *plain.optimizer.variables], strict=True)  # fmt: skip
    for mine, theirs in pairs:
        np.testing.assert_allclose(
            mine.numpy(), theirs.numpy(), rtol=rtol, atol=1e-5, err_msg=mine.path
        )
    return model


opt = keras.optimizers
OPTIMIZERS = {
    "clipnorm": lambda: opt.SGD(0.1, clipnorm=0.1),
    "clipvalue": lambda: opt.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.05),
    "global_clipnorm": lambda: opt.Adam(0.1, global_clipnorm=0.1),
    "accumulation": lambda: opt.Adam(0.1, gradient_accumulation_steps=2),
    "ema": lambda: opt.SGD(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
    "ema at the end": lambda: opt.Adam(0.1, use_ema=True, ema_momentum=0.7),
    "weight decay": lambda: opt.AdamW(0.1, weight_decay=0.2),
    "loss_scale_factor": lambda: opt.SGD(0.1, loss_scale_factor=8.0),
    "rmsprop": lambda: opt.RMSprop(0.01, centered=True),
    "lion": lambda: opt.Lion(0.01),
    "ftrl": lambda: opt.Ftrl(0.1, l1_regularization_strength=0.01),
    "adafactor": lambda: opt.Adafactor(0.01),
    "lamb": lambda: opt.Lamb(0.01),
    "nadam": lambda: opt.Nadam(0.01),
    "muon": lambda: opt.Muon(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_options_equal_one_device(name):
    compare(lambda: dense(OPTIMIZERS[name]()), replicas=2)


def test_regularizers_activity_regularizers_and_add_loss_count_once():
    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([
            keras.Input((3,)),
            layers.Dense(4, "tanh", kernel_regularizer="l2", bias_regularizer="l1"),
            Penalty(),
            layers.Dense(2, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()),
        ])  # fmt: skip
        model.compile(opt.SGD(0.1), "mse")
        return model

    compare(make, replicas=3)


def test_an_activity_regularizer_counts_every_row_once():
    # Keras divides the activity loss by the rows of its batch: a mean, averaged by rows.
    compare(lambda: dense(opt.SGD(0.1), activity_regularizer=keras.regularizers.L2(0.1)))


def test_frozen_layers_stay_and_thawed_ones_move():
    def make():
        model = dense(opt.Adam(0.1))
        model.layers[0].trainable = False
        model.compile(opt.Adam(0.1), "mse")
        return model

    model = compare(make)
    before = [w.copy() for w in model.layers[0].get_weights()]
    model.fit(X, Y, **ONCE)
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], before[0])
    model.layers[0].trainable = True
    model.compile(opt.Adam(0.1), "mse")
    model.fit(X, Y, **ONCE)
    assert np.any(model.layers[0].get_weights()[0] != before[0])


def test_the_learning_rate_can_be_set_between_fits():
    with strategy().scope():
        model = dense(opt.SGD(0.1))
    plain = dense(opt.SGD(0.1))
    for m in (model, plain):
        m.fit(X, Y, **ONCE)
        m.optimizer.learning_rate = 0.01
        m.fit(X, Y, **ONCE)
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)


def scaled(initial: float = 2.0**15, growth: int = 2000):
    keras.utils.set_random_seed(1)
    policy = keras.DTypePolicy("mixed_float16")
    model = keras.Sequential([
        keras.Input((3,)), layers.Dense(4, "tanh", dtype=policy), layers.Dense(2, dtype=policy),
        layers.Activation("linear", dtype="float32"),
    ])  # fmt: skip
    optimizer = opt.LossScaleOptimizer(
        opt.Adam(0.01), initial_scale=initial, dynamic_growth_steps=growth
    )
    model.compile(optimizer, "mse")
    return model


def test_mixed_float16_trains_with_a_growing_loss_scale():
    model = compare(lambda: scaled(256.0, growth=2), rtol=5e-2)
    assert float(model.optimizer.dynamic_scale.numpy()) == 256 * 2**3  # 6 steps
    assert model.layers[0].compute_dtype == "float16"


@pytest.mark.parametrize("row", [0, 3])
def test_r31_overflow_on_any_replica_skips_the_update_on_all_and_halves_the_scale_once(row):
    with strategy().scope():
        model = scaled()
    model.train_on_batch(X[:4], Y[:4])
    before = model.get_weights()
    steps = int(model.optimizer.iterations.numpy())
    bad = Y[:4].copy()
    bad[row] = 1e30  # of replica 0 or of replica 1
    model.train_on_batch(X[:4], bad)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert float(model.optimizer.dynamic_scale.numpy()) == 16384
    assert int(model.optimizer.iterations.numpy()) == steps
    model.train_on_batch(X[:4], Y[:4])
    assert int(model.optimizer.iterations.numpy()) == steps + 1
    assert float(model.optimizer.dynamic_scale.numpy()) == 16384


def test_loss_scale_with_gradient_accumulation_equals_one_device():
    def make():
        return dense(opt.LossScaleOptimizer(opt.Adam(0.1, gradient_accumulation_steps=2)))

    compare(make)


def test_mixed_bfloat16_keeps_float32_variables():
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype="mixed_bfloat16")])
        model.compile(opt.SGD(0.1), "mse")
        return model

    model = compare(make, rtol=5e-2)
    assert {str(v.dtype) for v in model.trainable_variables} == {"float32"}


def test_the_global_dtype_policy_wraps_the_optimizer_in_a_loss_scale():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with strategy().scope():
            model = dense("adam")
        assert isinstance(model.optimizer, opt.LossScaleOptimizer)
        loss = model.fit(X, Y, epochs=3, **ONCE).history["loss"]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert np.all(np.isfinite(loss))
    assert loss[-1] < loss[0]


def masked(reduction: str, recurrent: bool):
    keras.utils.set_random_seed(1)
    middle = layers.LSTM(3, return_sequences=True) if recurrent else layers.Dense(3, "tanh")
    model = keras.Sequential([
        keras.Input((5,), dtype="int32"),
        layers.Embedding(7, 3, mask_zero=True),
        middle,
        layers.Dense(2),
    ])  # fmt: skip
    model.compile(opt.SGD(0.1), keras.losses.MeanSquaredError(reduction=reduction), metrics=["mae"],
                  weighted_metrics=["mse"])  # fmt: skip
    return model


@pytest.mark.parametrize(
    ("reduction", "recurrent"),
    [("sum_over_batch_size", True), ("sum", False), ("mean_with_sample_weight", False)],
)
def test_masked_losses_equal_one_device(reduction, recurrent):
    ids = random.integers(0, 7, (11, 5)).astype("int32")
    ids[:2, 1:] = 0  # nearly everything on replica 0 is masked
    targets = random.normal(size=(11, 5, 2)).astype("float32")
    compare(lambda: masked(reduction, recurrent), x=ids, y=targets)
