"""Section 2.1: who is current where, scopes and their nesting, the default strategy."""

from __future__ import annotations

import copy
import threading

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from conformance.table import REAL, make, parts, plain, variable
from stratagem import context


@pytest.fixture(params=REAL)
def strategy(request):
    return make(request.param)


@pytest.fixture
def default():
    return stratagem.get_strategy()


def where():
    return (
        stratagem.has_strategy(),
        stratagem.in_cross_replica_context(),
        stratagem.get_replica_context() is not None,
    )


def test_nothing_entered(default):
    assert where() == (False, False, True)
    ctx = stratagem.get_replica_context()
    assert ctx.num_replicas_in_sync == 1
    assert ctx.replica_id_in_sync_group == 0
    assert type(ctx.replica_id_in_sync_group) is int
    assert ctx.strategy is default


def test_the_device_of_a_replica(strategy):
    def step():
        seen.append(stratagem.get_replica_context().devices)
        return jnp.float32(0)

    seen = []
    if strategy.num_replicas_in_sync == 1:
        strategy.run(step)
        assert set(seen) == {strategy.worker_devices}
    else:
        match = "devices: expected a strategy of one replica, .* Use replica_id_in_sync_group"
        with pytest.raises(NotImplementedError, match=match):
            strategy.run(step)


def test_scope_run_and_merge_call(strategy):
    seen = {}

    def merge(merging):
        seen["merge"] = (*where(), merging is strategy, stratagem.get_strategy() is strategy)

    def step():
        ctx = stratagem.get_replica_context()
        seen["run"] = (*where(), ctx.strategy is strategy, ctx.num_replicas_in_sync)
        ctx.merge_call(merge)
        seen["after"] = where()

    with strategy.scope() as entered:
        assert entered is strategy
        assert where() == (True, True, False)
        strategy.run(step)
        assert where() == (True, True, False)
    assert where() == (False, False, True)
    assert seen == {
        "run": (True, False, True, True, strategy.num_replicas_in_sync),
        "merge": (True, True, False, True, True),
        "after": (True, False, True),
    }


def test_run_enters_the_strategy_by_itself(strategy):
    assert strategy.run(lambda: stratagem.get_strategy() is strategy) is True
    assert where() == (False, False, True)


def test_the_replica_id_is_an_int32_scalar(strategy):
    def step():
        rid = stratagem.get_replica_context().replica_id_in_sync_group
        return rid.shape == () and rid.dtype == np.int32

    assert strategy.run(step) is True


def test_same_scope_nests(strategy):
    with strategy.scope(), strategy.scope():
        assert context.depth() == 2
    assert context.depth() == 0


def test_an_error_leaves_the_scope(strategy):
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError
    assert where() == (False, False, True)


@pytest.mark.parametrize("call", ["scope", "run", "reduce", "gather", "update", "lower"])
def test_every_entry_refuses_another_strategys_scope(strategy, call):
    def enter(other):
        value = parts(other, [[1], [2], [3]])
        if call == "scope":
            with other.scope():
                pass
        elif call in ("run", "lower"):
            getattr(other, call)(lambda: 1)
        elif call == "update":
            other.update(mine, lambda v: v.assign(0.0))
        else:
            getattr(other, call)(*(["SUM"] if call == "reduce" else []), value, axis=0)

    other = stratagem.OneDeviceStrategy("CPU:4")
    mine = variable(other, "none")
    with strategy.scope(), pytest.raises(RuntimeError, match=f"when entering {call} of <OneDevice"):
        enter(other)


@pytest.mark.parametrize("call", ["reduce", "gather", "update"])
def test_every_entry_refuses_a_replica_function(strategy, call):
    var = variable(strategy, "none")
    calls = {
        "reduce": lambda x: strategy.reduce("SUM", x, axis=0),
        "gather": lambda x: strategy.gather(x, axis=0),
        "update": lambda x: strategy.extended.update(var, lambda v: v.assign(0.0)),
    }
    with pytest.raises(RuntimeError, match=f"Expected {call} of .* in cross-replica context"):
        strategy.run(calls[call], (np.ones(2, np.float32),))


def test_variables_remember_their_strategy(strategy):
    var = variable(strategy, "sum")
    assert strategy.extended.variable_created_in_scope(var)
    outside = keras.Variable(1.0)
    assert not strategy.extended.variable_created_in_scope(outside)
    assert not stratagem.MirroredStrategy(["CPU:0"]).extended.variable_created_in_scope(var)
    strategy.run(lambda: var.assign_add(1.0))  # outside the scope
    assert var.numpy() == 10.0 + strategy.num_replicas_in_sync
    var.assign(4.0)
    assert var.numpy() == 4.0


def test_a_variable_that_the_default_strategy_used_can_still_move_in(strategy, default):
    var = keras.Variable(1.0, trainable=False)
    default.run(lambda: var.assign_add(1.0))
    strategy.run(lambda: var.assign(var + 1.0))
    assert var.numpy() == 3.0
    assert strategy.extended.variable_created_in_scope(var)


def test_the_default_strategy_computes_with_the_variables_of_others(strategy, default):
    mirrored = variable(strategy, "sum")
    on_read = variable(strategy, "sum", "on_read", value=3.0)

    def step():
        mirrored.assign_add(1.0)
        return mirrored.value + on_read.value

    total = 3.0 if strategy.central else 3.0 * strategy.num_replicas_in_sync
    assert float(default.run(step)) == 11.0 + total
    assert mirrored.numpy() == 11.0
    names = {stratagem.config.device_name(d) for d in mirrored.value.sharding.device_set}
    assert names == set(strategy.parameter_devices)


def test_set_strategy_lasts_until_none(strategy):
    stratagem.experimental_set_strategy(strategy)
    try:
        assert where() == (True, True, False)
        assert stratagem.get_strategy() is strategy
        with strategy.scope():
            assert stratagem.get_strategy() is strategy
        var = keras.Variable(1.0)
        assert strategy.extended.variable_created_in_scope(var)
        with pytest.raises(RuntimeError, match="Expected no other strategy to be current"):
            stratagem.OneDeviceStrategy("CPU:5").run(lambda: 1)
    finally:
        stratagem.experimental_set_strategy(None)
    assert where() == (False, False, True)


def test_set_strategy_replaces_the_one_before(strategy, default):
    other = stratagem.OneDeviceStrategy("CPU:5")
    stratagem.experimental_set_strategy(strategy)
    stratagem.experimental_set_strategy(other)
    assert stratagem.get_strategy() is other
    stratagem.experimental_set_strategy(default)
    assert not stratagem.has_strategy()


def test_set_strategy_inside_a_scope(strategy):
    with strategy.scope(), pytest.raises(RuntimeError, match="outside any strategy scope"):
        stratagem.experimental_set_strategy(strategy)


def test_each_thread_has_its_own_stack(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(where()))
        thread.start()
        thread.join()
    assert seen == [(False, False, True)]


def test_copies(strategy, default):
    for each in (strategy, default):
        with pytest.raises(RuntimeError, match="one object for each strategy"):
            copy.copy(each)
        assert copy.deepcopy(each) is each


def test_deep_copies_of_variables_stay_in_the_strategy(strategy):
    for synchronization in ("auto", "on_read"):
        var = variable(strategy, "sum", synchronization)
        twin = copy.deepcopy(var)
        strategy.run(lambda v=twin: v.assign_add(1.0))
        assert strategy.extended.variable_created_in_scope(twin)
        assert twin.numpy() == var.numpy() + strategy.num_replicas_in_sync


class TestDefaultStrategy:
    def test_values_are_bare(self, default):
        assert default.num_replicas_in_sync == 1
        assert default.experimental_distribute_values_from_function(lambda ctx: [ctx]) != []
        value = object()
        assert default.experimental_local_results(value) == (value,)
        assert default.experimental_local_results([1, 2]) == ([1, 2],)

    def test_an_axis_is_reduced(self, default):
        value = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
        assert plain(default.reduce("SUM", value, axis=0)) == [4.0, 7.0]
        assert plain(default.reduce("MEAN", value, axis=(0, 1))) == 2.75

    def test_its_scope_is_no_strategy(self, default):
        with default.scope() as entered:
            assert entered is default
            assert where() == (False, False, True)

    def test_its_scope_inside_another(self, default, strategy):
        with (
            strategy.scope(),
            pytest.raises(RuntimeError, match="default strategy's scope outside"),
            default.scope(),
        ):
            pass

    def test_run_inside_another_scope(self, default, strategy):
        with strategy.scope(), pytest.raises(RuntimeError, match="Expected no other strategy"):
            default.run(lambda: 1)

    def test_worker_devices(self, default):
        with pytest.raises(RuntimeError, match="leaves placement to JAX"):
            _ = default.worker_devices

    def test_collectives_are_the_identity_in_plain_python(self, default):
        ctx = stratagem.get_replica_context()
        assert plain(ctx.all_reduce("SUM", {"a": np.float32(3)})) == {"a": 3.0}
        assert plain(ctx.all_reduce("MEAN", np.int32(3))) == 3.0
        assert plain(ctx.all_gather(np.ones(2, np.float32), axis=0)) == [1.0, 1.0]
        seen = ctx.merge_call(
            lambda s, x, y: (s, x + y, stratagem.in_cross_replica_context()), (1,), {"y": 2}
        )
        assert seen == (default, 3, True)


def test_cluster_resolvers(strategy, default):
    """Strategies of one process have none; TPUStrategy has what knows the slice."""
    wanted = type(None), stratagem.cluster_resolver.TPUClusterResolver
    assert isinstance(strategy.cluster_resolver, wanted[strategy is make("tpu")])
    assert default.cluster_resolver is None
    assert strategy.extended is strategy


def test_devices_by_name():
    assert make("one").worker_devices == ("/device:CPU:1",)
    assert make("three").worker_devices == ("/device:CPU:2", "/device:CPU:0", "/device:CPU:1")
    assert make("three").parameter_devices == make("three").worker_devices
