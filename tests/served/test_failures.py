"""Errors of a step, workers that come and go, and jobs that go on: in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import jax
import keras
import numpy as np
import pytest

import stratagem
from stratagem.coordinator import ClusterCoordinator, PerWorkerValues, opening
from stratagem.coordinator.crew import Crew
from stratagem.errors import (
    BackupError,
    BackupMismatchError,
    JobMismatchError,
    MalformedMessageError,
    PeerLostError,
    PeerTimeoutError,
    RemoteError,
)
from stratagem.strategies import leaving, served_cluster

SECONDS = 30.0  # longer than anything here takes


def broken():
    """A dataset function with an error of its own."""
    raise KeyError("no such file")  # the user's own line
    yield


def wait_for(is_so):
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline


def test_a_dataset_function_that_raises(served):
    coordinator = ClusterCoordinator(served(1, 1))
    with pytest.raises(Exception, match="no such file"):
        iter(coordinator.create_per_worker_dataset(broken))
    assert float(coordinator.schedule(lambda: np.float32(1.0) + 0).fetch()) == 1.0


def test_a_row_number_that_is_not_in_the_table(served):
    """The first error once, with the worker's traceback and the user's line; then all is well."""
    strategy = served(2, 1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        table = keras.Variable(np.arange(12, dtype=np.float32).reshape(6, 2), name="table")
        sums = keras.Variable(0.0)

    def step(ids):
        sums.assign_add(1.0)
        return keras.ops.take(table, ids, axis=0)

    coordinator.schedule(step, (np.array([1, 2]),)).fetch()
    bad = coordinator.schedule(step, (np.array([1, 7]),))
    with pytest.raises(ValueError, match=r"Expected row numbers from 0 to 5.*Got 7") as caught:
        coordinator.join()
    notes = "\n".join(caught.value.__notes__)
    assert "On the worker:\nTraceback" in notes
    assert f"{step.__qualname__} ({__file__}:{step.__code__.co_firstlineno})" in notes
    assert bad.exception() is caught.value
    coordinator.join()
    assert float(sums.numpy()) == 1.0
    np.testing.assert_array_equal(coordinator.schedule(step, (np.array([5]),)).fetch(), [[10, 11]])


@pytest.mark.parametrize(
    ("wrong", "read"),
    [
        (6, lambda table, i: table[i]),
        (77, lambda table, i: table[i]),
        (77, lambda table, i: table[i] * table[i - 77]),
        (77, lambda table, i: jax.lax.dynamic_index_in_dim(table.value, i)),
        (-7, lambda table, i: table[i]),
        (-7, lambda table, i: table[i[None]]),
        (-7, lambda table, i: keras.ops.take(table, i, axis=0)),
        (-7, lambda table, i: table[i.astype("int8")[None]]),
        (-1, stratagem.nn.embedding_lookup),
    ],
)
def test_any_form_of_a_lookup_names_the_wrong_number(served, wrong, read):
    """One row too; and a number below the first from the end, as it was given."""
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        table = keras.Variable(np.arange(12, dtype=np.float32).reshape(6, 2), name="table")
    with pytest.raises(ValueError, match=rf"Expected row numbers from 0 to 5.*Got {wrong} "):
        coordinator.schedule(lambda i: read(table, i), (np.int32(wrong),)).fetch()


def test_a_row_number_of_a_table_of_one_row(served):
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        table = keras.Variable([[1.0, 2.0]], name="table")

    def read(i):
        return table[i]

    for i in (0, -1):
        assert coordinator.schedule(read, (np.int32(i),)).fetch().tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"Expected row numbers from 0 to 0.*Got 1 "):
        coordinator.schedule(read, (np.int32(1),)).fetch()


def test_workers_are_added_and_removed(served):
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)

    def who():
        return stratagem.coordinator.experimental_get_current_worker_index()

    def seen(count):
        return {int(v.fetch()) for v in [coordinator.schedule(who) for _ in range(count)]}

    assert seen(4) == {0}
    address = strategy.cluster.add_worker()
    assert coordinator.add_worker(address) == 1
    wait_for(lambda: 1 in seen(8))

    def too_few():  # whichever asks first after one has failed is told, once
        for _ in range(50):
            coordinator.schedule(lambda x: x, (PerWorkerValues([np.float32(1)]),))
        coordinator.join()

    with pytest.raises(ValueError, match="expected a value for each worker. Got 1, and worker 1"):
        too_few()
    coordinator.remove_worker(0)
    wait_for(lambda: seen(8) == {1})
    with pytest.raises(ValueError, match="Expected the index of a worker, below 2. Got 2"):
        coordinator.remove_worker(2)


def test_a_local_server_joins_a_job_by_its_target(served):
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)

    def who():
        return stratagem.coordinator.experimental_get_current_worker_index()

    server = stratagem.Server.create_local_server()
    try:
        assert server.target.startswith("grpc://127.0.0.1:")
        assert (server.server_def.job_name, server.server_def.task_index) == ("worker", 0)
        # It is the job that numbers its workers: this one knows of itself alone.
        assert coordinator.add_worker(server.target) == 1
        coordinator.remove_worker(0)
        wait_for(lambda: int(coordinator.schedule(who).fetch()) == 1)
    finally:
        server.stop()


def test_the_end_of_a_job_says_nothing_of_lost_workers(served, caplog):
    """Whether they are in the middle of a step, or left before it; and does not wait for these."""
    strategy = served(2, 1)
    coordinator = ClusterCoordinator(strategy)

    def slow():
        yield np.float32(1)
        time.sleep(2.0)
        yield np.float32(1)

    iterator = iter(coordinator.create_per_worker_dataset(slow))
    for _ in range(4):
        coordinator.schedule(lambda it: next(it) + 1, (iterator,))
    strategy.cluster.stop("worker", 1)
    strategy.close(stop_tasks=True)
    assert "lost" not in caplog.text


def test_a_server_that_does_not_come_is_named(cluster, monkeypatch, caplog):
    monkeypatch.setattr(served_cluster, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(served_cluster, "_AGAIN_SECONDS", 0.3)
    made = cluster(1, 2)
    made.stop("ps", 1)
    with pytest.raises(PeerTimeoutError, match="ps 1 at .*never heard"):
        stratagem.ParameterServerStrategy(made.resolver, connect_seconds=2.0)
    where = made.spec.task_address("ps", 1)
    said = rf"Waiting for ps 1 at {where}, since \d s and up to 2 s. Start what is not started;"
    assert len(re.findall(said, caplog.text)) > 1


def test_who_waits_for_servers_can_be_interrupted(cluster, monkeypatch):
    monkeypatch.setattr(served_cluster, "_PATIENCE_SECONDS", 0.3)
    made = cluster(1, 1)
    made.stop("ps", 0)

    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(served_cluster._log, "warning", interrupt)  # as it would say who is missing
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        stratagem.ParameterServerStrategy(made.resolver)
    assert time.monotonic() - began < SECONDS


def test_a_worker_that_does_not_come_is_named_once(served, monkeypatch, caplog):
    monkeypatch.setattr(opening, "COME_SECONDS", 0.3)
    strategy = served(2, 1)
    strategy.cluster.stop("worker", 1)
    assert int(ClusterCoordinator(strategy).schedule(lambda: np.int32(1) + 1).fetch()) == 2
    wait_for(lambda: "has not come" in caplog.text)
    time.sleep(0.6)
    where = strategy.cluster.spec.task_address("worker", 1)
    said = rf"worker 1 at {where} has not come in \d s; the others do its work. It does not run"
    assert len(re.findall(said, caplog.text)) == 1


def test_a_worker_of_the_programs_own_leaves_after_its_job(tmp_path):
    """At the end of the program; it was made after the strategy, and is none that is missed."""
    done = tmp_path / "order"
    program = f"""
import atexit, pathlib
import stratagem
from stratagem.coordinator import server
note = lambda what: pathlib.Path({str(done)!r}).open("a").write(what)
atexit.register(note, "strategy ")  # as a strategy does, when it is made
stop = stratagem.Server.stop
stratagem.Server.stop = lambda self: (note("worker "), stop(self))
stratagem.Server.create_local_server()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert done.read_text() == "strategy worker "


def test_a_second_coordinator_does_not_take_servers_in_use(served, caplog, monkeypatch):
    """It says who has them, and comes in once that one is gone, as one does that has died."""
    strategy = served(1, 1)
    coordinator, resolver = ClusterCoordinator(strategy), strategy.cluster.resolver
    total = total_of(strategy)
    with pytest.raises(JobMismatchError, match=f"process {os.getpid()} on .* End that program"):
        stratagem.ParameterServerStrategy(resolver, connect_seconds=1.0)
    assert "Waits, since that one may have died: ps 0 at 127.0.0.1" in caplog.text
    coordinator.schedule(lambda: total.assign_add(1.0)).fetch()
    assert float(total.numpy()) == 1.0
    monkeypatch.setattr("stratagem.parameter_server.holder.SILENT_SECONDS", 2.0)
    strategy._disconnect()
    caplog.clear()
    second = stratagem.ParameterServerStrategy(resolver)
    assert caplog.text.count("Waits, since that one may have died") == 1
    second.close()
    stratagem.ParameterServerStrategy(resolver, connect_seconds=1.0).close()
    strategy._left = True


def test_a_server_that_another_job_took_meanwhile_ends_this_one(served):
    """It was started again, and somebody else came first: nobody waits for it for ever."""
    strategy = served(1, 1)
    total = total_of(strategy)
    guard = strategy.coordinator.dispatcher._guard
    (member,) = guard._members.values()
    taken = RemoteError("ps 0", "hello", "JobMismatchError", "expected to be taken by one job")
    guard._heard(member, taken)
    assert isinstance(strategy.link.failed, JobMismatchError)
    assert strategy.link.failed.__cause__ is None  # no traceback of the server's
    with pytest.raises(BackupError, match="ps 0, hello: expected to be taken by one job"):
        total.numpy()


def test_replicas_need_two_servers(cluster):
    with pytest.raises(ValueError, match=r"replication: expected 1, or 2 with at least two ps"):
        stratagem.ParameterServerStrategy(cluster(1, 1).resolver, replication=2)


@pytest.fixture
def left(cluster, tmp_path, monkeypatch):
    """Begins jobs in one cluster and directory; `crash` leaves one as its coordinator's death."""
    monkeypatch.setenv("STRATAGEM_STATE_DIR", str(tmp_path))
    made = cluster(2, 2)
    strategies = []

    def begin(crash=True, **arguments):
        if strategies and crash is not None:
            if crash:
                strategies[-1]._leave(finished=False, stop_tasks=False)
            else:
                strategies[-1].close()
        strategies.append(stratagem.ParameterServerStrategy(made.resolver, **arguments))
        strategies[-1].cluster = made
        return strategies[-1]

    yield begin
    strategies[-1].close()


def total_of(strategy, name="total"):
    with strategy.scope():
        return keras.Variable(0.0, name=name)


def deal(strategy, total, batches, stop=None):
    """Trains on dealt batches; each adds its values."""
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    coordinator = ClusterCoordinator(strategy)

    def step(it):
        total.assign_add(keras.ops.sum(next(it)))

    count = 0
    while (stop is None or count < stop) and coordinator.schedule(step, (iterator,)).is_ok():
        count += 1
    coordinator.join()
    return count


def test_a_coordinator_that_is_started_again_goes_on(left, caplog):
    """Variables keep their values, and batches that are finished are not dealt again."""
    batches = [np.full(2, i, np.float32) for i in range(10)]
    strategy = left()
    assert deal(strategy, total_of(strategy), batches, stop=6) == 6
    strategy = left()
    total = total_of(strategy)
    total.assign(5.0)  # as at the beginning of the job: it was done then
    assert "keeps its value" in caplog.text
    assert deal(strategy, total, batches) == 4
    assert float(total.numpy()) == 2 * sum(range(10))
    strategy = left(crash=False)  # that job is done
    total = total_of(strategy)
    assert float(total.numpy()) == 0.0
    assert deal(strategy, total, batches) == 10


def test_nothing_is_lost_where_the_program_was_left_in_order(left):
    """All servers end after it, and what came in while the last snapshot was written runs again."""
    batches = [np.full(2, i, np.float32) for i in range(10)]
    strategy = left()
    assert deal(strategy, total_of(strategy), batches, stop=6) == 6
    assert leaving.keep(strategy.link, strategy.record)
    strategy._leave(finished=False, stop_tasks=False)
    for index in (0, 1):
        strategy.cluster.stop("ps", index)
        strategy.cluster.start("ps", index)
    strategy = left(crash=None)
    total = total_of(strategy)
    assert deal(strategy, total, batches) == 4
    assert float(total.numpy()) == 2 * sum(range(10))
    assert strategy.coordinator.dispatcher.lost_pushes == 0


def test_a_last_snapshot_does_not_wait_for_a_server_that_is_gone(left, monkeypatch):
    strategy = left()
    deal(strategy, total_of(strategy), [np.ones(2, np.float32)])
    strategy.cluster.stop("ps", 1)
    gone = strategy.link.keep_last()
    assert isinstance(gone, PeerLostError)
    assert str(gone).startswith("Expected all servers to write it. Got nothing of ps 1 at 127.0.0.")
    monkeypatch.setattr("stratagem.parameter_server.link._SECONDS", 0.0)
    assert str(strategy.link.keep_last()) == (
        "Expected all servers to write it within 0 s. Not all have"
    )
    strategy.link.fail(BackupError("nothing to restore it from"))
    assert str(strategy.link.keep_last()) == "nothing to restore it from"
    strategy.cluster.start("ps", 1)


def test_whoever_dies_while_the_job_ends_has_ended_it(left, monkeypatch):
    """Servers that were told to stop have nothing any more: the journal must not go on with it."""
    strategy = left()
    assert deal(strategy, total_of(strategy), [np.ones(2, np.float32)]) == 1

    def killed(stop_tasks):
        raise KeyboardInterrupt

    monkeypatch.setattr(strategy.coordinator.dispatcher, "close", killed)
    monkeypatch.setattr("stratagem.parameter_server.holder.SILENT_SECONDS", 0.5)
    with pytest.raises(KeyboardInterrupt):
        strategy.close(stop_tasks=True)
    strategy = left(crash=None)
    assert strategy.record.resumed is None
    assert float(total_of(strategy).numpy()) == 0.0


def test_another_program_cannot_go_on(left):
    strategy = left()
    deal(strategy, total_of(strategy), [np.ones(2, np.float32)])
    strategy = left()
    with pytest.raises(BackupMismatchError, match="expected 'total', float32.*Got 'other'"):
        total_of(strategy, "other")


def test_what_cannot_be_sent_is_an_error(served, monkeypatch):
    """A closure that no worker will ever answer must not be waited for."""
    coordinator = ClusterCoordinator(served(1, 1))

    def run(*_args):
        raise MalformedMessageError("Expected at most 4096 arrays. Got 5000.")

    monkeypatch.setattr(Crew, "run", run)
    value = coordinator.schedule(lambda: np.float32(1) * 2)
    with pytest.raises(MalformedMessageError, match="Got 5000"):
        coordinator.join()
    with pytest.raises(MalformedMessageError, match="Got 5000"):
        value.fetch()
