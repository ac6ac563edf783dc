"""Data whose arrays are refilled for each batch, wherever several of them are kept at a time."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh

import stratagem
from stratagem.compat import tensorflow as tf
from stratagem.data import AutoShardPolicy, batches, distribute_from_function, from_files
from stratagem.data.adapt import adapt
from stratagem.data.placement import Placement
from stratagem.data.split_feed import SplitFeed
from stratagem.data.workers import Workers

COUNT = 12


def mesh(replicas):
    return Mesh(np.array(jax.devices()[:replicas]), ("replica",))


def refilled(rows=2):
    buffer = np.zeros((rows, 1), np.float32)
    for i in range(COUNT):
        buffer[:] = i
        yield buffer


def test_elements_of_a_dataset_function():
    """Element i goes to replica i mod replicas, all of a step at once."""
    dataset = distribute_from_function(lambda _: refilled(), mesh=mesh(3))
    got = [float(part[0, 0]) for element in dataset for part in element.values]
    assert got == list(range(COUNT))


def test_a_step_that_is_dealt_anew():
    """In a job that may lose a process, also after the batches that follow were drawn."""
    workers = Workers(None)
    workers.may_change = True
    steps = SplitFeed(adapt(refilled), Placement(mesh(2)), workers, AutoShardPolicy.DATA).steps()
    for i, element in enumerate([next(steps).element for _ in range(COUNT)]):
        assert float(element.dealt.anew(mesh(1)).values[0][0, 0]) == i


@pytest.mark.parametrize("shuffle_seed", [None, 1])
def test_chunks_of_files(shuffle_seed):
    """A batch has rows of several chunks, and of several files."""
    dataset = from_files(["a", "b"], lambda path: refilled(3), 8, shuffle_seed=shuffle_seed)
    got = np.concatenate([np.array(batch) for batch in dataset]).ravel()
    assert sorted(got) == sorted(list(range(COUNT)) * 6)


def test_rows_by_number():
    class Rows:
        buffer = np.zeros(1, np.float32)

        def __len__(self):
            return COUNT

        def __getitem__(self, i):
            self.buffer[:] = i
            return self.buffer

    got = [batch.ravel().tolist() for batch in batches(Rows(), 4)]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("declared", [{}, {"output_types": tf.float32}])
def test_tf_data(declared):
    pytest.importorskip("grain")
    dataset = tf.data.Dataset.from_generator(refilled, **declared)
    got = [batch[:, 0, 0].tolist() for batch in dataset.batch(4).as_numpy_iterator()]
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [float(x[0, 0]) for x in list(dataset.cache())] == list(range(COUNT))


class Total(keras.metrics.Sum):
    """Adds up what it is told to be true, of each batch another power of 2."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(2.0**y_true)


class Refilled(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.x, self.y = np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        self.x[:], self.y[:] = i, i
        return self.x, self.y


def pairs():
    dataset = Refilled()
    for i in range(COUNT):
        yield dataset[i]


def torch_pairs():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Pairs(torch.utils.data.IterableDataset):
        def __iter__(self):
            x, y = torch.zeros(2, 1), torch.zeros(2, 1)
            for i in range(COUNT):
                yield x.fill_(i), y.fill_(i)

    return torch.utils.data.DataLoader(Pairs(), batch_size=None)


@pytest.mark.parametrize("per_execution", [1, 3])
@pytest.mark.parametrize("make", [pairs, Refilled, torch_pairs])
def test_fit(make, per_execution):
    strategy = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(
            "sgd", "mse", weighted_metrics=[Total(name="sum")], steps_per_execution=per_execution
        )
    history = model.fit(make(), verbose=0, shuffle=False)
    assert history.history["sum"] == [2 * (2**COUNT - 1)]
