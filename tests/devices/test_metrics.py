"""Metrics under a strategy equal one device's, whatever their state is (R11, R15, G3)."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import stratagem
from stratagem import variables

# Keras' IoU metrics ask JAX for int64, with or without a strategy.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")

ROWS, CLASSES = 11, 4  # uneven on 2 and on 4 replicas


def data(kind: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    scores = random.random((ROWS, CLASSES), dtype="float32")
    scores /= scores.sum(axis=1, keepdims=True)
    labels = random.integers(0, CLASSES, ROWS).astype("int32")
    one_hot = np.eye(CLASSES, dtype="float32")[labels]
    binary = random.integers(0, 2, (ROWS, 1)).astype("float32")
    return {
        "one_hot": (one_hot, scores),
        "sparse": (labels, scores),
        "binary": (binary, scores[:, :1] * 2),
        "signs": (np.sign(one_hot - 0.5), scores * 2 - 0.5),
        "real": (random.random((ROWS, CLASSES), dtype="float32") + 0.1, scores + 0.1),
        "ids": (labels, random.integers(0, CLASSES, ROWS).astype("int32")),
        "values": (scores[:, 0],) * 2,
    }[kind]


M = keras.metrics
# Every class of keras.metrics, with arguments that it takes and the kind of data it is made for.
ALL = {
    M.Accuracy: ("ids", {}),
    M.AUC: ("binary", {"num_thresholds": 20}),
    M.BinaryAccuracy: ("binary", {}),
    M.BinaryCrossentropy: ("binary", {}),
    M.BinaryIoU: ("binary", {}),
    M.CategoricalAccuracy: ("one_hot", {}),
    M.CategoricalCrossentropy: ("one_hot", {}),
    M.CategoricalHinge: ("one_hot", {}),
    M.ConcordanceCorrelation: ("real", {}),
    M.CosineSimilarity: ("real", {}),
    M.F1Score: ("one_hot", {"average": "macro"}),
    M.FBetaScore: ("one_hot", {"beta": 0.5}),
    M.FalseNegatives: ("binary", {}),
    M.FalsePositives: ("binary", {}),
    M.Hinge: ("signs", {}),
    M.IoU: ("ids", {"num_classes": CLASSES, "target_class_ids": [0, 1]}),
    M.KLDivergence: ("one_hot", {}),
    M.LogCoshError: ("real", {}),
    M.MeanAbsoluteError: ("real", {}),
    M.MeanAbsolutePercentageError: ("real", {}),
    M.MeanIoU: ("ids", {"num_classes": CLASSES}),
    M.MeanSquaredError: ("real", {}),
    M.MeanSquaredLogarithmicError: ("real", {}),
    M.OneHotIoU: ("one_hot", {"num_classes": CLASSES, "target_class_ids": [1]}),
    M.OneHotMeanIoU: ("one_hot", {"num_classes": CLASSES}),
    M.PearsonCorrelation: ("real", {}),
    M.Poisson: ("real", {}),
    M.Precision: ("binary", {}),
    M.PrecisionAtRecall: ("binary", {"recall": 0.5, "num_thresholds": 20}),
    M.R2Score: ("real", {}),
    M.Recall: ("binary", {}),
    M.RecallAtPrecision: ("binary", {"precision": 0.5, "num_thresholds": 20}),
    M.RootMeanSquaredError: ("real", {}),
    M.SensitivityAtSpecificity: ("binary", {"specificity": 0.5, "num_thresholds": 20}),
    M.SparseCategoricalAccuracy: ("sparse", {}),
    M.SparseCategoricalCrossentropy: ("sparse", {}),
    M.SparseTopKCategoricalAccuracy: ("sparse", {"k": 2}),
    M.SpecificityAtSensitivity: ("binary", {"sensitivity": 0.5, "num_thresholds": 20}),
    M.SquaredHinge: ("signs", {}),
    M.TopKCategoricalAccuracy: ("one_hot", {"k": 2}),
    M.TrueNegatives: ("binary", {}),
    M.TruePositives: ("binary", {}),
}
BY_VALUES = (M.Mean, M.Sum, M.MeanMetricWrapper)
ABSTRACT = (M.Metric,)


def test_the_table_names_every_class_of_keras_metrics():
    classes = {
        getattr(M, name)
        for name in dir(M)
        if isinstance(getattr(M, name), type) and issubclass(getattr(M, name), M.Metric)
    }
    assert classes == {*ALL, *BY_VALUES, *ABSTRACT}


def update_all(strategy, metrics, feeds) -> None:
    """Updates each metric with its rows, twice, in one step of the strategy."""
    replicas = strategy.num_replicas_in_sync

    def split(array):
        return stratagem.PerReplica(np.array_split(array, replicas)) if replicas > 1 else array

    def step(parts):
        for metric, part in zip(metrics, parts, strict=True):
            metric.update_state(*part)

    parts = [tuple(split(a) for a in feed) for feed in feeds]
    for _ in range(2):
        strategy.run(step, args=(parts,))


@pytest.fixture(scope="module")
def strategies():
    return {n: stratagem.MirroredStrategy([f"CPU:{i}" for i in range(n)]) for n in (1, 2, 4)}


def make_all():
    metrics = [cls(**kwargs) for cls, (_, kwargs) in ALL.items()]
    metrics += [M.Mean(), M.Sum(), M.MeanMetricWrapper(keras.losses.mean_squared_error)]
    feeds = [data(kind) for kind, _ in ALL.values()]
    weights = np.linspace(0.5, 2, ROWS, dtype="float32")
    feeds += [(data("values")[0], weights)] * 2 + [(*data("real"), weights)]
    return metrics, feeds


@pytest.fixture(scope="module")
def one_device():
    """Plain metrics after two updates."""
    metrics, feeds = make_all()
    for metric, feed in zip(metrics, feeds, strict=True):
        metric.update_state(*feed)
        metric.update_state(*feed)
    return metrics, feeds


@pytest.mark.parametrize("replicas", [2, 4])
def test_every_keras_metric_equals_one_device(strategies, one_device, replicas):
    expected, feeds = one_device
    strategy = strategies[replicas]
    with strategy.scope():
        metrics, _ = make_all()
    update_all(strategy, metrics, feeds)
    for metric, plain in zip(metrics, expected, strict=True):
        got, want = np.asarray(metric.result()), np.asarray(plain.result())
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=metric.name)
        for mine, theirs in zip(metric.variables, plain.variables, strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, err_msg=mine.path)
    # None of them needed the whole batch: their state travels in the step's all-reduce.
    assert not any(variables.is_replicated_metric(v) for m in metrics for v in m.variables)


class Welford(M.Metric):
    """Running standard deviation of the predictions (Welford, Technometrics 1962)."""

    def __init__(self):
        super().__init__(name="welford")
        self.n = self.add_variable((), "zeros", name="n")
        self.average = self.add_variable((), "zeros", name="average")
        self.squares = self.add_variable((), "zeros", name="squares")

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = ops.cast(ops.shape(y_pred)[0], "float32")
        average, squares = ops.mean(y_pred), ops.sum(ops.square(y_pred - ops.mean(y_pred)))
        n = self.n + rows
        distance = average - self.average
        self.squares.assign(self.squares + squares + distance**2 * self.n * rows / n)
        self.average.assign(self.average + distance * rows / n)
        self.n.assign(n)

    def result(self):
        return ops.sqrt(self.squares / self.n)


class Largest(M.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), keras.initializers.Constant(-5.0), name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self):
        return ops.convert_to_tensor(self.value)


class LastRatio(M.Metric):
    """Keeps the ratio of the last batch as its state: a sum over replicas would double it."""

    def __init__(self):
        super().__init__(name="ratio")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        hits = ops.sum(ops.cast(y_pred > 0.5, "float32"))
        self.value.assign(hits / ops.cast(ops.shape(y_pred)[0], "float32"))

    def result(self):
        return ops.convert_to_tensor(self.value)


class MeanOfBatches(M.Metric):
    """Adds one value a batch: additive in its state, not over rows."""

    def __init__(self):
        super().__init__(name="batches")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.max(y_pred))
        self.count.assign_add(1)

    def result(self):
        return self.total / self.count


class Averaged(M.Metric):
    """Declares a mean of its replicas, which would lose all but a part of what they count."""

    def __init__(self):
        super().__init__(name="averaged")
        self.rows = self.add_variable((), "zeros", aggregation="mean", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

    def result(self):
        return ops.convert_to_tensor(self.rows)


class Composite(M.Mean):
    """A subclass of Mean with an inner metric."""

    def __init__(self):
        super().__init__(name="composite")
        self.inner = M.Sum(name="inner")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.inner.update_state(ops.abs(y_pred))
        super().update_state(ops.square(y_pred - y_true), sample_weight)


def batch_r2(y_true, y_pred):
    """A function that looks at the whole batch and returns one number."""
    rest = ops.sum(ops.square(y_true - y_pred))
    return 1 - rest / ops.sum(ops.square(y_true - ops.mean(y_true)))


def rows_error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


def make_model(custom: bool = True):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(
        keras.optimizers.SGD(0.05),
        "mse",
        metrics=[
            Welford(), Largest(), LastRatio(), MeanOfBatches(), Averaged(), Composite(), batch_r2,
            rows_error, keras.losses.Huber(), M.PearsonCorrelation(axis=0), "mae",
        ],
    )  # fmt: skip
    return model


@pytest.mark.parametrize("replicas", [2, 4])
def test_any_custom_metric_of_fit_equals_one_device(strategies, replicas):
    random = np.random.default_rng(1)
    x, y = (
        random.normal(size=(9, 3)).astype("float32"),
        random.normal(size=(9, 2)).astype("float32"),
    )
    plain = make_model()
    expected = plain.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    with strategies[replicas].scope():
        model = make_model()
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=2e-5, atol=1e-6, err_msg=name)
    got = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    want = plain.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    summed = {m.name: not any(map(variables.is_replicated_metric, m.variables))
              for m in model._compile_metrics.metrics}  # fmt: skip
    assert {name for name, is_summed in summed.items() if is_summed} == {
        "composite", "rows_error", "mae",
    }  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_any_metric_equals_one_device_in_a_custom_loop(strategies, replicas):
    random = np.random.default_rng(2)
    batches = [random.normal(size=(rows, 2)).astype("float32") for rows in (5, 3)]

    def make():
        return [Welford(), Largest(), LastRatio(), Averaged(), M.RootMeanSquaredError()]

    plain = make()
    for batch in batches:
        for metric in plain:
            metric.update_state(batch, batch * 2)
    strategy = strategies[replicas]
    with strategy.scope():
        metrics = make()

    def step(rows):
        for metric in metrics:
            metric.update_state(rows, rows * 2)

    for batch in batches:
        parts = np.array_split(batch, replicas)  # of 3 rows on 4 replicas, one is empty
        strategy.run(step, args=(stratagem.PerReplica(parts),))
    for metric, want in zip(metrics, plain, strict=True):
        np.testing.assert_allclose(metric.result(), want.result(), rtol=1e-5, err_msg=metric.name)
        metric.reset_state()
        assert not np.any([v.numpy() for v in metric.variables])


def test_a_scalar_cannot_update_a_metric_that_is_no_sum_in_a_custom_loop(strategies):
    with strategies[2].scope():
        metric = Largest()
    with pytest.raises(ValueError, match=r"(?s)tensors with rows.*'largest' \(Largest\).*outside"):
        strategies[2].run(
            lambda: metric.update_state(None, stratagem.get_replica_context()
                                        .replica_id_in_sync_group.astype("float32"))
        )  # fmt: skip


def test_a_metric_starts_from_its_initial_value_once(strategies):
    with strategies[4].scope():
        metric = Largest()
    assert metric.result() == -5


class MeanLossModel(keras.Model):
    """Keeps its loss in a Mean that it updates with one number a batch, as Keras' guides do."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.tracker = M.Mean(name="tracked")

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean(ops.square(y - y_pred))
        self.tracker.update_state(loss)
        return loss


def test_a_mean_of_scalars_counts_batches_not_replicas(strategies):
    x, y = np.arange(10, dtype="float32").reshape(5, 2), np.zeros((5, 1), "float32")

    def history(model):
        model.compile(keras.optimizers.SGD(0.0), jit_compile=True)
        return model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history

    want = history(MeanLossModel())
    with strategies[2].scope():
        model = MeanLossModel()
    got = history(model)
    np.testing.assert_allclose(got["tracked"], want["tracked"], rtol=1e-6)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)


def relative_error(y_true, y_pred):
    """Per row, but relative to the largest of the batch."""
    error = ops.abs(y_true - y_pred)[..., 0]
    return error / ops.max(error)


def test_a_metric_of_the_whole_batch_sees_masks_and_weights(strategies):
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(5, 3, mask_zero=True), keras.layers.Dense(1),
        ])  # fmt: skip
        model.compile("sgd", "mse", metrics=[relative_error], weighted_metrics=[relative_error])
        return model

    random = np.random.default_rng(3)
    ids = random.integers(0, 5, (7, 4)).astype("int32")
    targets, weights = random.normal(size=(7, 4, 1)), random.uniform(size=(7, 4))
    plain = make()
    with strategies[2].scope():
        model = make()
    want, got = (
        m.evaluate(ids, targets, sample_weight=weights, batch_size=4, verbose=0, return_dict=True)
        for m in (plain, model)
    )
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_the_log_says_which_metric_needs_the_whole_batch(strategies, caplog):
    caplog.set_level("INFO", "stratagem")
    with strategies[2].scope():
        metric = LastRatio()
    rows = stratagem.PerReplica([np.ones((2, 1), "float32")] * 2)
    strategies[2].run(lambda y: metric.update_state(y, y), args=(rows,))
    assert "metric 'ratio' is not a sum over rows" in caplog.text
