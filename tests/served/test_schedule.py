"""`schedule`, `join`, `done`, `fetch`: rows 52 to 57 of the reference, and what TF does not do."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem.coordinator import CancelledError, ClusterCoordinator, PerWorkerValues, worker
from stratagem.coordinator.terms import Terms
from stratagem.errors import RemoteError


@pytest.fixture
def pair(served):
    """A strategy of 2 workers and 2 ps, and its coordinator."""
    strategy = served()
    return strategy, ClusterCoordinator(strategy)


def test_variables_are_placed_round_robin(served):
    """Row 52."""
    strategy = served(
        variable_partitioner=stratagem.experimental.partitioners.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        scalar = keras.Variable(1.0)
        vector = keras.Variable([1.0, 2.0, 3.0])
        matrix = keras.Variable([[1.0, 2.0]])
        last = keras.Variable(2.0)

    def places(variable):
        return [(s.server, s.stop - s.start) for s in variable.remote_spec.shards]

    assert places(scalar) == [(0, 1)]
    assert places(vector) == [(1, 2), (0, 1)]
    assert places(matrix) == [(1, 1)]
    assert places(last) == [(0, 1)]
    np.testing.assert_array_equal(vector, [1, 2, 3])
    vector.assign([4, 5, 6])
    np.testing.assert_array_equal(vector, [4, 5, 6])
    vector.assign_add([1, 1, 1])
    np.testing.assert_array_equal(vector, [5, 6, 7])


def test_twenty_additions(pair):
    """Row 53."""
    strategy, coordinator = pair
    with strategy.scope():
        total = keras.Variable(0.0)

    @stratagem.function
    def add():
        total.assign_add(1.0)

    for _ in range(20):
        coordinator.schedule(add)
    coordinator.join()
    assert float(total.numpy()) == 20.0
    assert coordinator.done()


def test_fetch(pair):
    """Row 54."""
    _, coordinator = pair

    def nested():
        return jnp.asarray(2), (jnp.asarray(3),), {"v": jnp.asarray(4)}

    value = coordinator.schedule(nested)
    assert coordinator.fetch([value, 7]) == [(2, (3,), {"v": 4}), 7]
    assert value.done()
    assert value.is_ok()
    assert value.result(timeout=1.0)[0] == 2


def test_nothing_is_returned(pair):
    _, coordinator = pair
    assert coordinator.schedule(lambda: None).fetch() is None


def test_arguments(pair):
    _, coordinator = pair

    def add(x, y, *, twice):
        return (x + y) * 2 if twice else x + y

    values = [coordinator.schedule(add, (np.float32(i), i), {"twice": True}) for i in range(4)]
    assert [float(v.fetch()) for v in values] == [0.0, 4.0, 8.0, 12.0]


def test_short_closures_travel_together_each_with_its_own_result(pair):
    strategy, coordinator = pair
    with strategy.scope():
        total = keras.Variable(0.0)

    def add(x):
        total.assign_add(x)
        return 2 * x

    coordinator.dispatcher._state._workers._ahead = 1e9  # all are short, however busy the machine
    count = 600
    values = [coordinator.schedule(add, (np.float32(i),)) for i in range(count)]
    assert [float(value.fetch()) for value in values] == [2.0 * i for i in range(count)]
    coordinator.join()
    assert float(total.numpy()) == count * (count - 1) / 2
    members = coordinator.dispatcher._crew._members.values()
    assert sum(member.peer._next for member in members) < count / 2


def test_short_closures_with_many_results(pair):
    """As many as would not fit into one answer with those of others."""
    _, coordinator = pair
    coordinator.dispatcher._state._workers._ahead = 1e9  # all are short, however busy the machine

    def many(x):
        return [x + i for i in range(600)]

    values = [coordinator.schedule(many, (np.float32(i),)) for i in range(40)]
    assert [float(value.fetch()[599]) for value in values] == [599.0 + i for i in range(40)]


def test_more_results_than_a_message_holds_are_an_error_and_the_worker_stays(pair, caplog):
    _, coordinator = pair

    def many(x):
        return [x + i for i in range(5000)]

    for _ in range(3):  # on each worker
        with pytest.raises(RemoteError, match="at most 4096 arrays. Got 5000"):
            coordinator.schedule(many, (np.float32(1),)).fetch()
        with pytest.raises(RemoteError, match="at most 4096 arrays"):
            coordinator.join()
    assert float(coordinator.schedule(lambda: jnp.asarray(1.0)).fetch()) == 1.0
    texts = [r.getMessage() for r in caplog.records]
    assert len(texts) == 3
    assert all("an answer could not be sent: Expected a message of at most" in t for t in texts)


def test_each_worker_gets_its_own_value(pair):
    _, coordinator = pair
    value = PerWorkerValues([np.float32(1), np.float32(2)])

    def step(x):
        return x, stratagem.coordinator.experimental_get_current_worker_index()

    values = [coordinator.schedule(step, (value,)) for _ in range(20)]
    assert all(found == index + 1 for found, index in coordinator.fetch(values))


def test_a_closure_that_fails(pair):
    """Rows 55 and 56: the first error is raised once, and the state is clean after it."""
    _, coordinator = pair

    iterator = iter(coordinator.create_per_worker_dataset(failing))
    step = lambda it: next(it)  # noqa: E731
    queued = [coordinator.schedule(step, (iterator,)) for _ in range(6)]
    with pytest.raises(ZeroDivisionError):
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    assert any(v.cancelled() for v in queued) or all(v.done() for v in queued)
    assert float(coordinator.schedule(lambda: jnp.asarray(1.0)).fetch()) == 1.0
    with pytest.raises((ZeroDivisionError, CancelledError)):
        coordinator.fetch(queued)


def test_a_closure_that_is_lost_here_is_an_error_and_no_wait(pair, monkeypatch):
    _, coordinator = pair
    monkeypatch.setattr(coordinator.dispatcher, "_scheduled", lambda what: None)
    value = coordinator.schedule(lambda: jnp.asarray(1.0))
    with pytest.raises(ValueError, match="closure 0 to be known here. Got none. This is a fault"):
        value.fetch()


def failing():
    """A dataset whose second element cannot be made."""
    yield np.float32(1)
    yield np.float32(1 / (1 if len("") else 0))


def test_remote_values_are_no_arguments(pair):
    _, coordinator = pair
    value = coordinator.schedule(lambda: jnp.asarray(1.0))
    with pytest.raises(ValueError, match=r"Got a RemoteValue.*Pass value\.fetch\(\)"):
        coordinator.schedule(lambda x: x, (value,))
    with pytest.raises(TypeError, match="Expected a function to schedule. Got int"):
        coordinator.schedule(3)
    with pytest.raises(ValueError, match="Expected args as a list or tuple"):
        coordinator.schedule(lambda x: x, 3)


def test_one_coordinator_a_strategy(pair):
    strategy, coordinator = pair
    assert ClusterCoordinator(strategy) is coordinator
    with pytest.raises(ValueError, match="Expected a ParameterServerStrategy"):
        ClusterCoordinator(stratagem.OneDeviceStrategy("CPU:0"))


def test_per_worker_datasets(pair):
    """Each worker has the whole; `next` works in the function alone."""
    _, coordinator = pair

    def numbers():
        index = stratagem.coordinator.experimental_get_current_worker_index()
        return (np.float32(10 * index + i) for i in range(3))

    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    with pytest.raises(NotImplementedError, match="Expected next"):
        next(iterator)

    def step(it):
        worker = stratagem.coordinator.experimental_get_current_worker_index()
        return next(it), worker

    found = []
    while (value := coordinator.schedule(step, (iterator,))).is_ok():
        found.append(value)
        if len(found) > 100:
            break
    coordinator.join()
    seen = [v.fetch() for v in found if not v.ended]
    assert sorted(float(x) for x, _ in seen) == [0, 1, 2, 10, 11, 12]
    assert all(int(x) // 10 == int(worker) for x, worker in seen)


def test_dealt_datasets_end(pair):
    """Each batch once; the loop ends by itself."""
    strategy, coordinator = pair
    with strategy.scope():
        total = keras.Variable(0.0)
    batches = [np.full(n, 2.0, np.float32) for n in (4, 4, 3)]
    iterator = iter(strategy.experimental_distribute_dataset(batches))

    def step(it):
        total.assign_add(jnp.sum(next(it)))

    rounds = 0
    while coordinator.schedule(step, (iterator,)).is_ok():
        rounds += 1
    coordinator.join()
    assert rounds == 3
    assert float(total.numpy()) == 22.0


def test_the_tape_and_an_optimizer(pair):
    """Study note A's custom loop: gradients are applied on the servers."""
    strategy, coordinator = pair
    with strategy.scope():
        weight = keras.Variable(3.0, name="w")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    @stratagem.function
    def step(x):
        def replica(x):
            with stratagem.GradientTape() as tape:
                loss = (weight.value * x) ** 2
            optimizer.apply(tape.gradient(loss, [weight]), [weight])
            return loss

        loss = strategy.run(replica, args=(x,))
        return strategy.reduce("SUM", loss, axis=None)

    losses = [float(coordinator.schedule(step, (np.float32(1),)).fetch()) for _ in range(3)]
    expected, w = [], 3.0
    for _ in range(3):
        expected.append(w * w)
        w -= 0.1 * 2 * w
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(weight, w, rtol=1e-6)
    assert int(optimizer.iterations.numpy()) == 3


def test_workers_keep_the_programs_that_are_used(served, monkeypatch):
    """Of models that are gone none stays for ever; what is needed again is asked for again."""
    monkeypatch.setattr(worker, "_KEPT", 2)
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    (computer,) = [
        p._computer for job, p in strategy.cluster.programs.items() if job[0] == "worker"
    ]
    functions = [lambda x, k=k: x + k for k in range(5)]
    for _ in range(2):
        found = [coordinator.schedule(f, args=(np.float32(1),)).fetch() for f in functions]
        assert found == [1, 2, 3, 4, 5]
        assert len(computer._families) == 2
    before = list(computer._families)
    coordinator.schedule(functions[3], args=(np.float32(1),)).fetch()
    assert list(computer._families) == before[::-1]  # the other one would go next


def test_a_worker_keeps_more_programs_than_it_has_closures_in_hand():
    assert worker._KEPT > Terms().short_depth


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
def test_integers_that_do_not_fit_are_refused(served):
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    wide, refusal = np.array([2**40]), "Expected integers that int32 holds"
    with strategy.scope():
        for dtype in ("int64", "int32"):
            with pytest.raises(ValueError, match=refusal):
                keras.Variable(wide, dtype=dtype, trainable=False)
        number = keras.Variable(np.array([1]), dtype="int64", trainable=False)
    for write in (number.assign, number.assign_add, number.assign_sub):
        with pytest.raises(ValueError, match=refusal):
            write(wide)
        with pytest.raises(ValueError, match=refusal):
            coordinator.schedule(lambda write=write: write(wide))
    with pytest.raises(ValueError, match=refusal):
        coordinator.schedule(lambda: wide)
    assert number.numpy().tolist() == [1]
    # Each addition fits, their sum does not: the server has it, a step could not.
    for _ in range(2):
        number.assign_add(np.array([2**31 - 1]))
    with pytest.raises(ValueError, match=refusal):
        number.numpy()


def test_run_in_a_scheduled_function_gives_plain_tensors(served):
    """As in TensorFlow with one replica: they work with arithmetic, and are their local result."""
    strategy = served(1, 1)

    def step(x):
        doubled = strategy.run(lambda v: 2 * v, (x,))
        (local,) = strategy.experimental_local_results(doubled)
        return doubled + 1, local, doubled.shape, strategy.reduce("SUM", doubled, axis=None)

    more, local, shape, total = ClusterCoordinator(strategy).schedule(step, (np.ones(2),)).fetch()
    assert more.tolist() == [3, 3]
    assert local.tolist() == total.tolist() == [2, 2]
    assert shape == (2,)
