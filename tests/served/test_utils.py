"""DatasetCreator: workers read the data of `fit`. SidecarEvaluator: see tests/devices."""

from __future__ import annotations

import sys
import threading

import cloudpickle
import keras
import numpy as np
import pytest

import stratagem
from stratagem.utils import DatasetCreator


def make_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model


def two_files(context):
    """R81: worker 0 has 7 rows, worker 1 has 3."""
    del context
    index = stratagem.coordinator.experimental_get_current_worker_index()
    rows = (7, 3)[index]
    x = np.full((rows, 2), 1.0 + index, np.float32)
    for start in range(0, rows, 2):
        yield x[start : start + 2], x[start : start + 2, :1]


def test_an_epoch_ends_when_all_datasets_have(served):
    """R81: each row once, without steps; the shapes of last batches differ."""
    strategy = served(2, 1)
    with strategy.scope():
        model = make_model()
    model.fit(DatasetCreator(two_files), epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2 * (4 + 2)
    found = model.evaluate(DatasetCreator(two_files), verbose=0, return_dict=True)
    x = np.concatenate([np.full((7, 2), 1.0), np.full((3, 2), 2.0)]).astype(np.float32)
    expected = model.evaluate(x, x[:, :1], verbose=0, return_dict=True)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)
    with pytest.raises(ValueError, match="Expected data whose order is known"):
        model.predict(DatasetCreator(two_files), verbose=0)


def test_steps_per_epoch(served):
    def endless(context):
        assert context.num_input_pipelines == 1
        while True:
            yield np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)

    strategy = served(2, 1)
    with strategy.scope():
        model = make_model()
    history = model.fit(DatasetCreator(endless), epochs=2, steps_per_epoch=5, verbose=0).history
    assert int(model.optimizer.iterations.numpy()) == 10
    assert history["loss"][1] < history["loss"][0]


def test_datasets_of_this_package(served):
    """The coordinator reads them, and deals each batch to one worker."""
    strategy = served(2, 1)
    with strategy.scope():
        model = make_model()
    x = np.ones((10, 2), np.float32)
    dataset = stratagem.data.batches((x, x[:, :1]), 3)
    model.fit(dataset, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 8
    model.fit(strategy.experimental_distribute_dataset(dataset), verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 12


class Squares:
    """Rows that are read where they are asked for, as of files."""

    def __init__(self, directory, rows):
        self._directory, self._rows = directory, rows

    def __len__(self):
        return self._rows

    def __getitem__(self, i):
        with (self._directory / f"{threading.current_thread().name}").open("a") as file:
            file.write(f"{i}\n")
        x = np.full(2, i, np.float32)
        return x, x[:1] ** 2


def rows_read(directory):
    files = {path.name: path.read_text().split() for path in directory.iterdir()}
    assert all("computes" in name for name in files), list(files)
    return [int(i) for rows in files.values() for i in rows]


@pytest.mark.parametrize("consistency", ["asynchronous", "synchronous"])
def test_workers_read_rows_by_number(served, tmp_path, consistency):
    """R81: a finite source ends the epoch by itself; each row once, read by who trains on it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        strategy = served(2, 1, consistency=consistency)
        with strategy.scope():
            model = make_model()
        source = Squares(tmp_path, 10)
        dataset = stratagem.data.batches(source, 4, shuffle_seed=1)
        model.fit(dataset, epochs=2, verbose=0)
        read = rows_read(tmp_path)
        found = model.predict(stratagem.data.batches(source, 4), verbose=0)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert int(model.optimizer.iterations.numpy()) == 2 * 3
    extra = sum(read.count(i) - 2 for i in range(10))
    assert {read.count(i) for i in range(10)} >= {2}
    assert extra <= 4 * 4 + 2  # shapes that are new are looked at before they are trained on
    x = np.arange(10, dtype=np.float32)[:, None].repeat(2, axis=1)
    np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-4)


def test_files_of_unequal_length(served, tmp_path):
    """R81: files of 7 and 3 rows, 2 workers: the epoch ends by itself, each row once."""
    for name, rows in (("a", range(7)), ("b", range(10, 13))):
        (tmp_path / name).write_text("".join(f"{i}\n" for i in rows))

    def read(path):
        x = np.loadtxt(path, np.float32)[:, None].repeat(2, axis=1)
        return x / 100, x[:, :1] * 0

    strategy = served(2, 1)
    with strategy.scope():
        model = make_model()
    dataset = stratagem.data.from_files(str(tmp_path / "*"), read, 4)
    seen = [round(float(r) * 100) for x, _ in dataset for r in x[:, 0]]
    assert sorted(seen) == [*range(7), *range(10, 13)]
    model.fit(dataset, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2 * 3
