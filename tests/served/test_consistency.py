"""How far workers may run ahead of each other, from free to in step."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem
from stratagem.coordinator import ClusterCoordinator
from stratagem.coordinator.guard import Guard

ROWS = 96


def data():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 40, size=(ROWS, 3))
    return ids, (ids.sum(axis=1, keepdims=True) / 60).astype(np.float32)


def make_model():
    keras.utils.set_random_seed(2)
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(40, 4)(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return model


def trained(served, epochs=3, **arguments):
    strategy = served(2, 2, **arguments)
    with strategy.scope():
        model = make_model()
    history = model.fit(*data(), batch_size=8, epochs=epochs, verbose=0, shuffle=False)
    steps, updates = epochs * ROWS // 8, int(model.optimizer.iterations.numpy())
    # Where rounds do not wait for all, a late gradient can have a round of its own.
    assert updates >= steps if arguments.get("backup_workers") else updates == steps
    return ClusterCoordinator(strategy), history.history["loss"]


@pytest.mark.parametrize("bound", [0, 1])
def test_no_gradient_is_later_than_allowed(served, bound):
    coordinator, losses = trained(served, max_staleness=bound)
    assert coordinator.staleness.max <= bound
    assert coordinator.staleness.count > 0
    assert losses[-1] < losses[0]


def test_late_gradients_are_divided(served):
    _, losses = trained(served, late_gradients="divide")
    assert losses[-1] < losses[0]


def test_hybrid(served):
    """Dense variables are updated once a round, tables by each closure."""
    _, losses = trained(served, consistency="hybrid")
    assert losses[-1] < losses[0]


def apart():
    """Batches of 8 rows whose halves have no id in common."""
    ids, y = data()
    ids = ids % 20 + 20 * (np.arange(ROWS) % 8 >= 4)[:, None]
    return ids, y


def test_hybrid_moves_tables_as_far_as_one_device(served):
    """Not so far for each worker: of rows that no other worker has at hand, exactly as far."""
    ids, y = (x[:8] for x in apart())
    strategy = served(2, 2, consistency="hybrid")
    with strategy.scope():
        model = make_model()
    alone = make_model()
    alone.set_weights(model.get_weights())
    for each in (model, alone):
        each.fit(ids, y, batch_size=8, verbose=0, shuffle=False)
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_hybrid_in_a_loop_of_ones_own_weighs_closures_alike(served):
    strategy = served(2, 2, consistency="hybrid")
    with strategy.scope():
        table = keras.Variable(np.ones((4, 2), "float32"), name="table")
        optimizer = keras.optimizers.SGD(0.25)
        optimizer.build([table])

    def step(ids):
        with stratagem.GradientTape() as tape:
            loss = keras.ops.sum(keras.ops.take(table, ids, axis=0) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    coordinator = ClusterCoordinator(strategy)
    for i in range(2):
        coordinator.schedule(step, args=(np.asarray([i], np.int32),))
    coordinator.join()
    np.testing.assert_array_equal(table.numpy(), [[0.75] * 2] * 2 + [[1.0] * 2] * 2)


def divided(case):
    """A model whose losses are divided by something else than rows, and its data: x, y, weights."""
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(40, 4, mask_zero=case != "weights")(ids)
    outputs = {"a": keras.layers.Dense(1, name="a")(rows)}
    if case == "two masks":  # another one for the second output
        numbers = keras.ops.cast(ids[..., None] % 3, "float32")
        outputs["b"] = keras.layers.Dense(2, name="b")(keras.layers.Masking()(numbers))
    by_weight = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = keras.Model(ids, outputs)
    model.compile(
        optimizer=keras.optimizers.SGD(0.05),
        loss={name: by_weight if case == "weights" else "mse" for name in outputs},
        weighted_metrics={name: ["mae"] for name in outputs},
    )
    x, _ = data()
    x = x * (np.arange(x.size).reshape(x.shape) % 7 < np.arange(len(x))[:, None] % 8)
    y = {name: np.repeat(x[..., None] / 10.0, out.shape[-1], -1) for name, out in outputs.items()}
    weight = {name: np.linspace(0.1, 2.0, x.size).reshape(x.shape) ** 3 for name in outputs}
    return model, (x, y, weight if case != "one mask" else None)


@pytest.mark.parametrize("case", ["one mask", "two masks", "weights"])
def test_losses_are_divided_by_what_the_whole_batch_has(served, caplog, case):
    """Masks and sums of weights: the step of one device, though parts have not equally much."""

    def fitted():
        keras.utils.set_random_seed(3)
        model, (x, y, weight) = divided(case)
        past = model.fit(x, y, sample_weight=weight, batch_size=20, epochs=2, verbose=0,
                         shuffle=False).history  # fmt: skip
        return past, model.get_weights()

    expected, weights = fitted()
    with served(2, 1, consistency="synchronous").scope():
        past, found = fitted()
    for name, values in expected.items():
        np.testing.assert_allclose(past[name], values, rtol=1e-5, err_msg=name)
    for one, other in zip(found, weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert "The loss is divided by" not in caplog.text


def learned(inputs):
    """A mask that depends on weights."""
    rows = keras.layers.Embedding(40, 4)(inputs)
    return keras.layers.Masking()(keras.layers.ReLU()(rows))


@pytest.mark.parametrize(("mode", "count"), [("synchronous", 1), ("asynchronous", 0)])
def test_a_loss_that_is_divided_by_part_says_so(served, caplog, mode, count):
    strategy = served(2, 1, consistency=mode)
    with strategy.scope():
        ids = keras.Input((3,), dtype="int32")
        model = keras.Model(ids, keras.layers.Dense(1)(learned(ids)))
        model.compile(optimizer="sgd", loss="mse")
    ids, _ = data()
    model.fit(ids, ids[..., None], batch_size=40, verbose=0)
    assert caplog.text.count("gradients are weighed by rows: where parts have not") == count


@pytest.mark.parametrize(
    ("mode", "optimizer", "count"),
    [
        ("hybrid", keras.optimizers.SGD(0.1, global_clipnorm=0.1), 1),
        ("hybrid", keras.optimizers.SGD(0.1, clipnorm=0.1), 1),
        ("synchronous", keras.optimizers.SGD(0.1, clipvalue=0.1), 0),
        ("asynchronous", keras.optimizers.SGD(0.1, clipnorm=0.1), 0),
        ("synchronous", keras.optimizers.Muon(0.1), 1),
        ("synchronous", keras.optimizers.Lamb(0.1, clipnorm=0.1), 0),
        ("synchronous", keras.optimizers.Lamb(0.1, global_clipnorm=0.1), 1),
        ("synchronous", keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)), 0),
    ],
)
def test_updates_of_parts_say_so(served, caplog, mode, optimizer, count):
    """What workers compute with gradients of their own, as norms are, is not one device's."""
    strategy = served(2, 1, consistency=mode)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer=type(optimizer).from_config(optimizer.get_config()), loss="mse")
    model.fit(np.ones((80, 3)), np.ones((80, 1)), batch_size=40, epochs=2, verbose=0)
    assert caplog.text.count("Each worker computes that for its own part of the batch") == count


@pytest.mark.parametrize("bound", ["clipnorm", "global_clipnorm"])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop", "LossScaleOptimizer"])
def test_norms_are_those_of_the_mean(served, caplog, kind, bound):
    """Clipping by a norm, of shards and looked-up rows on two servers: the step of one device."""

    def fitted():
        keras.utils.set_random_seed(4)
        ids = keras.Input((3,), dtype="int32")
        rows = keras.layers.Flatten()(keras.layers.Embedding(40, 4)(ids))
        hidden = keras.layers.Dense(8, activation="tanh")(rows if kind != "RMSprop" else ids / 40)
        model = keras.Model(ids, keras.layers.Dense(1)(hidden))
        if kind == "LossScaleOptimizer":
            inner = keras.optimizers.SGD(0.05, **{bound: 0.2})
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
        else:
            optimizer = getattr(keras.optimizers, kind)(0.05, **{bound: 0.2})
        model.compile(optimizer=optimizer, loss="mse")
        ids, y = data()
        past = model.fit(ids, 5 * y, batch_size=24, epochs=3, verbose=0, shuffle=False)
        return past.history["loss"], model.get_weights()

    expected, weights = fitted()
    cut = stratagem.experimental.partitioners.FixedShardsPartitioner(2)
    with served(2, 2, consistency="synchronous", variable_partitioner=cut).scope():
        losses, found = fitted()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, other in zip(found, weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert "Each worker computes that" not in caplog.text


def test_a_lost_round_is_made_again_with_the_same_norms(served, monkeypatch):
    """A server that has applied a round has done so with them."""
    apply, given = Guard._apply, []

    def apply_twice(self, what, numbers):
        given.append((what.round, dict(numbers)))
        if [n for n, _ in given].count(what.round) == 1:
            self._event(lambda state, now: state.lacks(what.round, now))
        else:
            apply(self, what, numbers)

    monkeypatch.setattr(Guard, "_apply", apply_twice)
    monkeypatch.setattr(
        Guard, "_ask_of", lambda self, what, method, *args, ask=Guard._ask_of: (
            asked.append((what.round, method)), ask(self, what, method, *args)
        ),
    )  # fmt: skip
    asked = []
    strategy = served(2, 1, consistency="synchronous")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(0.1, clipnorm=0.1), loss="mse")
    model.fit(np.ones((80, 3)), np.ones((80, 1)), batch_size=40, verbose=0)
    assert [m for _, m in asked] == ["squares", "commit"] * 2
    assert given[0] == given[1]
    assert given[2] == given[3]
    assert len(given[0][1]) > 0


def test_a_round_is_the_parts_of_one_batch_whoever_computes_them(served):
    """Workers that come, leave and are lost change no step: the weights are one device's."""

    def fitted(before_epoch=lambda epoch: None):
        model = make_model()
        callback = keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, logs: before_epoch(e))
        ids, y = data()
        past = model.fit(ids, y, batch_size=24, epochs=5, verbose=0, shuffle=False,
                         callbacks=[callback])  # fmt: skip
        return past.history["loss"], model

    expected, alone = fitted()
    strategy = served(2, 1, consistency="synchronous")
    coordinator = ClusterCoordinator(strategy)

    def change(epoch):
        if epoch == 1:
            coordinator.add_worker(strategy.cluster.add_worker())
        elif epoch == 2:
            coordinator.remove_worker(0)
        elif epoch == 3:
            strategy.cluster.stop("worker", 1)
        elif epoch == 4:
            strategy.cluster.start("worker", 1)

    with strategy.scope():
        losses, model = fitted(change)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert int(model.optimizer.iterations.numpy()) == int(alone.optimizer.iterations.numpy())
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_what_is_summed_over_replicas_is_summed_over_the_parts_of_a_round(served, dtype):
    """Equal parts or not: 45 rows are cut into 23 and 22, and then 12 into halves."""

    class Rows(keras.layers.Layer):
        def build(self, shape):
            self.seen = self.add_weight(
                shape=(), dtype=dtype, initializer="zeros", trainable=False, aggregation="sum"
            )

        def call(self, x, training=False):
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], dtype))
            return x

    with served(2, 1, consistency="synchronous").scope():
        rows = Rows()
        model = keras.Sequential([keras.Input((3,)), rows, keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    model.fit(np.ones((57, 3)), np.ones((57, 1)), batch_size=45, verbose=0)
    assert int(rows.seen.numpy()) == 57


def test_backup_workers(served):
    """A round does not wait for the last; what is dropped is counted."""
    coordinator, losses = trained(served, consistency="synchronous", backup_workers=1)
    assert losses[-1] < losses[0]
    assert coordinator.counts.dropped > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"consistency": "eventual"}, "consistency: expected one of"),
        ({"max_staleness": -1}, "max_staleness: expected None or a count from 0 on"),
        ({"max_staleness": 1, "consistency": "hybrid"}, "max_staleness: expected None"),
        ({"backup_workers": 1}, "backup_workers: expected 0, or more with consistency"),
        ({"late_gradients": "drop"}, "late_gradients: expected 'keep' or 'divide'"),
    ],
)
def test_what_does_not_go_together(cluster, arguments, text):
    with pytest.raises(ValueError, match=text):
        stratagem.ParameterServerStrategy(cluster(1, 1).resolver, **arguments)
