"""Per-worker iterators: one program for all of a kind, and none is kept that nobody has."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time

import cloudpickle
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem.coordinator import ClusterCoordinator, crew, opening
from stratagem.coordinator.terms import Terms
from stratagem.step import apart
from stratagem.utils import DatasetCreator

SECONDS = 20.0


def until(true, what):
    """Waits for what another thread does."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, f"waited {SECONDS} s for {what}"
        gc.collect()
        time.sleep(0.02)


class Looked:
    """What coordinator and workers hold, by the names that the tests need."""

    def __init__(self, strategy):
        self.cluster = strategy.cluster
        self.dispatcher = ClusterCoordinator(strategy).dispatcher

    def held(self):
        """Numbers of the iterators, as the coordinator and each worker hold them."""
        crew = self.dispatcher._crew
        there = [set(c._iterators) for c in self.computers()]
        told = [set(member.iterators) for member in crew._members.values()]
        return [set(crew._iterators), set(crew._openings), *told, *there]

    def computers(self):
        return [p._computer for (job, _), p in self.cluster.programs.items() if job == "worker"]

    def none_is_held(self):
        state = self.dispatcher._state
        return (
            not any(self.held())
            and list(state._workers._pools) == [frozenset()]
            and not any(worker.ended for worker in state._workers)
            and not any(needs for needs, _, _ in state._queue._kinds)
        )


@pytest.fixture
def divided(monkeypatch):
    """Gets an item for each program that is made."""
    made, divide = [], apart.divide

    def counted(*args, **kwargs):
        made.append(args[0])
        return divide(*args, **kwargs)

    monkeypatch.setattr(apart, "divide", counted)
    return made


def make_model():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def three_batches(_):
    for _ in range(3):
        yield np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


def test_epochs_share_one_program(served, divided):
    """Each epoch without steps has an iterator of its own; the program is that of the first."""
    strategy = served(2, 1)
    with strategy.scope():
        model = make_model()
    data = DatasetCreator(three_batches)
    model.fit(data, epochs=4, validation_data=data, verbose=0)
    model.fit(data, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 6 * 2 * 3
    assert len(divided) == 2  # one to train, one to test
    looked = Looked(strategy)
    assert all(len(c._families) <= 2 for c in looked.computers())
    until(looked.none_is_held, "iterators to be forgotten")


class Rows:
    """Rows that are read where they are asked for."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        x = np.full(2, i, np.float32)
        return x, x[:1]


def test_calls_of_fit_share_one_program(served, divided):
    """Batches that workers read by number: each call has an iterator of its own."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        strategy = served(2, 1)
        with strategy.scope():
            model = make_model()
        dataset = stratagem.data.batches(Rows(), 4)
        for _ in range(3):
            model.fit(dataset, verbose=0)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert int(model.optimizer.iterations.numpy()) == 9
    assert len(divided) == 1
    until(Looked(strategy).none_is_held, "iterators to be forgotten")


def counting(start):
    def dataset():
        index = stratagem.coordinator.experimental_get_current_worker_index()
        return (np.float32(start + 10 * index + i) for i in range(3))

    return dataset


def all_of(coordinator, step, *iterators):
    values = [coordinator.schedule(step, iterators) for _ in range(12)]
    coordinator.join()
    return [v.fetch() for v in values if not v.ended]


def test_iterators_take_places(served, divided):
    """Two iterators of a step are two, whichever come; one that comes twice is one."""
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)

    def step(a, b):
        return jnp.stack([next(a), next(b), next(a)])

    first = coordinator.create_per_worker_dataset(counting(0))
    second = coordinator.create_per_worker_dataset(counting(100))
    a, b = iter(first), iter(second)
    assert coordinator.schedule(step, (a, b)).fetch().tolist() == [0, 100, 1]
    b, a = iter(first), iter(second)
    assert coordinator.schedule(step, (a, b)).fetch().tolist() == [100, 0, 101]
    assert len(divided) == 1
    a = iter(first)
    assert coordinator.schedule(step, (a, a)).fetch().tolist() == [0, 1, 2]
    assert len(divided) == 2
    del a, b
    until(Looked(strategy).none_is_held, "iterators to be forgotten")


def test_what_closures_need_is_kept(served):
    """The program lets go of an iterator at once; what was scheduled reads it all the same."""
    strategy = served(2, 1)
    coordinator = ClusterCoordinator(strategy)
    dataset = coordinator.create_per_worker_dataset(counting(0))
    values = [coordinator.schedule(lambda it: next(it), (i,)) for i in [iter(dataset)] * 6]
    gc.collect()
    coordinator.join()
    assert sorted(float(v.fetch()) for v in values) == [0, 1, 2, 10, 11, 12]
    until(Looked(strategy).none_is_held, "iterators to be forgotten")


def test_a_worker_that_is_away_when_an_iterator_goes(served):
    """Out of sight, or dead: it is told when it is back, or never opens it."""
    strategy = served(2, 1)
    coordinator, looked = ClusterCoordinator(strategy), Looked(strategy)
    dataset = coordinator.create_per_worker_dataset(counting(0))
    gone, kept = iter(dataset), iter(dataset)
    number = gone.number
    until(lambda: all(number in held for held in looked.held()), "both to be open on both")
    strategy.cluster.stop("worker", 0)
    crew = looked.dispatcher._crew

    def lose_sight(_):
        for member in crew._members.values():
            if member.up is not None:
                crew._down(member, "a test says so")
        crew.forget(number)

    del gone
    strategy.link.thread.do(lose_sight, "a worker to be lost", SECONDS)
    assert number in crew._members["worker 1"].iterators  # it was not told
    strategy.cluster.start("worker", 0)
    until(
        lambda: len(looked.held()) == 6 and all(held == {kept.number} for held in looked.held()),
        "workers to hold one iterator",
    )
    assert len(all_of(coordinator, lambda it: next(it), kept)) == 6


def test_a_dataset_that_one_worker_has_nothing_of(served):
    """Whoever answers first: what others have is read."""
    strategy = served(2, 1)
    coordinator = ClusterCoordinator(strategy)

    def second_alone():
        index = stratagem.coordinator.experimental_get_current_worker_index()
        time.sleep(0.3 * index)
        return [np.float32(i) for i in range(3 * index)]

    iterator = iter(coordinator.create_per_worker_dataset(second_alone))
    assert iterator.element_spec.dtype == np.float32
    assert sorted(all_of(coordinator, lambda it: next(it) + 1, iterator)) == [1, 2, 3]
    nothing = iter(coordinator.create_per_worker_dataset(lambda: iter(())))
    assert nothing.element_spec is None
    assert coordinator.schedule(lambda it: next(it) + 1, (nothing,)).ended


@pytest.mark.parametrize("comes", [True, False])
def test_who_has_not_come_yet_has_a_say_in_whether_data_are_empty(
    served, monkeypatch, caplog, comes
):
    """Workers of a job do not start at once; and who never comes is not waited for for ever."""
    monkeypatch.setattr(opening, "COME_SECONDS", SECONDS if comes else 0.2)
    strategy = served(2, 1)
    strategy.cluster.stop("worker", 1)
    coordinator = ClusterCoordinator(strategy)

    def second_alone():
        index = stratagem.coordinator.experimental_get_current_worker_index()
        return [np.float32(i) for i in range(3 * index)]

    def look():
        dataset = coordinator.create_per_worker_dataset(second_alone)
        found.append(all_of(coordinator, lambda it: next(it) + 1, iter(dataset)))

    found = []
    thread = threading.Thread(target=look)
    thread.start()
    if comes:
        known = coordinator.dispatcher._crew._openings
        until(
            lambda: any(o.empty for o in list(known.values())), "worker 0 to say that it has none"
        )
        strategy.cluster.start("worker", 1)
    thread.join(SECONDS)
    assert [sorted(values) for values in found] == [[1, 2, 3] if comes else []]
    assert ("worker 1 at 127.0.0.1" in caplog.text) != comes
    assert ("has not come in 0.2 s: it is taken to have none either" in caplog.text) != comes


def test_data_that_are_slow_to_come_are_said(served, monkeypatch, caplog):
    """While a dataset is opened, and while a step waits for its next element."""
    monkeypatch.setattr(crew, "_WARN_SECONDS", 0.3)
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    coordinator.dispatcher._state.terms = Terms(warn_seconds=0.3)

    def slow():
        time.sleep(1.0)
        yield np.float32(1)
        time.sleep(1.0)
        yield np.float32(2)

    def step(it):
        return next(it) + 1

    iterator = iter(coordinator.create_per_worker_dataset(slow))
    assert re.search(
        r"worker 0 at 127.0.0.1:\d+ has been opening a dataset for \d s, and its first element has "
        r"not come. What its function reads may be slow, or never there: look at that worker's log",
        caplog.text,
    )
    assert [int(coordinator.schedule(step, (iterator,)).fetch()) for _ in range(2)] == [2, 3]
    said = r"worker 0 at \S+ has had \S+step \(\S+\) in hand for \d s. .* waits for its iterator"
    assert re.search(said, caplog.text)
    count = caplog.text.count("has been opening")
    time.sleep(0.7)
    assert caplog.text.count("has been opening") == count  # no more of it when it is open


def test_iterators_that_are_no_arguments(served):
    coordinator = ClusterCoordinator(served(1, 1))
    iterator = iter(coordinator.create_per_worker_dataset(counting(0)))
    with pytest.raises(NotImplementedError, match="of an iterator that the function knows by its"):
        coordinator.schedule(lambda: next(iterator))
    taken = []
    coordinator.schedule(lambda it: taken.append(it), (iterator,))
    with pytest.raises(NotImplementedError, match="Got it later, of an iterator that was kept"):
        next(taken[0])
    coordinator.join()


def taking(coordinator, step, elements):
    """What a step gives for each of these elements, one a closure."""
    iterator = iter(coordinator.create_per_worker_dataset(lambda: elements))
    return coordinator.fetch([coordinator.schedule(step, (iterator,)) for _ in elements])


def test_another_structure_is_another_program(served, divided):
    coordinator = ClusterCoordinator(served(1, 1))
    one = np.float32(1)
    with_y = [{"x": one, "y": 2 * one} if i % 2 else {"w": 7 * one, "x": one} for i in range(6)]
    step = lambda it: next(it).get("y", jnp.float32(0))  # noqa: E731
    assert taking(coordinator, step, with_y) == [0, 2] * 3
    assert len(divided) == 2
    more = [{"w": 7 * one, "x": one} if i % 2 else {"x": one} for i in range(4)]
    assert taking(coordinator, lambda it: next(it)["x"], more) == [1] * 4
    nothing = [(one, None) if i % 2 else (None, one) for i in range(4)]
    assert taking(coordinator, lambda it: jnp.float32(next(it)[0] is None), nothing) == [1, 0] * 2


def test_a_key_that_is_missing_in_one_element(served):
    coordinator = ClusterCoordinator(served(1, 1))
    elements = [{"x": np.ones(1), "y": np.ones(1)}, {"w": np.ones(1), "x": np.ones(1)}]
    with pytest.raises(KeyError, match="y"):
        taking(coordinator, lambda it: next(it)["y"], elements)


def test_elements_put_back_keep_their_structure(served):
    """The first closure takes two, and finds that it needs another program."""
    coordinator = ClusterCoordinator(served(1, 1))
    one = np.float32(1)
    elements = [{"a": one}, {"b": 2 * one}, {"a": 3 * one}, {"b": 4 * one}]
    iterator = iter(coordinator.create_per_worker_dataset(lambda: elements))
    step = lambda it: next(it)["a"] + sum(next(it).values())  # noqa: E731
    assert coordinator.fetch([coordinator.schedule(step, (iterator,)) for _ in range(2)]) == [3, 7]


def test_elements_that_nothing_is_made_of_are_taken(served):
    coordinator = ClusterCoordinator(served(1, 1))
    iterator = iter(coordinator.create_per_worker_dataset(counting(0)))

    def second(it):
        next(it)
        return next(it)

    assert coordinator.schedule(second, (iterator,)).fetch() == 1
    value = coordinator.schedule(second, (iterator,))
    coordinator.join()
    assert value.ended


@pytest.mark.parametrize("loop", [list, lambda it: [x + 1 for x in it], lambda it: max(*it)])
def test_loops_over_iterators_are_refused_at_once(served, loop):
    coordinator = ClusterCoordinator(served(1, 1))
    iterator = iter(coordinator.create_per_worker_dataset(counting(0)))
    with pytest.raises(NotImplementedError, match="Got a loop over the iterator.*have no end"):
        coordinator.schedule(lambda it: loop(it), (iterator,))


def test_names_of_tensorflow(served):
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    each = iter(coordinator.create_per_worker_dataset(counting(0)))
    dealt = iter(strategy.experimental_distribute_dataset([np.float32(i) for i in range(3)]))
    for iterator in (each, dealt):
        assert coordinator.schedule(lambda it: it.get_next() + 1, (iterator,)).fetch() == 1
        with pytest.raises(NotImplementedError, match="Got get_next_as_optional.*ask is_ok"):
            coordinator.schedule(lambda it: it.get_next_as_optional(), (iterator,))
        with pytest.raises(NotImplementedError, match="Got get_next_as_optional"):
            iterator.get_next_as_optional()
        with pytest.raises(
            (NotImplementedError, ValueError), match=r"Expected next\(iterator\) in"
        ):
            iterator.get_next()


def broken():
    raise KeyError("no such file")
    yield


def test_a_dataset_that_cannot_be_opened_is_not_kept(served):
    strategy = served(2, 1)
    coordinator = ClusterCoordinator(strategy)
    with pytest.raises(Exception, match="no such file"):
        iter(coordinator.create_per_worker_dataset(broken))
    until(Looked(strategy).none_is_held, "the iterator to be forgotten")
