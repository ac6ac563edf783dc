"""`fit` and its sisters on several replicas give what plain Keras gives on one device.

The batch of 4 does not divide 11 rows, nor does 3 divide it, so each epoch ends with short and with
empty replicas.
"""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from keras import layers

import stratagem

random = np.random.default_rng(0)
X = random.normal(size=(11, 3)).astype("float32")
Y = random.normal(size=(11, 2)).astype("float32")
LABELS = random.integers(0, 2, 11).astype("int32")
WEIGHTS = random.uniform(0.2, 2, 11).astype("float32")
ONCE = {"batch_size": 4, "shuffle": False, "verbose": 0}


def strategy(replicas: int = 2):
    return stratagem.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def close(got, want) -> None:
    """Same structure, same numbers."""
    got, want = keras.tree.flatten(got), keras.tree.flatten(want)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def compare(make, train, replicas: int = 2):
    """Runs `train(make())` plainly and under a strategy; compares what it returns and the weights.

    Returns the model that was trained under the strategy.
    """
    plain = make()
    want = train(plain)
    with strategy(replicas).scope():
        model = make()
    close(train(model), want)
    close(model.get_weights(), plain.get_weights())
    if plain.optimizer is not None:
        close([v.numpy() for v in model.optimizer.variables],
              [v.numpy() for v in plain.optimizer.variables])  # fmt: skip
    return model


def dense(rate=0.1, **compiled):
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])
        options = {"loss": "mse", "metrics": ["mae"], **compiled}
        model.compile(keras.optimizers.SGD(rate), **options)
        return model

    return make


def history(*args, **kwargs):
    return lambda model: model.fit(*args, **{**ONCE, **kwargs}).history


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_six_entry_points(replicas):
    def train(model):
        return [
            model.fit(X, Y, epochs=2, **ONCE).history,
            model.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True),
            model.predict(X, batch_size=4, verbose=0),
            model.train_on_batch(X[:5], Y[:5]),
            model.test_on_batch(X[:5], Y[:5], sample_weight=WEIGHTS[:5]),
            model.predict_on_batch(X[:5]),
            model.fit(X, Y, initial_epoch=1, epochs=3, **ONCE).history,
        ]

    compare(dense(), train, replicas)


def test_shuffling_takes_the_same_rows_as_plain_keras():
    def train(model):
        keras.utils.set_random_seed(5)
        return model.fit(X, Y, batch_size=4, epochs=2, verbose=0).history

    compare(dense(), train)


def test_validation_data_split_and_frequency():
    def train(model):
        return [
            model.fit(X, Y, validation_data=(X[:5], Y[:5], WEIGHTS[:5]), **ONCE).history,
            model.fit(X, Y, validation_split=0.4, epochs=2, validation_freq=2, **ONCE).history,
        ]

    compare(dense(), train, 3)


def test_sample_weight_with_weighted_metrics():
    make = dense(weighted_metrics=["mse", keras.metrics.RootMeanSquaredError()])
    compare(make, history(X, Y, sample_weight=WEIGHTS))


def test_sample_weight_under_mean_with_sample_weight_and_zero_weights():
    make = dense(loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    weights = WEIGHTS.copy()
    weights[[0, 1, 8]] = 0  # the first replica of the first batch weighs nothing
    compare(make, history(X, Y, sample_weight=weights))


@pytest.mark.parametrize("reduction", ["sum", "mean", "sum_over_batch_size"])
def test_reductions(reduction):
    make = dense(0.01, loss=keras.losses.MeanSquaredError(reduction=reduction))
    compare(make, history(X, Y), 3)


def test_class_weight():
    make = dense(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                 metrics=["accuracy"], weighted_metrics=["accuracy"])  # fmt: skip
    compare(make, history(X, LABELS, class_weight={0: 0.5, 1: 2.0}))


@pytest.mark.parametrize("replicas", [2, 3])
def test_several_outputs_losses_and_loss_weights(replicas):
    def make():
        keras.utils.set_random_seed(2)
        x = keras.Input((3,), name="x")
        shared = layers.Dense(4, "tanh")(x)
        heads = {"a": layers.Dense(2, name="a")(shared), "b": layers.Dense(2, name="b")(shared)}
        model = keras.Model({"x": x}, heads)
        model.compile(
            "sgd",
            loss={"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
            loss_weights={"a": 0.3, "b": 1.5},
            metrics={"a": ["mae"], "b": ["accuracy"]},
        )
        return model

    def train(model):
        targets = {"a": Y, "b": LABELS}
        weights = {"a": WEIGHTS, "b": WEIGHTS[::-1].copy()}
        return [
            model.fit({"x": X}, targets, sample_weight=weights, epochs=2, **ONCE).history,
            model.predict({"x": X}, batch_size=4, verbose=0),
        ]

    compare(make, train, replicas)


@pytest.mark.parametrize("steps", [2, 5])
def test_steps_per_execution(steps):
    def train(model):
        return [
            model.fit(X, Y, epochs=2, **ONCE).history,
            model.evaluate(X, Y, batch_size=4, verbose=0),
            model.predict(X, batch_size=4, verbose=0),
        ]

    compare(dense(steps_per_execution=steps), train)


def test_auto_scale_loss_and_jit_compile_false():
    compare(dense(jit_compile=False), history(X, Y))


def test_batch_level_logs():
    def train(model):
        seen = []
        record = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append((batch, logs["loss"], logs["mae"])),
            on_test_batch_end=lambda batch, logs: seen.append((batch, logs["loss"])),
            on_predict_batch_end=lambda batch, logs: seen.append(logs["outputs"]),
        )
        model.fit(X, Y, callbacks=[record], **ONCE)
        model.evaluate(X, Y, batch_size=4, verbose=0, callbacks=[record])
        model.predict(X, batch_size=4, verbose=0, callbacks=[record])
        assert [len(part) for part in seen[-3:]] == [4, 4, 3]
        return seen

    compare(dense(), train)


def test_early_stopping_restores_the_best_weights():
    def train(model):
        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        data = {"validation_data": (X[::-1], Y), "epochs": 8, "callbacks": [stop]}
        past = model.fit(X, Y, **data, **ONCE).history
        assert 1 < len(past["loss"]) < 8
        return past

    compare(dense(1.0), train)


def test_stop_training_in_a_batch_and_learning_rate_schedules():
    def train(model):
        batches = []

        def maybe_stop(batch, logs):
            batches.append(batch)
            model.stop_training = len(batches) == 5

        calls = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.LambdaCallback(on_train_batch_end=maybe_stop),
        ]
        return model.fit(X, Y, epochs=3, callbacks=calls, **ONCE).history

    compare(dense(), train)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    compare(dense(schedule), history(X, Y, epochs=2))


def test_reduce_on_plateau_and_terminate_on_nan():
    def train(model):
        plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0)
        nan = keras.callbacks.TerminateOnNaN()
        bad = np.where(np.arange(11)[:, None] == 9, np.nan, Y)
        past = model.fit(X, Y, epochs=3, callbacks=[plateau], **ONCE).history
        ended = model.fit(X, bad, epochs=3, callbacks=[nan], **ONCE).history
        assert len(ended["loss"]) == 1
        return past

    compare(dense(metrics=[]), train)


def test_model_checkpoint_and_csv_logger_write_what_plain_keras_writes(tmp_path):
    def train(model):
        path = tmp_path / f"{id(model)}.weights.h5"
        calls = [
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2),
            keras.callbacks.CSVLogger(tmp_path / f"{id(model)}.csv"),
        ]
        model.fit(X, Y, epochs=2, callbacks=calls, **ONCE)
        saved = dense()()
        saved.load_weights(path)
        table = (tmp_path / f"{id(model)}.csv").read_text().splitlines()
        numbers = [float(v) for row in table[1:] for v in row.split(",") if v != "NA"]
        return [saved.get_weights(), numbers]

    compare(dense(), train)


def test_verbose_output_shows_the_global_loss(capsys):
    with strategy().scope():
        model = dense(0.0)()
    model.fit(X, Y, batch_size=4, epochs=1, verbose=2, shuffle=False)
    loss = model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
    assert f"loss: {loss:.4f}" in capsys.readouterr().out


class CustomTrainStep(keras.Sequential):
    """Keras' documented way to own the step on JAX."""

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        grad = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, aux), grads = grad(
            trainable, non_trainable, metrics, x, y, None, training=True,
            optimizer_variables=optimizer,
        )  # fmt: skip
        unscaled, y_pred, non_trainable, metrics = aux
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        new_metrics = []
        logs = {}
        for metric in self.metrics:
            count = len(metric.variables)
            own = metrics[len(new_metrics) : len(new_metrics) + count]
            if metric.name == "loss":
                own = metric.stateless_update_state(own, loss)
            else:
                own = metric.stateless_update_state(own, y, y_pred)
            logs[metric.name] = metric.stateless_result(own)
            new_metrics += own
        logs["average"] = keras.ops.mean(y_pred)  # a plain number: averaged by rows
        return logs, (trainable, non_trainable, optimizer, new_metrics)


def test_custom_train_step():
    def make():
        keras.utils.set_random_seed(1)
        model = CustomTrainStep([keras.Input((3,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def train(model):
        seen = []
        record = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append((logs["loss"], logs["average"]))
        )
        return [model.fit(X, Y, callbacks=[record], **ONCE).history["loss"], seen]

    compare(make, train)


class CustomLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        error = keras.ops.mean(keras.ops.square(y - y_pred), axis=-1)
        return keras.ops.mean(error * keras.ops.exp(x[:, 0])) + sum(self.losses)


def test_custom_compute_loss_with_a_regularizer():
    def make():
        keras.utils.set_random_seed(1)
        model = CustomLoss([keras.Input((3,)), layers.Dense(2, kernel_regularizer="l2")])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    compare(make, history(X, Y, epochs=2))


def test_run_eagerly_is_refused():
    with strategy().scope():
        model = dense(run_eagerly=True)()
    with pytest.raises(ValueError, match=r"(?s)run_eagerly=False.*sequential.*jax.debug.print"):
        model.fit(X, Y, verbose=0)


def test_a_batch_without_rows_or_with_unequal_rows_is_refused():
    with strategy().scope():
        model = dense()()
    with pytest.raises(ValueError, match=r"same number of rows, at least one.*Check the dataset"):
        model.predict_on_batch(X[:0])


def test_ema_weights_are_swapped_in_for_validation():
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
        return model

    def train(model):
        swap = keras.callbacks.SwapEMAWeights()
        data = {"epochs": 2, "validation_data": (X, Y), "callbacks": [swap]}
        return model.fit(X, Y, **data, **ONCE).history

    compare(make, train)


def test_a_stateful_layer_is_refused_by_name():
    with strategy().scope():
        model = keras.Sequential([
            keras.Input(batch_shape=(4, 5, 3)),
            layers.LSTM(2, stateful=True, name="remembers"),
        ])  # fmt: skip
        model.compile("sgd", "mse")
    x, y = np.ones((4, 5, 3), "float32"), np.ones((4, 2), "float32")
    with pytest.raises(ValueError, match=r"(?s)stateful=False.*'remembers'.*OneDeviceStrategy"):
        model.fit(x, y, batch_size=4, verbose=0)


def test_a_keras_distribution_besides_the_strategy_is_refused():
    with strategy().scope():
        model = dense()()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        with pytest.raises(ValueError, match=r"(?s)one way to distribute.*DataParallel.*None"):
            model.predict(X, verbose=0)
    finally:
        keras.distribution.set_distribution(None)
