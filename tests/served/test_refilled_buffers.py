"""Data whose arrays are refilled for each batch, as a generator may do: batches wait, and stay."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from stratagem.coordinator import ClusterCoordinator

COUNT = 12


def refilled():
    """Batches of 0s, 1s, 2s and so on, in one dict of one buffer."""
    buffer = np.zeros((2, 3), np.float32)
    batch = {}
    for i in range(COUNT):
        buffer[:] = i
        batch["x"] = buffer
        yield batch


def first(batch):
    return batch["x"][0, 0]


def test_dealt(served):
    strategy = served(2, 1)
    coordinator = ClusterCoordinator(strategy)
    iterator = iter(strategy.experimental_distribute_dataset(refilled()))
    values = []
    while (value := coordinator.schedule(lambda it: first(next(it)), (iterator,))).is_ok():
        values.append(value)
    assert coordinator.fetch(values) == list(range(COUNT))


def test_per_worker(served):
    """Two elements of one closure are two."""
    coordinator = ClusterCoordinator(served(1, 1))
    iterator = iter(coordinator.create_per_worker_dataset(refilled))
    step = lambda it: (first(next(it)), first(next(it)))  # noqa: E731
    values = [coordinator.schedule(step, (iterator,)) for _ in range(COUNT // 2)]
    assert coordinator.fetch(values) == [(i, i + 1) for i in range(0, COUNT, 2)]


def test_arguments(served):
    """`schedule` returns at once; what the program does with its arrays then changes nothing."""
    coordinator = ClusterCoordinator(served(2, 1))
    values, buffer = [], np.zeros(3, np.float32)
    for i in range(40):
        buffer[:] = i
        step = lambda a, b: a[0] + b["x"][0]  # noqa: E731
        values.append(coordinator.schedule(step, (buffer, {"x": buffer})))
    assert coordinator.fetch(values) == [2 * i for i in range(40)]


class Refilled(keras.utils.PyDataset):
    """As `pairs`, by number."""

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


class Sum(keras.metrics.Metric):
    """Adds up what it is told to be true; of each batch its power, so that none hides another."""

    def __init__(self):
        super().__init__(name="sum")
        self.total = self.add_weight(initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.cast(2.0 ** y_true[0, 0], "int32"))

    def result(self):
        return self.total.value


@pytest.mark.parametrize("per_execution", [1, 3])
@pytest.mark.parametrize("make", [pairs, Refilled])
def test_fit(served, make, per_execution):
    with served(2, 1).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Sum()], steps_per_execution=per_execution)
    history = model.fit(make(), verbose=0, shuffle=False)
    assert history.history["sum"] == [2**COUNT - 1]
