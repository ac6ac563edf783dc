"""Metrics of all kinds under parameter servers: those of one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

from stratagem.coordinator import ClusterCoordinator

X = np.random.default_rng(0).normal(size=(70, 6)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True) + np.arange(70)[:, None] / 10


class Kept(keras.metrics.Metric):
    """The state is no sum: a maximum, a moving average, and the value of the last batch."""

    def __init__(self, kind: str):
        super().__init__(name=kind)
        self.kind = kind
        self.kept = self.add_variable((), "zeros", name="kept")

    def update_state(self, y, p, sample_weight=None):
        error = ops.abs(y - p)
        if self.kind == "largest":
            self.kept.assign(ops.maximum(self.kept, ops.max(error)))
        elif self.kind == "moving":
            self.kept.assign(0.9 * self.kept + 0.1 * ops.mean(error))
        else:
            self.kept.assign(ops.mean(error))

    def result(self):
        return self.kept + 0.0


def rmse(y, p):
    """One number of a batch."""
    return ops.sqrt(ops.mean(ops.square(y - p)))


def run(masked=False):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    x = keras.layers.Masking()(ops.reshape(inputs, (-1, 3, 2))) if masked else inputs
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    metrics = [Kept("largest"), Kept("moving"), Kept("last"), "mae"]
    metrics += [] if masked else [rmse]  # Keras cannot mask one number
    model.compile("sgd", loss="mse", metrics=metrics)
    y = np.repeat(Y[:, None], 3, axis=1) if masked else Y
    past = model.fit(X, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return past, model.evaluate(X, y, batch_size=16, verbose=0, return_dict=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("workers", "mode"), [(1, "asynchronous"), (2, "synchronous")])
def test_metrics_whose_state_is_no_sum_are_updated_with_whole_batches(
    served, workers, mode, masked
):
    past, found = run(masked)
    with served(workers, 1, consistency=mode).scope():
        ours, at_end = run(masked)
    for name, values in past.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, err_msg=name)
    for name, value in found.items():
        np.testing.assert_allclose(at_end[name], value, rtol=1e-4, err_msg=name)


def test_in_a_scheduled_function_they_are_an_error(served):
    coordinator = ClusterCoordinator(served(1, 1))
    metric = Kept("largest")
    with pytest.raises(ValueError, match="Got 'largest' .Kept., whose update does something else"):
        coordinator.schedule(lambda: metric.update_state(np.ones(2), np.zeros(2)))
    mean = keras.metrics.Mean()
    coordinator.schedule(lambda: mean.update_state(np.array([1.0, 3.0])))
    coordinator.join()
    assert float(mean.result()) == 2.0


def test_train_on_batch_has_the_metrics_of_the_whole_batch(served):
    def steps():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse", metrics=["mae", Kept("largest")])
        cuts = [slice(i, i + 10) for i in (0, 10, 20)]
        return [model.train_on_batch(X[c], Y[c], return_dict=True) for c in cuts]

    expected = steps()
    with served(2, 1, consistency="synchronous").scope():
        found = steps()
    for one, other in zip(found, expected, strict=True):
        assert {k: float(v) for k, v in one.items()} == pytest.approx(other, rel=1e-4)


def test_the_scale_of_losses_is_that_of_one_device(served):
    """One worker's part overflows: the counter of good steps begins anew, once, for all."""

    def scales():
        keras.utils.set_random_seed(3)
        dense = keras.layers.Dense(1, dtype="mixed_float16")
        model = keras.Sequential([keras.Input((6,)), dense])
        inner = keras.optimizers.SGD(0.001)
        optimizer = keras.optimizers.LossScaleOptimizer(
            inner, initial_scale=1024.0, dynamic_growth_steps=3
        )
        model.compile(optimizer, loss="mse")
        large = Y[:16].copy()
        large[2] = 1e30
        for y in (Y[:16], large, *[Y[:16]] * 5):
            model.fit(X[:16], y, batch_size=16, shuffle=False, verbose=0)
            yield float(optimizer.dynamic_scale.numpy()), int(optimizer.step_counter.numpy())

    expected = list(scales())
    with served(3, 1, consistency="synchronous").scope():
        assert list(scales()) == expected
