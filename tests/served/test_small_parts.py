"""Small parts of TF's interface: per-worker variables, reduce and gather, strategies on workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem
from stratagem.compat import tensorflow as tf
from stratagem.coordinator import ClusterCoordinator, PerWorkerVariable
from stratagem.strategies import parameter_server
from stratagem.strategies.on_worker import OnWorker


def test_a_variable_of_each_worker(served):
    """TF: 6 increments over 2 workers sum to 6."""
    strategy = served()
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count = PerWorkerVariable(0.0)
        last = PerWorkerVariable(np.zeros(2, np.int32), name="last")

    def step(x):
        count.assign_add(1.0)
        last.assign(x)
        return last.value

    values = [coordinator.schedule(step, (np.full(2, i + 1, np.int32),)) for i in range(6)]
    coordinator.join()
    assert [v.fetch().tolist() for v in values] == [[i + 1] * 2 for i in range(6)]
    assert count.read_all().shape == (2,)
    assert count.read_all().sum() == 6.0
    assert set(last.read_all().reshape(-1)) <= set(range(7))
    with pytest.raises(ValueError, match=r"Use read_all\(\) there"):
        _ = count.value
    with strategy.scope():
        same = tf.Variable(1.0, per_worker_variable=True, dtype="float32")
    assert isinstance(same, PerWorkerVariable)
    assert same.read_all().tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="Expected a PerWorkerVariable in the scope"):
        PerWorkerVariable(0.0)


def test_values_on_the_coordinator(served, caplog):
    strategy = served(1, 1)
    parameter_server._warn_unscheduled.cache_clear()
    x = np.float32(3)
    assert strategy.reduce("SUM", strategy.run(lambda v: v + 0.0, (x,)), axis=None) == 3.0
    strategy.reduce("SUM", np.ones(2, np.float32), axis=0)
    assert caplog.text.count("strategy.reduce of a ParameterServerStrategy was called outside") == 1
    assert strategy.experimental_local_results(x) == (x,)
    np.testing.assert_array_equal(strategy.gather(np.ones((2, 1)), axis=0), np.ones((2, 1)))
    assert strategy.num_replicas_in_sync == 1


def test_scattered_reads_are_one_request(served):
    strategy = served(
        1, 2, variable_partitioner=stratagem.experimental.partitioners.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        table = keras.Variable(np.arange(40, dtype=np.float32).reshape(20, 2), name="table")
    servers = strategy.link.servers
    sent = []
    for peer in servers.peers:
        peer.post = lambda *args, post=peer.post, **kw: sent.append(args[0]) or post(*args, **kw)
    found = table.sparse_read(np.array([17, 3, 3, 9]))
    np.testing.assert_array_equal(found, table.numpy()[[17, 3, 3, 9]])
    assert sent[:2] == ["pull", "pull"]  # one a server
    assert sent[2:].count("pull") == 0


def test_a_strategy_in_a_dataset_function(served):
    """The tutorial's way: the worker asks the strategy for the function that makes the dataset."""
    strategy = served(1, 1)
    coordinator = ClusterCoordinator(strategy)

    @stratagem.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(
            lambda context: [np.float32(context.num_input_pipelines)]
        )

    iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
    assert coordinator.schedule(lambda it: next(it), (iterator,)).fetch() == 1.0


def test_what_a_strategy_on_a_worker_is_not():
    here = OnWorker()
    assert here.experimental_distribute_dataset([1]) == [1]
    with pytest.raises(AttributeError, match=r"uses strategy\.run on a worker"):
        here.run(len)
