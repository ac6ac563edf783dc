"""Two programs with the same workers and servers: the later one has them, and the other is told."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest

import stratagem
from stratagem.coordinator import CancelledError, ClusterCoordinator
from stratagem.errors import JobMismatchError

ANOTHER = r"worker \d at .*, \w+: worker \d: expected (requests|servers) of the job"


@pytest.fixture
def two(served, monkeypatch):
    """Makes two jobs, one after the other, in one cluster, as two programs would.

    The first has not been heard for long when the second begins, else it would be refused.
    """
    monkeypatch.setattr("stratagem.parameter_server.holder.SILENT_SECONDS", 0.0)
    strategies = []

    def make(workers=1, **arguments):
        strategies.append(served(workers, 1, **arguments))
        resolver = strategies[0].cluster.resolver
        return strategies[
            0
        ], lambda: strategies.append(stratagem.ParameterServerStrategy(resolver)) or strategies[-1]

    yield make
    for strategy in strategies:
        strategy.close()


def counter(strategy, start):
    """A variable, and a function that adds to it; all jobs give them the same numbers."""
    with strategy.scope():
        variable = keras.Variable(start)
    return variable, lambda: variable.assign_add(1.0)


def reads(dataset):
    return next(dataset)


def test_the_later_job_is_not_touched_and_the_earlier_one_is_told(two):
    first, begin = two(2)
    _, old = counter(first, 0.0)
    before = ClusterCoordinator(first)
    dataset = before.create_per_worker_dataset(lambda: [np.float32(1)])
    iterator = iter(dataset)
    before.schedule(old).fetch()
    second = begin()
    variable, new = counter(second, 1000.0)
    after = ClusterCoordinator(second)
    for _ in range(3):
        after.schedule(new).fetch()
    began = time.monotonic()
    value = before.schedule(old)
    with pytest.raises(JobMismatchError, match=ANOTHER + f" '{second.job_id}'"):
        value.fetch()
    with pytest.raises(JobMismatchError, match="End one of these programs, or give it workers"):
        before.join()
    values = [before.schedule(reads, (iterator,)) for _ in range(1)]
    with pytest.raises(JobMismatchError, match=ANOTHER):
        values[0].fetch()
    with pytest.raises(JobMismatchError):
        before.join()
    with pytest.raises(JobMismatchError, match=ANOTHER):
        iter(dataset)
    assert time.monotonic() - began < 10.0
    for _ in range(4):
        after.schedule(new).fetch()
    assert float(variable.numpy()) == 1007.0


def both_at_work(two):
    """The first job and its coordinator; the second one's, its variable, and what adds to it."""
    first, begin = two()
    before = ClusterCoordinator(first)
    before.schedule(counter(first, 0.0)[1]).fetch()
    second = begin()
    variable, new = counter(second, 1000.0)
    after = ClusterCoordinator(second)
    after.schedule(new).fetch()
    return first, before, after, variable, new


def test_what_the_earlier_job_stops_or_cancels_is_not_the_later_one(two):
    first, before, after, variable, new = both_at_work(two)
    cancel = lambda hub: before.dispatcher._crew.cancel("worker 0", 3)  # noqa: E731
    first.link.thread.do(cancel, "a closure to be cancelled", 5.0)  # one that is to come
    first.close(stop_tasks=True)
    for _ in range(5):
        after.schedule(new).fetch()
    assert float(variable.numpy()) == 1006.0
    assert after.counts.reruns == 0


def test_a_worker_that_comes_back_is_of_the_later_job(two):
    """The earlier program does not know yet that it was replaced when it sets the worker up."""
    first, before, after, variable, new = both_at_work(two)
    dispatcher = before.dispatcher
    silent = lambda hub: dispatcher._crew.lost("worker 0", "nothing is heard")  # noqa: E731
    first.link.thread.do(silent, "a loss", 5.0)
    value = before.schedule(lambda: np.float32(1) * 2)
    with pytest.raises(JobMismatchError, match=r"worker 0 at .*, setup: .*Got ps 0 at work for"):
        before.join()
    with pytest.raises(CancelledError):
        value.fetch()
    with pytest.raises(JobMismatchError, match=ANOTHER):
        iter(before.create_per_worker_dataset(lambda: [np.float32(1)]))
    after.schedule(new).fetch()
    assert float(variable.numpy()) == 1002.0
