"""A `fit` of a job that goes on: its history is whole, and callbacks are told of each epoch."""

from __future__ import annotations

import logging
import math

import keras
import numpy as np
import pytest

import stratagem
from stratagem.coordinator.record import Record
from stratagem.utils import DatasetCreator

ROWS, BATCH, EPOCHS = 32, 8, 3
X = np.arange(ROWS, dtype=np.float32)[:, None] / ROWS


class Left(Exception):
    """Stands for the end of the coordinator's process."""


class Leaves(keras.callbacks.Callback):
    """Leaves at some call, and reads what callbacks read.

    Args:
        at: name of the method that does.
        epoch: in which epoch.
    """

    def __init__(self, at="", epoch=0):
        super().__init__()
        self.at, self.epoch, self.now = at, epoch, 0
        self.losses, self.batches = [], []

    def look(self, name):
        if name == self.at and self.now == self.epoch:
            raise Left

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(logs["loss"])
        if batch == 1:
            self.look("train")

    def on_test_batch_end(self, batch, logs=None):
        self.look("test")

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])
        logs["doubled"] = 2 * logs["loss"]
        self.look("end")


def model_of(metrics=()):
    """As in each process of the job."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="d")], name="m")
    model.compile(keras.optimizers.SGD(name="sgd"), "mse", metrics=list(metrics))
    return model


@pytest.fixture
def fit(cluster, tmp_path, monkeypatch):
    """Begins a process of the job, and calls `fit` there; `Left` leaves that process behind."""
    monkeypatch.setenv("STRATAGEM_STATE_DIR", str(tmp_path))
    made, strategies = cluster(1, 1), []

    def run(leaves, metrics=(), after=lambda model: None, data=None):
        strategy = stratagem.ParameterServerStrategy(made.resolver)
        strategies.append(strategy)
        with strategy.scope():
            model = model_of(metrics)
        given = {"x": X, "y": X, "batch_size": BATCH} if data is None else {"x": data}
        try:
            history = model.fit(
                **given, epochs=EPOCHS, validation_data=(X, X), validation_batch_size=BATCH,
                verbose=0, callbacks=[leaves],
            )  # fmt: skip
            after(model)
        except Left:
            strategy._leave(finished=False, stop_tasks=False)
            return None
        assert model.history is history
        return history

    yield run
    strategies[-1].close()


def whole(history):
    """The numbers of a history that has every epoch."""
    assert history.epoch == list(range(EPOCHS))
    assert set(history.history) == {"loss", "doubled", "val_loss"}
    assert {len(each) for each in history.history.values()} == {EPOCHS}
    return np.asarray([history.history[name] for name in ("loss", "doubled", "val_loss")])


@pytest.fixture
def straight(cluster):
    """The history of a job that is never left."""
    strategy = stratagem.ParameterServerStrategy(cluster(1, 1).resolver, state_dir="")
    with strategy.scope():
        model = model_of()
    history = model.fit(
        X, X, batch_size=BATCH, epochs=EPOCHS, validation_data=(X, X), verbose=0,
        callbacks=[Leaves()],
    )  # fmt: skip
    strategy.close()
    return whole(history)


@pytest.mark.parametrize("at", ["test", "end"])
def test_an_epoch_whose_training_was_through_is_validated_again(fit, straight, at):
    """With the logs of its own training; and those of the epochs before it are there, too."""
    assert fit(Leaves(at, 1)) is None
    assert fit(Leaves("train", 2)) is None  # a second time, in the last epoch
    callback = Leaves()
    history = whole(fit(callback))
    np.testing.assert_allclose(history[:, :2], straight[:, :2], rtol=1e-6)
    np.testing.assert_allclose(history[2], straight[2], rtol=1e-6)  # nothing was trained twice
    np.testing.assert_allclose(callback.losses, history[0, 2:], rtol=1e-6)


def test_batches_that_were_finished_report_as_well(fit, straight):
    """What their epoch had come to; else that of the batches from here on, so far."""
    assert fit(Leaves("test", 1)) is None
    callback = Leaves("train", 2)
    assert fit(callback) is None
    again = callback.batches[: ROWS // BATCH]
    np.testing.assert_allclose(again, [straight[0, 1]] * len(again), rtol=1e-6)
    callback = Leaves()
    fit(callback)
    assert callback.batches[0] == 0.0  # of no batch yet
    assert callback.batches[-1] > 0.0


def test_a_fit_that_was_over_returns_its_history_at_once(fit, straight):
    def left(model):
        raise Left

    assert fit(Leaves(), after=left) is None
    callback = Leaves()
    np.testing.assert_allclose(whole(fit(callback)), straight, rtol=1e-6)
    assert (callback.batches, callback.losses) == ([], [])


def test_what_workers_read_for_themselves_is_trained_again_and_reported(fit):
    """Nobody knows which batches those were; the logs are those of this time."""

    def batches(context):
        return ((X[i : i + BATCH], X[i : i + BATCH]) for i in range(0, ROWS, BATCH))

    assert fit(Leaves("test", 1), data=DatasetCreator(batches)) is None
    history = fit(Leaves(), data=DatasetCreator(batches)).history
    assert [len(each) for each in history.values()] == [EPOCHS] * 3
    assert history["loss"][0] > history["loss"][1] > history["loss"][2] > 0


def test_a_metric_of_several_numbers_is_kept(fit):
    score = keras.metrics.F1Score(average=None, threshold=0.5)
    assert fit(Leaves("test", 1), metrics=[score]) is None
    history = fit(Leaves(), metrics=[keras.metrics.F1Score(average=None, threshold=0.5)]).history
    assert [np.shape(x) for x in history["f1_score"]] == [(1,)] * EPOCHS
    assert [np.shape(x) for x in history["val_f1_score"]] == [(1,)] * EPOCHS


def test_what_was_not_noted_in_time_is_not_made_up(fit, monkeypatch, caplog):
    """All batches were finished, and the coordinator died before it could note the logs."""
    with monkeypatch.context() as patch:
        patch.setattr(Record, "logs", lambda self, key, logs: None)
        assert fit(Leaves("test", 0)) is None
    with caplog.at_level(logging.WARNING, logger="stratagem"):
        history = fit(Leaves()).history
    assert "All batches of fit 0 epoch 0 were finished when this job was left" in caplog.text
    assert [math.isnan(x) for x in history["loss"]] == [True, False, False]
    assert not any(map(math.isnan, history["val_loss"]))
