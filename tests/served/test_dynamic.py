"""DynamicTable: rows on servers for ids of any value, made when they are first trained."""

from __future__ import annotations

from concurrent.futures import Future

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem import DynamicTable
from stratagem.coordinator import ClusterCoordinator
from stratagem.step import by_lookup

ROWS, COLUMNS, DIM = 24, 4, 3
KEPT = {"batch_size": 8, "verbose": 0, "shuffle": False}


def data(ids=50):
    rng = np.random.default_rng(1)
    x = rng.integers(0, ids, size=(ROWS, COLUMNS)).astype(np.int32)
    return x, rng.normal(size=(ROWS, 1)).astype(np.float32)


def make_model(table, optimizer, wide=False):
    keras.utils.set_random_seed(5)
    ids = keras.Input((COLUMNS, 2) if wide else (COLUMNS,), dtype="uint32" if wide else "int32")
    out = keras.layers.Dense(1)(keras.layers.Flatten()(table(ids)))
    model = keras.Model(ids, out)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def served_model(strategy, optimizer, wide=False, **arguments):
    with strategy.scope():
        table = DynamicTable(DIM, **{"initializer": "zeros", "name": "table", **arguments})
        return make_model(table, optimizer, wide), table


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adagrad])
@pytest.mark.parametrize("wide", [False, True])
def test_it_is_an_embedding(served, optimizer, wide):
    """For the same ids, a table of a preset size on one device."""
    x, y = data()
    start = keras.initializers.Constant(0.1)
    reference = make_model(keras.layers.Embedding(50, DIM, start), optimizer(0.1))
    expected = reference.fit(x, y, epochs=2, **KEPT).history["loss"]
    model, table = served_model(
        served(1, 2, max_staleness=0), optimizer(0.1), wide, initializer=start
    )
    ids = x.astype(np.int64) * (1 << 40) - 7 if wide else x
    inputs = DynamicTable.halves(ids) if wide else x
    found = model.fit(inputs, y, epochs=2, **KEPT).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    found_ids, rows = table.items()
    assert set(found_ids) == set(ids.reshape(-1))
    theirs = reference.layers[1].get_weights()[0]
    order = np.argsort(found_ids)
    np.testing.assert_allclose(rows[order], theirs[np.unique(x)], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), reference.predict(x, verbose=0), rtol=1e-4, atol=1e-6
    )
    assert len(table.items()[0]) == len(found_ids)


def test_where_a_step_only_sums_its_rows_they_travel(served, monkeypatch):
    """Its servers add no rows up; the worker does."""
    monkeypatch.setattr(by_lookup, "_LEAST", 0)
    x, y = data()
    start = keras.initializers.Constant(0.1)

    def trained(table):
        keras.utils.set_random_seed(5)
        ids = keras.Input((COLUMNS,), dtype="int32")
        pooled = keras.layers.GlobalAveragePooling1D()(table(ids))
        model = keras.Model(ids, keras.layers.Dense(1)(pooled))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model.fit(x, y, epochs=2, **KEPT).history["loss"]

    expected = trained(keras.layers.Embedding(50, DIM, start))
    with served(1, 1).scope():
        found = trained(DynamicTable(DIM, initializer=start, name="table"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_it_grows_with_new_ids_alone(served):
    x, y = data()
    model, table = served_model(served(), keras.optimizers.Adam(0.1))
    assert len(table.items()[0]) == 0
    model.fit(x, y, **KEPT)
    first = len(table.items()[0])
    assert first == len(np.unique(x))
    model.predict(x + 1000, verbose=0)
    model.evaluate(x + 1000, y, verbose=0)
    assert len(table.items()[0]) == first
    model.fit(x + 1000, y, **KEPT)
    assert len(table.items()[0]) == 2 * first
    assert np.shape(table(np.array([[1, 2], [3, 10**6]]))) == (2, 2, DIM)


def test_rare_ids_get_no_row(served):
    model, table = served_model(served(1, 1), keras.optimizers.SGD(0.1), admit_after=2)
    x, y = data()
    x[:8] = 7  # in one batch alone
    x[8:] = 8  # in two
    model.fit(x, y, **KEPT)
    assert table.items()[0].tolist() == [8]


def test_old_ids_lose_their_row(served):
    model, table = served_model(served(1, 1), keras.optimizers.SGD(0.1), expire_after=8)
    x, y = data()
    x[:8] = 7
    x[8:] = 8
    model.fit(x, y, **KEPT)
    assert sorted(table.items()[0]) == [7, 8]
    model.fit(x[8:], y[8:], epochs=5, **KEPT)
    assert table.items()[0].tolist() == [8]


def test_a_full_table(served):
    model, _ = served_model(served(1, 1), keras.optimizers.SGD(0.1), max_rows=3)
    x, y = data()
    with pytest.raises(Exception, match="Expected at most 3 rows of dynamic table"):
        model.fit(x, y, **KEPT)


def test_it_is_saved_by_rows(served, tmp_path):
    x, y = data()
    model, table = served_model(served(1, 2), keras.optimizers.SGD(0.1), initializer="uniform")
    model.fit(x, y, **KEPT)
    model.save_weights(tmp_path / "m.weights.h5")
    other, again = served_model(served(1, 1), keras.optimizers.SGD(0.1), initializer="uniform")
    other.load_weights(tmp_path / "m.weights.h5")
    ids, rows = table.items()
    found, others = again.items()
    np.testing.assert_array_equal(np.sort(ids), np.sort(found))
    np.testing.assert_array_equal(rows[np.argsort(ids)], others[np.argsort(found)])


def test_what_it_refuses(served):
    with pytest.raises(ValueError, match="in the scope of a ParameterServerStrategy"):
        DynamicTable(3)
    strategy = served(1, 1)
    with strategy.scope():
        with pytest.raises(ValueError, match="dim: expected"):
            DynamicTable(0)
        with pytest.raises(ValueError, match="Expected admit_after"):
            DynamicTable(3, admit_after=0)
        with pytest.raises(ValueError, match="initializer: expected zeros"):
            DynamicTable(3, initializer=lambda shape, dtype: np.zeros(shape))
        table = DynamicTable(3)
        with pytest.raises(TypeError, match="Expected integer ids"):
            table(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"Use DynamicTable\.items"):
        table.table.numpy()
    with pytest.raises(ValueError, match="a dynamic table, to be looked up .* reads all of it"):
        strategy.run(lambda: table.table.value.sum())
    with pytest.raises(ValueError, match=r"Pass 64-bit ids as DynamicTable\.halves"):
        strategy.run(lambda ids: ids + 1, (np.array([1 << 40]),))


def test_a_server_that_was_lost_gets_its_rows_back(served, tmp_path, monkeypatch):
    monkeypatch.setenv("STRATAGEM_STATE_DIR", str(tmp_path))
    x, y = data()
    strategy = served(1, 2)
    model, table = served_model(strategy, keras.optimizers.Adagrad(0.1), initializer="uniform")
    model.fit(x, y, **KEPT)
    ids, rows = table.items()
    written = Future()
    strategy.link.snapshot(written.set_result)
    assert written.result(60.0) is None
    strategy.cluster.stop("ps", 0)
    strategy.cluster.start("ps", 0)
    found, again = table.items()
    np.testing.assert_array_equal(np.sort(found), np.sort(ids))
    np.testing.assert_array_equal(again[np.argsort(found)], rows[np.argsort(ids)])
    model.fit(x, y, **KEPT)


@pytest.mark.parametrize(
    "make", [lambda: DynamicTable(DIM), lambda: keras.layers.Embedding(9, DIM)]
)
def test_batches_without_rows(served, make):
    """First and later: a program that takes rows of a table is compiled for one at least."""
    strategy = served(1, 2)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        table, optimizer = make(), keras.optimizers.SGD(1.0)
        table.build((None, COLUMNS))

    def step(ids):
        with stratagem.GradientTape() as tape:
            rows = table(ids)
            loss = jnp.sum(rows)
        weights = table.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return rows

    start = coordinator.schedule(lambda ids: table(ids), (np.array([[3]]),)).fetch()
    for shape in ((0, COLUMNS), (0, COLUMNS), (2, COLUMNS), (0, COLUMNS), (2, 0)):
        ids = np.full(shape, 3, np.int32)
        assert coordinator.schedule(step, (ids,)).fetch().shape == (*shape, DIM)
    after = coordinator.schedule(lambda ids: table(ids), (np.array([[3]]),)).fetch()
    np.testing.assert_allclose(after, start - 2 * COLUMNS, rtol=1e-6)
