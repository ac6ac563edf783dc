"""Section 2.4: every aggregation and synchronisation, every write, from within and from outside."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem
from conformance.table import (
    COMPONENTS,
    SEVERAL,
    each,
    make,
    parts,
    plain,
    rank,
    replica_id,
    variable,
)
from conformance.table import components as comps
from stratagem import Mirrored, PerReplica, VariableAggregation, VariableSynchronization
from stratagem.errors import ReplicaDependentWriteError, StrategyMismatchError

AGGREGATIONS = ["sum", "mean", "only_first_replica"]
WRITES = ["assign", "assign_add", "assign_sub"]


@pytest.fixture(params=SEVERAL)
def strategy(request):
    return make(request.param)


@pytest.fixture(params=["default", "one"])
def single(request):
    return make(request.param)


@pytest.fixture
def two():
    return make("two")


def combined(aggregation, replicas):
    """What {1 | 2 | ...} combine to."""
    total = replicas * (replicas + 1) / 2
    return {"sum": total, "mean": total / replicas, "only_first_replica": 1.0}[aggregation]


def after(method, start, value):
    return {"assign": value, "assign_add": start + value, "assign_sub": start - value}[method]


class TestMirrored:
    @pytest.mark.parametrize("synchronization", ["auto", "on_write"])
    @pytest.mark.parametrize("method", WRITES)
    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    def test_replicas_write(self, strategy, aggregation, method, synchronization):
        var = variable(strategy, aggregation, synchronization)
        n = strategy.num_replicas_in_sync

        def step():
            written = getattr(var, method)(rank())
            return var.value, written

        read, written = strategy.run(step)
        expected = after(method, 10.0, combined(aggregation, n))
        assert plain(comps(strategy, var)) == each(n, lambda _: expected)
        assert plain(read) == plain(written) == each(n, lambda _: expected)

    @pytest.mark.parametrize("method", WRITES)
    def test_none_refuses_what_differs(self, strategy, method):
        var = variable(strategy, "none")
        with pytest.raises(ReplicaDependentWriteError, match=r"'variable.*' \(shape \(\)"):
            strategy.run(lambda: getattr(var, method)(rank()))
        assert var.numpy() == 10.0

    @pytest.mark.parametrize("method", WRITES)
    def test_none_takes_what_is_the_same(self, strategy, method):
        var = variable(strategy, "none")

        def step():
            getattr(var, method)(stratagem.get_replica_context().all_reduce("SUM", rank()))

        strategy.run(step)
        total = combined("sum", strategy.num_replicas_in_sync)
        assert var.numpy() == after(method, 10.0, total)

    def test_every_offender_is_named(self, two):
        offenders = [variable(two, "none") for _ in range(2)]
        fine = variable(two, "sum")

        def step():
            for var in (*offenders, fine):
                var.assign(rank())

        with pytest.raises(ReplicaDependentWriteError) as caught:
            two.run(step)
        assert [v.path in str(caught.value) for v in (*offenders, fine)] == [True, True, False]

    @pytest.mark.parametrize("method", WRITES)
    @pytest.mark.parametrize("aggregation", ["none", *AGGREGATIONS])
    def test_written_from_outside_it_is_the_same_everywhere(self, strategy, aggregation, method):
        var = variable(strategy, aggregation)
        n = strategy.num_replicas_in_sync
        getattr(var, method)(4.0)
        assert comps(strategy, var) == each(n, lambda _: after(method, 10.0, 4.0))
        with strategy.scope():
            getattr(var, method)(Mirrored([np.float32(4)] * n))
        twice = after(method, after(method, 10.0, 4.0), 4.0)
        assert comps(strategy, var) == each(n, lambda _: twice)
        devices = {stratagem.config.device_name(d) for d in var.value.sharding.device_set}
        assert devices == set(strategy.parameter_devices)

    def test_per_replica_values_from_outside_are_refused(self, two):
        """TF writes them component by component, and the copies diverge."""
        var = variable(two, "sum")
        with pytest.raises(ValueError, match="Expected one tensor. Got a PerReplica value"):
            var.assign(PerReplica([1.0, 2.0]))
        assert var.numpy() == 10.0

    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    def test_integers(self, two, aggregation):
        with two.scope():
            if aggregation == "mean":
                with pytest.raises(ValueError, match="Expected a float dtype for variable"):
                    keras.Variable(np.int32(10), dtype="int32", aggregation=aggregation)
                return
            var = keras.Variable(
                np.int32(10), dtype="int32", trainable=False, aggregation=aggregation
            )
        two.run(lambda: var.assign_add(rank(np.int32)))
        assert var.numpy() == 10 + combined(aggregation, 2)
        assert var.numpy().dtype == np.int32

    def test_flags_of_the_first_replica(self, two):
        with two.scope():
            var = keras.Variable(
                np.array([False, False]),
                dtype="bool",
                trainable=False,
                aggregation="only_first_replica",
            )
        two.run(lambda: var.assign(keras.ops.stack([replica_id() == 0, replica_id() == 1])))
        assert var.numpy().tolist() == [True, False]

    def test_a_number_is_added_to_every_element(self, two):
        var = variable(two, "sum", value=[1.0, 2.0])
        two.run(lambda: var.assign_add(rank()))
        assert var.numpy().tolist() == [4.0, 5.0]

    def test_writes_in_one_step_follow_each_other(self, two):
        var = variable(two, "sum")

        def step():
            var.assign_add(rank())  # 13
            var.assign(var.value * 2)  # 26 on each, 52 together
            var.assign_sub(rank())
            return var.value

        assert plain(two.run(step)) == each(2, lambda _: 49.0)
        assert var.numpy() == 49.0

    def test_the_initializer_runs_once(self, strategy):
        calls = []

        def initializer(shape, dtype=None):
            calls.append(shape)
            return np.full(shape, len(calls), dtype)

        with strategy.scope():
            var = keras.Variable(initializer, shape=(2,), dtype="float32")
        assert calls == [(2,)]
        assert comps(strategy, var) == each(strategy.num_replicas_in_sync, lambda _: [1.0, 1.0])


class TestOnRead:
    @pytest.fixture(params=COMPONENTS)
    def strategy(self, request):
        return make(request.param)

    @pytest.mark.parametrize("method", WRITES)
    @pytest.mark.parametrize("aggregation", ["none", *AGGREGATIONS])
    def test_replicas_write_their_own(self, strategy, aggregation, method):
        var = variable(strategy, aggregation, "on_read")
        n = strategy.num_replicas_in_sync

        def step():
            getattr(var, method)(rank())
            return var.value

        expected = each(n, lambda r: after(method, 10.0, r + 1.0))
        assert plain(strategy.run(step)) == expected
        assert comps(strategy, var) == expected

    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    def test_read_from_outside(self, strategy, aggregation):
        var = variable(strategy, aggregation, "on_read", value=0.0)
        strategy.run(lambda: var.assign(rank()))
        n = strategy.num_replicas_in_sync
        expected = combined(aggregation, n)
        assert var.numpy() == np.asarray(var.value) == expected
        assert float(var + 10.0) == expected + 10.0
        in_scope = []
        with strategy.scope():
            in_scope.append(float(var.value))
        assert in_scope == [expected]

    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    def test_read_in_cross_replica_context_of_a_program(self, strategy, aggregation):
        var = variable(strategy, aggregation, "on_read", value=0.0)
        n = strategy.num_replicas_in_sync

        def step():
            var.assign(rank())
            aggregate = stratagem.get_replica_context().merge_call(lambda s: var.value)
            return aggregate, var.value

        aggregate, own = strategy.run(step)
        assert plain(aggregate) == each(n, lambda _: combined(aggregation, n))
        assert plain(own) == each(n, lambda r: r + 1.0)

    @pytest.mark.parametrize("aggregation", AGGREGATIONS)
    @pytest.mark.parametrize("traced", [False, True])
    def test_assign_from_outside(self, strategy, aggregation, traced):
        var = variable(strategy, aggregation, "on_read")
        n = strategy.num_replicas_in_sync
        if traced:
            self.in_merge_call(strategy, lambda: var.assign(6.0))
        else:
            var.assign(6.0)
        share = 6.0 / n if aggregation == "sum" else 6.0
        assert comps(strategy, var) == each(n, lambda _: share)
        assert var.numpy() == 6.0

    @pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
    @pytest.mark.parametrize("aggregation", ["none", *AGGREGATIONS])
    @pytest.mark.parametrize("traced", [False, True])
    def test_add_from_outside(self, strategy, aggregation, method, traced):
        var = variable(strategy, aggregation, "on_read")
        n = strategy.num_replicas_in_sync
        strategy.run(lambda: var.assign_add(rank()))

        def add():
            getattr(var, method)(2.0)

        def call():
            return self.in_merge_call(strategy, add) if traced else add()

        if aggregation == "sum":
            with pytest.raises(ValueError, match="the share of each replica is unknown"):
                call()
            return
        call()
        expected = each(n, lambda r: after(method, 11.0 + r, 2.0))
        assert comps(strategy, var) == expected

    @staticmethod
    def in_merge_call(strategy, write):
        def merge(merging):
            del merging
            write()

        strategy.run(lambda: stratagem.get_replica_context().merge_call(merge))

    def test_integer_sums_are_kept_whole(self, strategy):
        with strategy.scope():
            var = keras.Variable(
                np.int32(0), dtype="int32", trainable=False, aggregation="sum",
                synchronization="on_read",
            )  # fmt: skip
        var.assign(7)
        assert var.numpy() == 7
        assert sum(int(v) for v in strategy.experimental_local_results(var)) == 7
        TestOnRead.in_merge_call(strategy, lambda: var.assign(8))
        assert var.numpy() == 8
        assert sum(int(v) for v in strategy.experimental_local_results(var)) == 8

    @pytest.mark.parametrize("traced", [False, True])
    def test_none_cannot_be_read_from_outside(self, strategy, traced):
        var = variable(strategy, "none", "on_read")

        def read_in_merge_call():
            ctx = stratagem.get_replica_context()
            return ctx.merge_call(lambda s: var.value)

        read = (lambda: strategy.run(read_in_merge_call)) if traced else var.numpy
        with pytest.raises(ValueError, match="Expected an aggregation for variable .* to read it"):
            read()

    def test_how_it_prints(self, two):
        var = variable(two, "none", "on_read")
        assert "components=[10.0, 10.0]" in repr(var)
        var.assign(3.0)
        assert "value=3.0" in repr(var)

    def test_an_aggregate_that_was_assigned_is_read_exactly(self, strategy):
        var = variable(strategy, "sum", "on_read")
        var.assign(0.1)
        assert var.numpy() == np.float32(0.1)


class TestOneReplica:
    @pytest.mark.parametrize("synchronization", ["auto", "on_read"])
    @pytest.mark.parametrize("method", WRITES)
    @pytest.mark.parametrize("aggregation", ["none", *AGGREGATIONS])
    def test_rules_change_nothing(self, single, aggregation, method, synchronization):
        var = variable(single, aggregation, synchronization)
        single.run(lambda: getattr(var, method)(rank()))
        assert var.numpy() == after(method, 10.0, 1.0)
        getattr(var, method)(2.0)
        assert var.numpy() == after(method, after(method, 10.0, 1.0), 2.0)


class TestCreation:
    def test_the_enums_are_taken(self, two):
        with two.scope():
            var = keras.Variable(
                1.0,
                aggregation=VariableAggregation.MEAN,
                synchronization=VariableSynchronization.ON_WRITE,
            )
        assert (var.aggregation, var.synchronization) == ("mean", "on_write")

    def test_synchronization_none(self, two):
        with two.scope(), pytest.raises(ValueError, match="Expected synchronization 'auto'"):
            keras.Variable(1.0, synchronization="none")

    def test_outside_a_scope_keras_rules_hold(self):
        assert keras.Variable(1.0, synchronization="none").synchronization == "none"

    def test_other_strategies_are_named(self, two):
        foreign = [variable(make("one"), "sum") for _ in range(2)]
        with pytest.raises(StrategyMismatchError) as caught:
            two.run(lambda: [v.assign_add(1.0) for v in foreign])
        text = str(caught.value)
        assert "Got 2 of another strategy" in text
        assert all(v.path in text for v in foreign)
        assert "table.py:" in text

    def test_a_variable_made_outside_moves_in_at_first_use(self, two):
        var = keras.Variable(1.0, trainable=False, aggregation="sum")
        on_read = keras.Variable(4.0, trainable=False, aggregation="sum", synchronization="on_read")

        def step():
            var.assign_add(rank())
            on_read.assign_add(rank())

        two.run(step)
        assert var.numpy() == 4.0
        assert on_read.numpy() == 7.0  # its value was the aggregate, and is kept


class TestUpdate:
    def test_grouped_and_not(self, strategy):
        var = variable(strategy, "none")
        n = strategy.num_replicas_in_sync
        delta = Mirrored([np.float32(1)] * n)
        result = strategy.extended.update(var, lambda v, x: v.assign_add(x), args=(delta,))
        assert isinstance(result, Mirrored) is not strategy.central
        assert plain(result) == 11.0
        result = strategy.extended.update(
            var, lambda v, *, x: v.assign_add(x), kwargs={"x": delta}, group=False
        )
        assert [float(v) for v in result] == [12.0] * (1 if strategy.central else n)
        assert var.numpy() == 12.0

    def test_one_replica(self, single):
        var = variable(single, "none")
        assert plain(single.extended.update(var, lambda v: v.assign_add(1.0))) == 11.0
        assert len(single.extended.update(var, lambda v: v.assign_add(1.0), group=False)) == 1

    def test_parts_that_differ(self, two):
        var = variable(two, "none")
        with pytest.raises(
            ReplicaDependentWriteError, match="same value on all replicas to update"
        ):
            two.extended.update(var, lambda v, x: v.assign(x), args=(parts(two, [1, 2]),))
        with pytest.raises(ReplicaDependentWriteError, match="same on all replicas"):
            two.run(
                lambda: stratagem.get_replica_context().merge_call(
                    lambda s, x: s.extended.update(var, lambda v, y: v.assign(y), args=(x,)),
                    (replica_id() * 1.0,),
                )
            )
        assert var.numpy() == 10.0

    def test_what_cannot_be_updated(self, two):
        with pytest.raises(StrategyMismatchError, match="of another strategy"):
            two.extended.update(variable(make("one"), "none"), lambda v: v.assign(0.0))
        with pytest.raises(ValueError, match="Expected a mirrored variable to update"):
            two.extended.update(variable(two, "sum", "on_read"), lambda v: v.assign(0.0))
        with pytest.raises(TypeError, match="Expected a keras.Variable to update. Got ndarray"):
            two.extended.update(np.ones(1), lambda v: v)


def test_an_optimizer_sums_gradients_and_steps_once(strategy):
    with strategy.scope():
        var = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply([rank()], [var]))
    n = strategy.num_replicas_in_sync
    assert var.numpy() == 1.0 - n * (n + 1) / 2
    assert optimizer.iterations.numpy() == 1
