"""Layers under `fit`: statistics, random numbers, and one step of each kind of layer."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import stratagem

random = np.random.default_rng(0)
ONCE = {"batch_size": 4, "shuffle": False, "verbose": 0}


def strategy(replicas: int = 2):
    return stratagem.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def central(replicas: int = 2):
    devices = [f"CPU:{i + 1}" for i in range(replicas)]
    return stratagem.experimental.CentralStorageStrategy(devices, "CPU:0")


def build(*stack, shape=(3,), seed: int = 1):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input(shape), *(make() for make in stack)])


def compare(make, x, y, replicas: int = 2, rtol: float = 5e-5, under=None):
    """`fit` and `predict` on several replicas and plainly."""
    plain = make()
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    with (under or strategy(replicas)).scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    want = plain.fit(x, y, **ONCE).history["loss"]
    got = model.fit(x, y, **ONCE).history["loss"]
    np.testing.assert_allclose(got, want, rtol=rtol)
    for mine, theirs in zip(model.variables, plain.variables, strict=True):
        if mine.dtype != "uint32":
            np.testing.assert_allclose(
                mine.numpy(), theirs.numpy(), rtol=rtol, atol=2e-6, err_msg=mine.path
            )
    np.testing.assert_allclose(
        model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=rtol, atol=2e-6
    )
    return model


def sequences(rows: int = 7):
    return random.normal(size=(rows, 5, 3)).astype("float32")


# Every kind of layer trains in one of these models; one model for many layers saves compilations.
STACKS = {
    "recurrent": [
        lambda: layers.GRU(3, return_sequences=True),
        lambda: layers.Bidirectional(layers.LSTM(2, return_sequences=True)),
        lambda: layers.SimpleRNN(2, return_sequences=True, unroll=True),
    ],
    "sequence": [
        lambda: layers.Conv1D(4, 3, padding="same", activation="relu"),
        lambda: layers.TimeDistributed(layers.Dense(4, "tanh")),
        lambda: layers.BatchNormalization(synchronized=True),
        lambda: layers.LayerNormalization(),
        lambda: layers.GroupNormalization(2),
        lambda: layers.UnitNormalization(),
        lambda: layers.SeparableConv1D(4, 2),
        lambda: layers.EinsumDense("abc,cd->abd", output_shape=(None, 3), bias_axes="d"),
        lambda: layers.PReLU(shared_axes=[1]),
    ],
}


@pytest.mark.parametrize("under", [strategy, central])
@pytest.mark.parametrize("stack", STACKS)
def test_layers_train_as_on_one_device(stack, under):
    def make():
        return build(*STACKS[stack], lambda: layers.GlobalAveragePooling1D(),
                     lambda: layers.Dense(2), shape=(5, 3))  # fmt: skip

    compare(make, sequences(), random.normal(size=(7, 2)).astype("float32"), under=under())


def test_spectral_normalization_iterates_once_a_step():
    def make():
        return build(lambda: layers.SpectralNormalization(layers.Dense(4)))

    x, y = random.normal(size=(7, 3)), random.normal(size=(7, 4))
    compare(make, x.astype("float32"), y.astype("float32"), replicas=3)


def test_attention_trains_as_on_one_device():
    def make():
        keras.utils.set_random_seed(1)
        x = keras.Input((5, 3))
        attended = layers.MultiHeadAttention(2, 4)(x, x)
        return keras.Model(x, layers.Dense(2)(layers.Flatten()(layers.Add()([x, attended]))))

    compare(make, sequences(), random.normal(size=(7, 2)).astype("float32"), replicas=3)


def test_a_convolutional_network_with_synchronized_batch_norm_equals_one_device():
    def make():
        return build(
            lambda: layers.Conv2D(4, 3, activation="relu"),
            lambda: layers.BatchNormalization(synchronized=True),
            lambda: layers.MaxPooling2D(),
            lambda: layers.Flatten(),
            lambda: layers.Dense(2),
            shape=(6, 6, 1),
        )

    x = random.normal(size=(7, 6, 6, 1)).astype("float32")
    compare(make, x, random.normal(size=(7, 2)).astype("float32"), replicas=3)


def test_augmentation_layers_train_and_do_nothing_in_predict():
    def make():
        return build(
            lambda: layers.RandomFlip(), lambda: layers.RandomRotation(0.1),
            lambda: layers.RandomContrast(0.2), lambda: layers.Flatten(), lambda: layers.Dense(2),
            shape=(6, 6, 3),
        )  # fmt: skip

    x = random.uniform(size=(4, 6, 6, 3)).astype("float32")
    y = random.normal(size=(4, 2)).astype("float32")
    with strategy().scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    assert np.all(np.isfinite(model.fit(x, y, **ONCE).history["loss"]))
    plain = make()
    plain.set_weights(model.get_weights())
    want, got = plain.predict(x, verbose=0), model.predict(x, verbose=0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def batch_norm(synchronized: bool, replicas: int = 2, momentum: float = 0.99):
    with strategy(replicas).scope():
        model = build(
            lambda: layers.BatchNormalization(momentum=momentum, synchronized=synchronized),
            shape=(1,),
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def test_r12_plain_batch_norm_keeps_one_moving_mean_the_average_of_the_replicas():
    model = batch_norm(synchronized=False)
    x = np.array([[1.0], [1.0], [3.0], [3.0]], "float32")  # batch means 1 and 3
    model.train_on_batch(x, x)
    mean, variance = model.layers[0].moving_mean, model.layers[0].moving_variance
    np.testing.assert_allclose(mean.numpy(), [0.02], rtol=1e-6)
    np.testing.assert_allclose(variance.numpy(), [0.99], rtol=1e-6)


def test_plain_batch_norm_weighs_the_replicas_statistics_by_their_rows():
    model = batch_norm(synchronized=False)
    x = np.array([[1.0], [3.0], [8.0]], "float32")  # rows 2 + 1: means 2 and 8, variances 1 and 0
    model.train_on_batch(x, x)
    layer = model.layers[0]
    np.testing.assert_allclose(layer.moving_mean.numpy(), [0.01 * 4], rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), [0.99 + 0.01 * 2 / 3], rtol=1e-6)


@pytest.mark.parametrize("rows", [3, 8, 13])
def test_r14_the_groups_variance_is_mean_of_variances_plus_variance_of_means(rows):
    model = batch_norm(synchronized=True, replicas=4, momentum=0.0)
    layer = model.layers[0]
    for step in range(3):  # the identity holds on every step, also far from zero
        x = (random.normal(size=(rows, 1)) + 100 * step).astype("float32")
        model.train_on_batch(x, x)
        np.testing.assert_allclose(layer.moving_mean.numpy(), x.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(layer.moving_variance.numpy(), x.var(0), rtol=2e-3)
        if rows % 4 == 0:
            local = x.reshape(4, -1)
            identity = local.var(1).mean() + local.mean(1).var()
            np.testing.assert_allclose(layer.moving_variance.numpy(), [identity], rtol=2e-3)


class Masks(keras.layers.Layer):
    """Keeps which entries Dropout let through, in the prediction."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=7)

    def call(self, x):
        return self.dropout(x, training=True)


def draw(replicas: int, steps: int = 2) -> np.ndarray:
    with strategy(replicas).scope():
        model = build(Masks, shape=(64,))
    x = np.ones((replicas, 64), "float32")  # identical rows, one on each replica
    return np.stack([model.predict(x, verbose=0) for _ in range(steps)])


def test_synchronized_batch_norm_with_a_mask_equals_one_device():
    def make():
        return build(
            lambda: layers.Masking(),
            lambda: layers.BatchNormalization(synchronized=True),
            lambda: layers.Dense(2),
            shape=(5, 3),
        )

    x = sequences()
    x[0] = 0  # a row without a single valid step
    x[1:3, 2:] = 0
    compare(make, x, random.normal(size=(7, 5, 2)).astype("float32"))


def test_r30_dropout_masks_differ_between_replicas_and_steps_and_repeat_with_the_seed():
    first = draw(4)
    rows = first.reshape(-1, 64)
    assert len({row.tobytes() for row in rows}) == len(rows)
    np.testing.assert_array_equal(draw(4), first)
    # A replica draws by its id: two replicas draw what the first two of four draw.
    np.testing.assert_array_equal(draw(2), first[:, :2])
    assert set(np.unique(first)) == {0.0, 2.0}


def test_r30_a_model_with_dropout_builds_trains_and_repeats():
    def weights():
        with strategy().scope():
            model = build(lambda: layers.Dense(8), lambda: layers.Dropout(0.2),
                          lambda: layers.GaussianNoise(0.1), lambda: layers.Dense(1))  # fmt: skip
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.ones((4, 3), "float32")
        model.fit(x, np.ones((4, 1), "float32"), epochs=2, **ONCE)
        return model.get_weights()

    for first, second in zip(weights(), weights(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_recurrent_dropout_and_a_stateful_generator_train():
    with strategy().scope():
        model = build(lambda: layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2),
                      lambda: layers.Dense(1), shape=(5, 3))  # fmt: skip
        model.compile("sgd", "mse")
    history = model.fit(sequences(4), np.ones((4, 1), "float32"), epochs=2, **ONCE).history
    assert np.all(np.isfinite(history["loss"]))


def test_normalization_adapts_outside_and_applies_inside():
    x = random.normal(3, 2, size=(7, 3)).astype("float32")
    norm = layers.Normalization()
    norm.adapt(x)

    def make():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((3,)), norm, layers.Dense(2)])

    plain = make()
    want = plain.predict(x, verbose=0)
    with strategy().scope():
        inner = layers.Normalization()
        inner.adapt(x)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), inner, layers.Dense(2)])
    model.layers[1].set_weights(plain.layers[1].get_weights())
    np.testing.assert_allclose(model.predict(x, verbose=0), want, rtol=1e-5, atol=1e-6)
