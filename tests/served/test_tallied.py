"""Metrics stay on the coordinator; whoever knows that a closure is done finds its part in them."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from stratagem.coordinator import ClusterCoordinator
from stratagem.strategies import tallied


@pytest.fixture
def made(served):
    """Strategy, coordinator, a mean, and a function that updates it."""
    strategy = served(1, 1)
    with strategy.scope():
        mean = keras.metrics.Mean()

    def step(x):
        mean.update_state(x)
        return jnp.sum(x)

    return strategy, ClusterCoordinator(strategy), mean, step


def until(is_so):
    deadline = time.monotonic() + 30.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


WAYS = {
    "fetch": lambda strategy, coordinator, call: coordinator.schedule(*call).fetch(),
    "get": lambda strategy, coordinator, call: coordinator.schedule(*call).get(),
    "result": lambda strategy, coordinator, call: coordinator.schedule(*call).result(30.0),
    "exception": lambda strategy, coordinator, call: coordinator.schedule(*call).exception(30.0),
    "done": lambda strategy, coordinator, call: until(coordinator.schedule(*call).done),
    "all done": lambda strategy, coordinator, call: (
        coordinator.schedule(*call), until(coordinator.done),
    ),
    "join": lambda strategy, coordinator, call: (coordinator.schedule(*call), coordinator.join()),
    "of many": lambda strategy, coordinator, call: coordinator.fetch([coordinator.schedule(*call)]),
    "run": lambda strategy, coordinator, call: strategy.run(*call),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_who_knows_that_a_closure_is_done_reads_its_part(made, way):
    strategy, coordinator, mean, step = made
    WAYS[way](strategy, coordinator, (step, (np.float32(100.0),)))
    assert float(mean.result()) == 100.0
    assert float(mean.count.numpy()) == 1.0


@pytest.mark.parametrize("way", WAYS)
def test_a_reset_throws_away_what_was_done_before(made, way):
    strategy, coordinator, mean, step = made
    WAYS[way](strategy, coordinator, (step, (np.float32(100.0),)))
    mean.reset_state()
    coordinator.schedule(step, (np.float32(2.0),))
    coordinator.join()
    assert float(mean.result()) == 2.0


def test_nobody_has_to_join(made):
    _, coordinator, mean, step = made
    for _ in range(5):
        coordinator.schedule(step, (np.float32(3.0),))
    until(lambda: float(mean.count.value) == 5.0)
    assert float(mean.result()) == 3.0


def test_what_the_program_adds_itself(made):
    """Beside what closures add, and whatever comes first."""
    _, coordinator, mean, step = made
    coordinator.schedule(step, (np.float32(10.0),)).fetch()
    mean.total.assign_sub(4.0)
    mean.count.assign_add(1.0)
    coordinator.schedule(step, (np.float32(6.0),)).fetch()
    assert float(mean.result()) == 4.0
    mean.total.assign(9.0)
    assert float(mean.result()) == 3.0


def test_nothing_is_lost_that_is_added_meanwhile(made, monkeypatch):
    """A closure is done between the read and the write of an addition."""
    _, _, mean, _ = made
    total = mean.total
    writes = type(total)._direct_assign
    closure = threading.Thread(target=tallied.add, args=([total], [np.float32(1.0)]))

    def write(self, value):
        closure.start()
        closure.join(0.3)
        writes(self, value)

    monkeypatch.setattr(type(total), "_direct_assign", write)
    total.assign_add(10.0)
    closure.join()
    assert float(total.value) == 11.0


def test_it_is_read_while_jax_traces(made):
    """A constant there; the variable itself keeps a value."""
    _, coordinator, mean, step = made
    coordinator.schedule(step, (np.float32(5.0),)).fetch()
    assert float(jax.jit(lambda x: x + mean.total.value)(1.0)) == 6.0
    assert float(mean.result()) == 5.0


def test_what_is_read_of_one_moment_belongs_together(made):
    _, _, mean, _ = made
    parts = [np.float32(8.0), np.float32(1.0)]
    tallied.add(mean.variables, parts)
    with tallied.one_moment(mean.variables):
        assert float(mean.total.value) == 8.0
        tallied.add(mean.variables, parts)
        assert float(mean.result()) == 8.0
        assert float(mean.count.value) == 1.0
    assert float(mean.count.value) == 2.0
