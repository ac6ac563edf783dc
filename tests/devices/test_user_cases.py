"""Cases that people who train on many devices have reported, by their number in our list.

Each test has the numbers of the report. Cases that need several processes are elsewhere.
"""

from __future__ import annotations

import logging

import keras
import numpy as np
import pytest
from keras import layers, ops

import stratagem
from stratagem.errors import ReplicaDependentWriteError

random = np.random.default_rng(0)


def strategy(replicas: int = 2):
    return stratagem.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def one_weight(optimizer, loss="mse", **layer):
    """A model of one weight, w = 1, that multiplies its input."""
    model = keras.Sequential([
        keras.Input((1,)),
        layers.Dense(1, use_bias=False, kernel_initializer="ones", **layer),
    ])  # fmt: skip
    model.compile(optimizer, loss)
    return model


def test_r01_five_rows_in_batches_of_four_on_two_replicas():
    x = np.arange(1, 6, dtype="float32")[:, None]
    with strategy().scope():
        model = one_weight(keras.optimizers.SGD(0.0))
    loss = model.fit(x, 0 * x, batch_size=4, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(loss, [(1 + 4 + 9 + 16 + 25) / 5], rtol=1e-6)


def test_r01_the_empty_replica_adds_no_gradient():
    with strategy().scope():
        model = one_weight(keras.optimizers.SGD(0.1))
    model.train_on_batch(np.ones((1, 1), "float32"), np.zeros((1, 1), "float32"))
    np.testing.assert_allclose(model.get_weights()[0], [[1 - 0.1 * 2]], rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_r04_confusion_counts_add_up_to_all_1000_rows(replicas):
    x = random.normal(size=(1000, 1)).astype("float32")
    y = random.integers(0, 2, (1000, 1)).astype("float32")
    counts = [keras.metrics.TruePositives(), keras.metrics.FalsePositives(),
              keras.metrics.TrueNegatives(), keras.metrics.FalseNegatives()]  # fmt: skip
    with strategy(replicas).scope():
        model = keras.Sequential([keras.Input((1,)), layers.Activation("sigmoid")])
        model.compile(loss="mse", metrics=[type(m)() for m in counts])
    found = model.evaluate(x, y, batch_size=8, verbose=0)[1:]
    assert sum(found) == 1000
    for count, value in zip(counts, found, strict=True):
        count.update_state(y, keras.activations.sigmoid(x))
        assert value == count.result()


@pytest.mark.parametrize(("rows", "batch"), [(2, 32), (68_531, 16_384)])
def test_r09_predict_returns_every_row_in_order_on_eight_replicas(rows, batch):
    x = np.arange(rows, dtype="float32")[:, None]
    with strategy(8).scope():
        model = keras.Sequential([keras.Input((1,)), layers.Rescaling(0.5)])
    np.testing.assert_array_equal(model.predict(x, batch_size=batch, verbose=0), x * 0.5)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_r11_accuracy_is_not_summed_over_replicas(replicas):
    labels = np.array([0] * 8 + [1], "int32")  # 8 of 9 are right
    x = np.tile([[2.0, 1.0]], (9, 1)).astype("float32")
    with strategy(replicas).scope():
        model = keras.Sequential(
            [keras.Input((2,)), layers.Dense(2, kernel_initializer="identity")]
        )
        model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy",
                      metrics=["accuracy"])  # fmt: skip
    history = model.fit(x, labels, batch_size=4, verbose=0).history
    np.testing.assert_allclose(history["accuracy"], [8 / 9], rtol=1e-6)
    assert np.isfinite(history["loss"][0])


def test_r15_f1_stays_what_one_device_says():
    y_true = (random.uniform(size=(21, 1)) > 0.5).astype("float32")
    y_pred = np.clip(y_true + random.normal(0, 0.4, (21, 1)), 0, 1).astype("float32")
    plain = keras.metrics.F1Score(threshold=0.5)
    plain.update_state(y_true, y_pred)
    with strategy().scope():
        model = keras.Sequential([keras.Input((1,)), layers.Activation("linear")])
        f1 = keras.metrics.F1Score(threshold=0.5, name="f1")
        model.compile(loss="mse", metrics=[f1, keras.metrics.AUC(name="auc")])
    scores = model.evaluate(y_pred, y_true, batch_size=8, verbose=0, return_dict=True)
    np.testing.assert_allclose(scores["f1"], plain.result(), rtol=1e-6)
    assert 0.5 < scores["auc"] <= 1


class Linear(keras.layers.Layer):
    """Weights w, output `x * w`: the gradient of its sum by w is x."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, x):
        return x * self.w


def linear_model(optimizer, width: int):
    model = keras.Sequential([keras.Input((width,)), Linear()])
    model.compile(optimizer, lambda y_true, y_pred: ops.sum(y_pred, axis=-1))
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_r17_the_global_norm_is_clipped_after_aggregation(replicas):
    # Mean of the rows' gradients: [3, 4], norm 5, so the step is [0.6, 0.8].
    x = np.array([[6, 0], [0, 8]], "float32")
    with strategy(replicas).scope():
        model = linear_model(keras.optimizers.SGD(1.0, global_clipnorm=1.0), 2)
    model.train_on_batch(x, np.zeros((2, 1), "float32"))
    np.testing.assert_allclose(model.get_weights()[0], [-0.6, -0.8], rtol=1e-6)


def test_r17_in_a_custom_loop_the_summed_gradient_is_clipped():
    two = strategy()
    with two.scope():
        w = keras.Variable([0.0, 0.0])
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=1.0)
        optimizer.build([w])
    scaled = stratagem.PerReplica([np.array([3, 0], "float32"), np.array([0, 4], "float32")])
    two.run(lambda g: optimizer.apply([g], [w]), args=(scaled,))
    np.testing.assert_allclose(w.numpy(), [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("clip", [{"clipvalue": 0.5}, {"clipnorm": 0.5}])
def test_r18_clipping_by_value_and_by_norm_has_its_effect(replicas, clip):
    x = np.full((2, 1), 4, "float32")
    with strategy(replicas).scope():
        model = linear_model(keras.optimizers.SGD(1.0, **clip), 1)
    model.train_on_batch(x, np.zeros((2, 1), "float32"))
    np.testing.assert_allclose(model.get_weights()[0], [-0.5], rtol=1e-6)


def test_r19_scaled_losses_add_up_to_the_mean():
    two = strategy()
    losses = stratagem.PerReplica([np.array([2, 3], "float32"), np.array([4, 5], "float32")])
    scaled = two.run(
        lambda rows: stratagem.nn.compute_average_loss(rows, global_batch_size=4), args=(losses,)
    )
    np.testing.assert_allclose(scaled.values, [1.25, 2.25])
    assert float(two.reduce("SUM", scaled, axis=None)) == 3.5
    assert float(two.reduce("MEAN", scaled, axis=None)) == 1.75


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_r21_a_regularizer_is_counted_once(replicas):
    with strategy(replicas).scope():
        model = one_weight(
            keras.optimizers.SGD(1.0),
            loss=lambda y_true, y_pred: ops.zeros_like(y_pred)[:, 0],
            kernel_regularizer=keras.regularizers.L2(0.01),
        )
    rows = np.ones((4, 1), "float32")
    loss = model.train_on_batch(rows, rows)
    np.testing.assert_allclose(loss, 0.01, rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[0], [[1 - 0.02]], rtol=1e-6)


def test_r23_a_model_called_once_in_scope_before_fit():
    with strategy().scope():
        model = keras.Sequential([layers.Dense(1)])
        model(np.ones((2, 3), "float32"))
        model.compile("adam", "mse")
    history = model.fit(np.ones((5, 3), "float32"), np.ones((5, 1), "float32"), verbose=0).history
    assert np.isfinite(history["loss"][0])
    assert all(stratagem.variables.home(v) for v in model.optimizer.variables)


@pytest.mark.parametrize(
    ("aggregation", "value"), [("sum", 2), ("mean", 1), ("only_first_replica", 1)]
)
def test_r25_a_counter_that_both_replicas_count_up(aggregation, value):
    two = strategy()
    with two.scope():
        counter = keras.Variable(0.0, trainable=False, aggregation=aggregation)
    two.run(lambda: counter.assign_add(1.0))
    assert counter.numpy() == value


def test_r25_without_an_aggregation_a_write_that_differs_names_the_choices():
    two = strategy()
    with two.scope():
        counter = keras.Variable(0.0, trainable=False, name="counter")

    def step():
        replica = stratagem.get_replica_context().replica_id_in_sync_group
        counter.assign_add(ops.cast(replica, "float32"))

    with pytest.raises(ReplicaDependentWriteError) as error:
        two.run(step)
    for word in ("counter", "'sum'", "'mean'", "'only_first_replica'"):
        assert word in str(error.value)


def test_r33_an_embedding_s_gradient_adds_rows_once():
    two = strategy()
    with two.scope():
        table = keras.Variable(np.zeros((10, 4), "float32"))

    def step(ids):
        with stratagem.GradientTape() as tape:
            loss = ops.sum(ops.take(table, ids, axis=0))
        return stratagem.get_replica_context().all_reduce("SUM", tape.gradient(loss, table))

    ids = stratagem.PerReplica([np.array([1, 2], "int32"), np.array([2, 3], "int32")])
    gradient = np.asarray(two.run(step, args=(ids,)).values[0])
    np.testing.assert_array_equal(gradient[:, 0], [0, 1, 2, 1, 0, 0, 0, 0, 0, 0])
    assert (gradient == gradient[:, :1]).all()


def test_r33_sparse_gradients_keep_their_duplicates():
    two = strategy()
    slices = [
        stratagem.IndexedSlices(np.ones((2, 4), "float32"), np.array(ids, "int32"), (10, 4))
        for ids in ([1, 2], [2, 3])
    ]

    def step(values, ids):
        joined = stratagem.get_replica_context().all_reduce(
            "SUM", stratagem.IndexedSlices(values, ids, (10, 4))
        )
        return joined.to_dense()

    parts = (stratagem.PerReplica([s.values for s in slices]),
             stratagem.PerReplica([s.indices for s in slices]))  # fmt: skip
    dense = np.asarray(two.run(step, args=parts).values[1])
    np.testing.assert_array_equal(dense[:, 0], [0, 1, 2, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_g2_batches_of_1_3_and_5_rows_on_two_devices(rows):
    x = random.normal(size=(rows, 1)).astype("float32")

    def losses(model):
        return [model.train_on_batch(x, 0 * x), model.test_on_batch(x, 0 * x)]

    with strategy().scope():
        model = one_weight(keras.optimizers.SGD(0.1))
    plain = one_weight(keras.optimizers.SGD(0.1))
    np.testing.assert_allclose(losses(model), losses(plain), rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-6)


def test_g5_initial_weights_are_the_same_on_all_replicas_and_without_a_strategy():
    keras.utils.set_random_seed(4)
    plain = layers.Dense(3)
    plain.build((None, 2))
    keras.utils.set_random_seed(4)
    with strategy(4).scope():
        dense = layers.Dense(3)
        dense.build((None, 2))
    for shard in dense.kernel.value.addressable_shards:
        np.testing.assert_array_equal(shard.data, plain.kernel.numpy())


def test_a_step_says_once_how_many_rows_it_takes_and_where(caplog):
    caplog.set_level(logging.INFO, "stratagem")
    with strategy().scope():
        model = one_weight("sgd")
    rows = np.ones((10, 1), "float32")
    model.fit(rows, rows, batch_size=4, verbose=0)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("train:")]
    assert len(said) == 1
    assert "4 rows" in said[0]
    assert "/device:CPU:1" in said[0]
