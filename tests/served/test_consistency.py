"""How far workers may run ahead of each other, from free to in step."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem
from stratagem.coordinator import ClusterCoordinator

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
