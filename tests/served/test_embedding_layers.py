"""Keras' Embedding with its options, under ParameterServerStrategy."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem
from stratagem.parameter_server.bags import Bags
from stratagem.parameter_server.link import Link
from stratagem.parameter_server.units import Units
from stratagem.step import by_lookup

ROWS = 50


def run(strategy, **options):
    keras.utils.set_random_seed(5)

    def make():
        ids = keras.Input((4,), dtype="int32")
        rows = keras.layers.Embedding(ROWS, 3, name="table", **options)(ids)
        pooled = keras.layers.GlobalAveragePooling1D()(rows)
        model = keras.Model(ids, keras.layers.Dense(1)(pooled))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    rng = np.random.default_rng(1)
    ids = rng.integers(0, ROWS, size=(24, 4)).astype(np.int32)
    y = rng.normal(size=(24, 1)).astype(np.float32)
    if strategy is None:
        model = make()
    else:
        with strategy.scope():
            model = make()
    model.fit(ids, y, batch_size=8, verbose=0, shuffle=False)
    return model.get_weights()


def shards(count):
    return stratagem.experimental.partitioners.FixedShardsPartitioner(count)


def test_mask_zero(served, caplog):
    mine = run(served(1, 2, variable_partitioner=shards(2)), mask_zero=True)
    assert "is looked up by row" not in caplog.text
    for a, b in zip(mine, run(None, mask_zero=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("workers", "servers", "how"),
    [
        (1, 1, {}),
        (1, 2, {}),
        (2, 2, {"consistency": "synchronous"}),
        (1, 1, {"consistency": "hybrid"}),
    ],
)
def test_only_sums_of_what_is_pooled_travel(served, monkeypatch, workers, servers, how):
    monkeypatch.setattr(by_lookup, "_LEAST", 0)
    summed, pushed = [], []
    sums, by_row = Bags.sums, Units.by_row
    monkeypatch.setattr(Bags, "sums", lambda *args: summed.append(args[3]) or sums(*args))
    monkeypatch.setattr(Units, "by_row", lambda *args: pushed.append(1) or by_row(*args))
    mine = run(served(workers, servers, variable_partitioner=shards(servers), **how))
    # A step has one batch of 8 bags (or two of 4), of some 20 rows.
    assert all(numbers is not None for numbers in summed)  # by servers
    assert len(summed) == len(pushed) == 3 * workers * servers
    for a, b in zip(mine, run(None), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_coordinator_reads_no_table_to_train(served, monkeypatch):
    """Keras calls a model without values before its first step; a table may be larger than memory.

    What is read here are the weights that `run` gives.
    """
    read = []
    original = Link.read
    monkeypatch.setattr(Link, "read", lambda *args: read.append(args[1].name) or original(*args))
    run(served(1, 2, variable_partitioner=shards(2)))
    assert len(read) == 3
    assert read.count("table/embeddings") == 1


def test_a_regularizer_reads_the_whole_table_and_says_so(served, caplog):
    options = {"embeddings_regularizer": keras.regularizers.L2(0.01)}
    mine = run(served(1, 2, variable_partitioner=shards(2)), **options)
    assert "is looked up by row, but every closure pulls all of it" in caplog.text
    for a, b in zip(mine, run(None, **options), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_constraint_of_elements_holds_for_rows_that_are_trained(served):
    """Other rows rest, with what they started with, as all of their update does."""
    options = {"embeddings_constraint": keras.constraints.NonNeg()}
    table = run(served(1, 2, variable_partitioner=shards(2)), **options)[0]
    trained = np.unique(np.random.default_rng(1).integers(0, ROWS, size=(24, 4)))
    assert (table[trained] >= 0).all()
    assert (np.delete(table, trained, axis=0) < 0).any()


def test_a_constraint_over_rows_is_refused(served):
    with pytest.raises(ValueError, match="Expected an update of .* changes each element by itself"):
        run(
            served(1, 2, variable_partitioner=shards(2)),
            embeddings_constraint=keras.constraints.MaxNorm(1.0),
        )
