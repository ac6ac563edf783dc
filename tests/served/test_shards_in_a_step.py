"""A variable that is cut into shards, in functions that workers run."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem.coordinator import ClusterCoordinator

TWO = stratagem.experimental.partitioners.FixedShardsPartitioner(2)


@pytest.fixture
def job(served):
    """A coordinator, a variable of five rows in two shards, and an optimizer."""
    strategy = served(1, 2, variable_partitioner=TWO)
    with strategy.scope():
        table = keras.Variable(np.arange(10.0).reshape(5, 2), name="table")
        assert len(table.variables) == 2
        yield ClusterCoordinator(strategy), table, keras.optimizers.SGD(1.0, momentum=0.9)


@pytest.mark.parametrize("ids", [np.int32(4), np.int32(-2), np.array([4, 0, -1]), np.array([[3]])])
def test_it_is_looked_up_as_one_that_is_whole(job, ids, caplog):
    coordinator, table, optimizer = job
    expected = table.numpy()
    found = coordinator.schedule(lambda i: table[i], (ids,)).fetch()
    np.testing.assert_array_equal(found, expected[ids])

    def step(i):
        with stratagem.GradientTape() as tape:
            loss = jnp.sum(table[i])
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return loss

    assert coordinator.schedule(step, (ids,)).fetch() == expected[ids].sum()
    np.subtract.at(expected, ids, 1)
    np.testing.assert_array_equal(table.numpy(), expected)
    assert "looked up by row" not in caplog.text


def test_a_row_number_that_is_not_in_it(job):
    coordinator, table, _ = job
    with pytest.raises(ValueError, match=r"Expected row numbers from 0 to 4 for 'table'.*Got -6 "):
        coordinator.schedule(lambda i: table[i], (np.int32(-6),)).fetch()


def gradient(table, _):
    shards = table.variables
    with stratagem.GradientTape() as tape:
        loss = sum(jnp.sum(shard.value) for shard in shards)
    return tape.gradient(loss, shards)


def watched(table, _):
    with stratagem.GradientTape() as tape:
        tape.watch(table.variables)


def applied(table, optimizer):
    grads = [jnp.ones(shard.shape) for shard in table.variables]
    optimizer.apply_gradients(zip(grads, table.variables, strict=True))


def scaled(table, _):
    applied(table, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))


@pytest.mark.parametrize("step", [gradient, watched, applied, scaled])
def test_gradients_are_those_of_the_variable(job, step):
    coordinator, table, optimizer = job
    wanted = "Expected variables. Got 'table/part_0', the rows 0 to 2 of the variable 'table'. Pass"
    with pytest.raises(TypeError, match=wanted):
        coordinator.schedule(lambda: step(table, optimizer)).fetch()


def test_an_optimizer_is_built_with_the_variable(job):
    _, table, optimizer = job
    with pytest.raises(TypeError, match="Pass the variable itself"):
        optimizer.build(table.variables)


def test_a_step_has_no_numpy_value_of_it(job):
    """It would be that of the time of tracing, for ever."""
    coordinator, table, _ = job
    for read in (table.numpy, table.variables[0].numpy):
        with pytest.raises(stratagem.errors.ReplicaBranchError, match="needs the value"):
            coordinator.schedule(lambda read=read: read() + 0)
