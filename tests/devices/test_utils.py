"""SidecarEvaluator, and DatasetCreator where the model trains in this process."""

from __future__ import annotations

import logging
import os

import keras
import numpy as np
import pytest

import stratagem
from stratagem.errors import PeerTimeoutError
from stratagem.utils import DatasetCreator, SidecarEvaluator, SidecarEvaluatorModelExport

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)
Y = X.sum(axis=1, keepdims=True)


def make_model(compiled=True):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    if compiled:
        several = keras.metrics.F1Score(average=None, threshold=0.5)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae", several])
    return model


def old(path):
    """A file that was written some time ago."""
    os.utime(path, (1e9, 1e9))


@pytest.mark.parametrize("kind", ["a.weights.h5", "a.keras", "checkpoint", "with optimizer"])
def test_it_evaluates_what_was_saved(tmp_path, kind, caplog):
    trained = make_model()
    trained.fit(X, Y, verbose=0)
    if kind == "checkpoint":
        stratagem.train.Checkpoint(model=trained).save(tmp_path / "ckpt")
    elif kind == "with optimizer":
        checkpoint = stratagem.train.Checkpoint(model=trained, optimizer=trained.optimizer)
        checkpoint.save(tmp_path / "ckpt")
    else:
        save = trained.save if kind.endswith("keras") else trained.save_weights
        save(tmp_path / kind)
        old(tmp_path / kind)
    expected = trained.evaluate(X, Y, verbose=0, return_dict=True)
    export = SidecarEvaluatorModelExport(tmp_path / "best" / "{mae:.0f}.keras", monitor="mae")
    (tmp_path / "best").mkdir()
    evaluator = SidecarEvaluator(
        make_model(), (X, Y), tmp_path, max_evaluations=1, callbacks=[export], seconds=5.0
    )
    with caplog.at_level(logging.INFO, "stratagem"):
        found = evaluator.start()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)
    assert "Evaluation 1, of" in caplog.text
    assert len(list((tmp_path / "best").iterdir())) == 1


def test_it_does_not_wait_for_ever(tmp_path):
    evaluator = SidecarEvaluator(make_model(), (X, Y), tmp_path / "none", seconds=0.2)
    with pytest.raises(PeerTimeoutError, match=r"Expected a new checkpoint in .*none within 0\.2"):
        evaluator.start()


def test_a_damaged_checkpoint_is_left_out(tmp_path, caplog):
    (tmp_path / "a.weights.h5").write_bytes(b"nothing")
    old(tmp_path / "a.weights.h5")
    evaluator = SidecarEvaluator(make_model(), (X, Y), tmp_path, seconds=0.2)
    with pytest.raises(PeerTimeoutError):
        evaluator.start()
    assert "Leaves out the checkpoint" in caplog.text


def test_what_they_refuse():
    with pytest.raises(ValueError, match="Expected a compiled model"):
        SidecarEvaluator(make_model(compiled=False), (X, Y), "x")
    with pytest.raises(ValueError, match="mode: expected"):
        SidecarEvaluatorModelExport("x", mode="auto")
    with pytest.raises(ValueError, match="monitor: expected a metric"):
        SidecarEvaluatorModelExport("x", monitor="auc").on_test_end({"loss": 1.0})
    with pytest.raises(ValueError, match=r"that is one number, \['loss'\]. Got 'f1'"):
        SidecarEvaluatorModelExport("x", monitor="f1").on_test_end({"loss": 1.0, "f1": np.ones(2)})
    with pytest.raises(TypeError, match="dataset_fn: expected a function"):
        DatasetCreator([1])
    with pytest.raises(TypeError, match="input_options: expected"):
        DatasetCreator(lambda context: [], 3)


def test_a_creator_in_one_process():
    model = make_model()

    def dataset(context):
        assert context.num_input_pipelines == 1
        return [(X[:4], Y[:4]), (X[4:], Y[4:])]

    strategy = stratagem.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        model = make_model()
    model.fit(DatasetCreator(dataset), epochs=2, verbose=0, steps_per_epoch=2)
    assert int(model.optimizer.iterations.numpy()) == 4
