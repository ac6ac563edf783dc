"""After `close` nobody waits: what is pending is cancelled, what comes later is an error."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from stratagem.coordinator import CancelledError, ClusterCoordinator, PerWorkerVariable

SECONDS = 30.0
CLOSED = r"Expected a connection that is open. Got a use of 'stratagem-\w+' after it was closed"


def slow():
    """Takes far longer than it takes to close."""
    turn = lambda i, x: jnp.tanh(x @ x)  # noqa: E731
    return jax.lax.fori_loop(0, 5000, turn, jnp.ones((300, 300))).sum()


def begun(call):
    """The outcome of a call in a thread of its own, which has begun to wait."""
    outcome: Future = Future()

    def work():
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)
    return outcome


def test_what_is_pending_is_cancelled(served):
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    done = coordinator.schedule(lambda: jnp.asarray(1.0))
    assert float(done.fetch()) == 1.0
    values = [coordinator.schedule(slow) for _ in range(5)]
    joins, fetches = begun(coordinator.join), begun(values[-1].fetch)
    fits = begun(lambda: strategy.run(slow))
    strategy.close()
    for waiting in (fetches, fits):
        with pytest.raises(CancelledError):
            waiting.result(SECONDS)
    with pytest.raises(RuntimeError, match=CLOSED):
        joins.result(SECONDS)
    assert all(value.cancelled() and not value.is_ok() for value in values)
    assert float(done.fetch()) == 1.0


def test_what_is_asked_for_later_is_an_error(served):
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variable = keras.Variable(0.0)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    ones = np.ones((4, 1), np.float32)
    model.fit(ones, ones, verbose=0)
    dataset = coordinator.create_per_worker_dataset(lambda: [ones])
    dealt = iter(strategy.experimental_distribute_dataset([ones]))
    known = lambda: jnp.asarray(1.0)  # noqa: E731
    coordinator.schedule(known).fetch()
    strategy.close()
    strategy.close()  # again: nothing
    calls = [
        lambda: coordinator.schedule(known),
        lambda: coordinator.schedule(lambda: jnp.asarray(2.0)),
        lambda: coordinator.schedule(lambda: variable.assign_add(1.0)),
        lambda: coordinator.schedule(next, (dealt,)),
        coordinator.join,
        coordinator.done,
        lambda: strategy.run(known),
        lambda: iter(dataset),
        lambda: coordinator.add_worker("localhost:1"),
        lambda: coordinator.remove_worker(0),
        variable.numpy,
        lambda: variable.assign(1.0),
        lambda: model.fit(ones, ones, verbose=0),
        lambda: model.evaluate(ones, ones, verbose=0),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=CLOSED):
            begun(call).result(SECONDS)
    with strategy.scope():
        for make in (lambda: keras.Variable(1.0), lambda: PerWorkerVariable(1.0)):
            with pytest.raises(RuntimeError, match=CLOSED):
                make()


def test_who_waits_for_a_dataset_is_told(served):
    """No worker is there to open it."""
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    strategy.cluster.stop("worker", 0)
    opens = begun(lambda: iter(coordinator.create_per_worker_dataset(lambda: [np.float32(1)])))
    strategy.close()
    with pytest.raises(RuntimeError, match=CLOSED):
        opens.result(SECONDS)


def test_a_snapshot_that_cannot_be_asked_for_is_not_waited_for(served, tmp_path, monkeypatch):
    """The thread that asks the servers ends in the middle of it."""
    strategy = served(1, 1, state_dir=tmp_path)
    with strategy.scope():
        keras.Variable(0.0)

    def snapshot(specs, done):
        raise RuntimeError("Expected an open hub.")

    monkeypatch.setattr(strategy.link.keeper, "snapshot", snapshot)
    known = begun(lambda: ClusterCoordinator(strategy).schedule(lambda: jnp.asarray(1.0)))
    with pytest.raises(RuntimeError, match=r"Expected an open hub\."):
        known.result(SECONDS)
