"""Every error text of strategies, contexts, values, variables and the replica context.

What was expected, what was got, where, and what to do: each pattern names all that the text has.
"""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem import IndexedSlices, Mirrored, PerReplica, ReduceOp
from stratagem.errors import (
    ReplicaBranchError,
    ReplicaDependentWriteError,
    StrategyMismatchError,
    UnevenShapesError,
)
from stratagem.strategies import DefaultStrategy

HERE = r"made at .*test_errors_strategies\.py:\d+"
TWO = rf"<MirroredStrategy on \[/device:CPU:0, /device:CPU:1\] {HERE}>"
ONE = rf"<OneDeviceStrategy on \[/device:CPU:3\] {HERE}>"


@pytest.fixture(scope="module")
def two():
    return stratagem.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="module")
def one():
    return stratagem.OneDeviceStrategy("CPU:3")


def context():
    return stratagem.get_replica_context()


def rank():
    return context().replica_id_in_sync_group + 1.0


def make(strategy, **kwargs):
    with strategy.scope():
        return keras.Variable(1.0, trainable=False, name="seen", **kwargs)


class TestCreation:
    def test_devices_as_a_string(self):
        with pytest.raises(
            TypeError,
            match=r"list of device strings. Got 'CPU:0'. Write devices=\['CPU:0'\]",
        ):
            stratagem.MirroredStrategy("CPU:0")

    def test_cross_device_ops_as_a_class(self):
        with pytest.raises(
            TypeError, match=r"such as NcclAllReduce\(\). Got <class .*RingAllReduce'>"
        ):
            stratagem.MirroredStrategy(["CPU:0"], cross_device_ops=stratagem.RingAllReduce)

    def test_the_default_strategy_again(self):
        with pytest.raises(RuntimeError, match=r"stratagem.get_strategy\(\).*There is one"):
            DefaultStrategy()

    def test_a_copy(self, two):
        with pytest.raises(
            RuntimeError, match=rf"copy.copy\({TWO}\), whose copy would.*Pass the strategy itself"
        ):
            copy.copy(two)

    def test_devices_of_the_default_strategy(self):
        with pytest.raises(RuntimeError, match="Use stratagem.OneDeviceStrategy"):
            _ = stratagem.get_strategy().parameter_devices


class TestContexts:
    def test_another_scope(self, two, one):
        with (
            two.scope(),
            pytest.raises(
                RuntimeError, match=rf"entering run of {ONE}. Got {TWO}. Leave its scope first"
            ),
        ):
            one.run(lambda: 1)

    def test_a_replica_function(self, two):
        text = (
            rf"Expected scope of {TWO} in cross-replica context. Got a call inside a replica "
            rf"function of {TWO}. Use get_replica_context\(\).merge_call"
        )
        with pytest.raises(RuntimeError, match=text):
            two.run(lambda: two.scope().__enter__())

    def test_the_default_scope(self, two):
        default = stratagem.get_strategy()
        text = rf"Got it inside the scope of {TWO}. Leave that scope instead"
        with two.scope(), pytest.raises(RuntimeError, match=text):
            default.scope().__enter__()

    def test_set_strategy_in_a_scope(self, two, one):
        text = rf"outside any strategy scope. Got a call inside the scope of {TWO}. Leave the scope"
        with two.scope(), pytest.raises(RuntimeError, match=text):
            stratagem.experimental_set_strategy(one)

    def test_a_strategy_found_while_tracing_without_one(self, two):
        text = rf"Expected {TWO} to be current.*Enter its scope.*@stratagem.function"
        with pytest.raises(RuntimeError, match=text):
            stratagem.get_strategy().run(lambda: two.run(lambda: 1))

    @pytest.mark.parametrize(
        ("what", "use"),
        [
            ("all_reduce", lambda ctx: ctx.all_reduce("SUM", 1.0)),
            ("all_gather", lambda ctx: ctx.all_gather(np.ones(1), 0)),
            ("merge_call", lambda ctx: ctx.merge_call(lambda s: s)),
            ("replica_id_in_sync_group", lambda ctx: ctx.replica_id_in_sync_group),
        ],
    )
    def test_a_replica_context_that_is_not_current(self, two, what, use):
        kept = two.run(context)
        text = (
            rf"Expected {what} on the current replica context.*Call stratagem.get_replica_context"
        )
        with pytest.raises(RuntimeError, match=text):
            use(kept)
        with pytest.raises(RuntimeError, match=text):
            two.run(lambda: context().merge_call(lambda s: use(kept)))


class TestRun:
    def test_no_function(self, two):
        text = r"Expected a function .* Got int. Write strategy.run\(step, args=\(x,\)\)"
        with pytest.raises(TypeError, match=text):
            two.run(3)
        with pytest.raises(TypeError, match=text):
            two.lower(3)

    def test_args_that_are_no_sequence(self, two):
        text = r"args as a list or tuple. Got float. Write args=\(x,\)"
        with pytest.raises(ValueError, match=text):
            two.run(lambda x: x, args=1.0)
        with pytest.raises(ValueError, match=text):
            two.lower(lambda x: x, args=1.0)

    def test_python_branches(self, two):
        def step():
            return 1.0 if context().replica_id_in_sync_group == 0 else 2.0

        text = r"tensor at .*test_errors_strategies.py:\d+ in step.*jnp.where.*jax.lax.cond"
        with pytest.raises(ReplicaBranchError, match=text):
            two.run(step)

    def test_parts_of_another_number_of_replicas(self, two, one):
        text = rf"each of the 2 replica\(s\) of {TWO}. Got 3 part\(s\). Use the strategy"
        value = PerReplica([np.float32(i) for i in range(3)])
        with pytest.raises(StrategyMismatchError, match=text):
            two.run(lambda x: x, (value,))
        with pytest.raises(StrategyMismatchError, match=text):
            two.reduce("SUM", value, axis=None)
        with pytest.raises(StrategyMismatchError, match=text):
            two.gather(PerReplica([np.ones(1)] * 3), axis=0)
        for single in (one, stratagem.get_strategy()):
            with pytest.raises(StrategyMismatchError, match=r"each of the 1 replica\(s\)"):
                single.run(lambda x: x, (value,))

    def test_parts_that_are_no_tensors(self, two):
        text = "tensors or numbers as the parts.*Got replica 0: 'a', replica 1: 'b'. Pass Python"
        with pytest.raises(TypeError, match=text):
            two.run(lambda x: x, (PerReplica(["a", "b"]),))

    def test_parts_of_different_structure(self, two):
        text = r"one structure on all replicas. Got replica 0: .*'a'.*, replica 1: .*'b'.*same keys"
        with pytest.raises(ValueError, match=text):
            two.run(lambda x: x, (PerReplica([{"a": 1}, {"b": 1}]),))
        with pytest.raises(ValueError, match=text):
            two.experimental_distribute_values_from_function(
                lambda ctx: {"ab"[ctx.replica_id_in_sync_group]: 1}
            )

    def test_parts_of_different_rank_or_dtype(self, two):
        text = r"one rank and dtype on all replicas. Got replica 0: \(\) float32, replica 1: \(1,\)"
        with pytest.raises(UnevenShapesError, match=text):
            two.run(lambda x: x, (PerReplica([np.float32(1), np.ones(1, np.float32)]),))

    def test_captured_values(self, two):
        value = PerReplica([np.float32(1)] * 2)
        text = "Got one that the function captured from outside. Pass it as an argument"
        with pytest.raises(ValueError, match=text):
            stratagem.function(lambda: two.run(lambda x: x, (value,)))()


class TestReductions:
    def test_reduce_op(self, two):
        text = r"'SUM' or 'MEAN'. Got 'max'. For other reductions, gather"
        for call in (
            lambda: two.reduce("max", 1.0, axis=None),
            lambda: two.run(lambda: context().all_reduce("max", 1.0)),
            lambda: ReduceOp.from_value("max"),
        ):
            with pytest.raises(ValueError, match=text):
                call()
        with pytest.raises(ValueError, match="Got 3"):
            ReduceOp.from_value(3)

    def test_the_axis_is_required(self, two):
        with pytest.raises(TypeError, match="axis"):
            two.reduce("SUM", 1.0)

    @pytest.mark.parametrize(
        ("make_value", "what"),
        [
            (lambda: np.ones(2), "ndarray"),
            (lambda: jnp.ones(2), "ArrayImpl"),
            (lambda: Mirrored([np.ones(2)] * 2), "Mirrored value"),
            (lambda: 1.0, "float"),
        ],
    )
    def test_sums_of_one_value(self, two, make_value, what):
        text = rf"sum over 2 replicas. Got a {what}, which is the same.*num_replicas_in_sync"
        with pytest.raises(ValueError, match=text):
            two.reduce("SUM", make_value(), axis=None)

    @pytest.mark.parametrize("axis", [1, -2, (0, 3)])
    @pytest.mark.parametrize("form", ["parts", "stacked", "shared", "traced"])
    def test_axes(self, two, axis, form):
        value = PerReplica([np.ones(2, np.float32)] * 2)
        calls = {
            "parts": lambda: two.reduce("MEAN", value, axis),
            "stacked": lambda: two.reduce("MEAN", two.run(lambda x: x, (value,)), axis),
            "shared": lambda: two.reduce("MEAN", np.ones(2), axis),
            "traced": lambda: two.run(
                lambda x: context().merge_call(lambda s, y: s.reduce("MEAN", y, axis), (x,)),
                (value,),
            ),
        }
        text = r"axis between -1 and 0 for parts of rank 1. Got axis=.*Pass axis=None"
        with pytest.raises(ValueError, match=text):
            calls[form]()

    def test_shapes_and_dtypes(self, two):
        text = r"Got replica 0: \(2,\) float32, replica 1: \(1,\) float32. Pass the axis.*or gather"
        with pytest.raises(UnevenShapesError, match=text):
            two.reduce("SUM", PerReplica([np.ones(2, np.float32), np.ones(1, np.float32)]), None)
        with pytest.raises(UnevenShapesError, match=r"0: \(\) float32, replica 1: \(\) int32"):
            two.reduce("SUM", PerReplica([np.float32(1), np.int32(1)]), axis=None)
        with pytest.raises(UnevenShapesError, match=r"0: \(2,\) float32, replica 1: \(3,\)"):
            two.reduce("SUM", PerReplica([np.ones((1, n), np.float32) for n in (2, 3)]), axis=0)

    def test_booleans(self, two):
        value = PerReplica([np.array([True])] * 2)
        text = "tensors of numbers to reduce. Got dtype bool. Cast to int32"
        for call in (
            lambda: two.reduce("SUM", value, axis=None),
            lambda: two.reduce("SUM", two.run(lambda x: x, (value,)), axis=0),
            lambda: two.reduce("MEAN", np.array([True]), axis=0),
            lambda: two.run(lambda x: context().all_reduce("SUM", x), (value,)),
            lambda: two.run(
                lambda x: context().merge_call(lambda s, y: s.reduce("SUM", y, None), (x,)),
                (value,),
            ),
        ):
            with pytest.raises(TypeError, match=text):
                call()

    def test_gather(self, two):
        text = r"an axis 0 to gather along. Got shape \(\) on replica 0. Return at least a vector"
        with pytest.raises(ValueError, match=text):
            two.gather(PerReplica([1.0, 2.0]), axis=0)
        text = r"all axes but axis 0. Got shapes replica 0: \(1, 2\), replica 1: \(1, 3\)"
        with pytest.raises(UnevenShapesError, match=text):
            two.gather(PerReplica([np.ones((1, n)) for n in (2, 3)]), axis=0)
        with pytest.raises(UnevenShapesError, match=r"0: \(1,\), replica 1: \(1, 1\)"):
            two.gather(PerReplica([np.ones(1), np.ones((1, 1))]), axis=0)

    def test_gather_of_slices(self, two):
        slices = IndexedSlices(np.ones((1, 1)), np.array([0]), (2, 1))
        for value in (slices, PerReplica([slices] * 2)):
            with pytest.raises(NotImplementedError, match=r"Got IndexedSlices. Call to_dense\(\)"):
                two.gather(value, axis=0)

    @pytest.mark.parametrize("axis", [1, -2])
    def test_all_gather(self, two, axis):
        text = rf"an axis {axis} to gather along. Got shape \(1,\). Add an axis first"
        with pytest.raises(ValueError, match=text):
            two.run(lambda: context().all_gather(np.ones(1), axis))
        with pytest.raises(ValueError, match=text):  # also without a strategy
            context().all_gather(np.ones(1), axis)


class TestValues:
    def test_none_at_all(self):
        with pytest.raises(ValueError, match="at least one replica. Got none. Pass a list"):
            PerReplica([])

    @pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, float, int, keras.ops.sum])
    def test_per_replica_values_are_no_tensors(self, convert):
        text = "Expected one tensor. Got a PerReplica value.*reduce or strategy.gather"
        with pytest.raises(ValueError, match=text):
            convert(PerReplica([1.0, 2.0]))

    def test_slices_without_a_shape(self, two):
        text = r"with a dense_shape. Got dense_shape=None. Pass dense_shape=\(rows, ...\)"
        slices = IndexedSlices(np.ones((1, 1)), np.array([0]))
        with pytest.raises(ValueError, match=text):
            slices.to_dense()
        with pytest.raises(ValueError, match=text):
            two.reduce("SUM", PerReplica([slices] * 2), axis=None)


class TestVariables:
    def test_synchronization(self, two):
        text = r"Expected synchronization .* for variable 'seen'.*Got 'none'. Create it outside"
        with pytest.raises(ValueError, match=text):
            make(two, synchronization="none")

    def test_mean_of_integers(self, two):
        text = (
            r"float dtype for variable 'seen' with aggregation 'mean'. Got int32. Use aggregation"
        )
        with pytest.raises(ValueError, match=text):
            make(two, aggregation="mean", dtype="int32")

    def test_other_strategies(self, two, one):
        var = make(one)
        text = (
            rf"Expected variables of {TWO}. Got 1 of another strategy:\n  seen: made under {ONE} at"
        )
        text += r" .*test_errors_strategies.py:\d+\nMake one strategy object"
        with pytest.raises(StrategyMismatchError, match=text):
            two.run(lambda: var.value)

    def test_reads_without_an_aggregation(self, two):
        var = make(two, synchronization="on_read")
        text = r"aggregation for variable 'seen' .* Got aggregation 'none'. Create it with"
        with pytest.raises(ValueError, match=text):
            _ = var.value

    def test_adds_outside_the_replicas(self, two):
        var = make(two, synchronization="on_read", aggregation="sum")
        text = "on 'seen' .* inside strategy.run.*Got it in cross-replica context.*or use assign"
        with pytest.raises(ValueError, match=text):
            var.assign_sub(1.0)
        with pytest.raises(ValueError, match=text):
            two.run(lambda: context().merge_call(lambda s: var.assign_add(1.0)))

    def test_a_metric_updated_outside_the_replicas(self, two):
        with two.scope():
            mean = keras.metrics.Mean()
        with pytest.raises(ValueError, match="or the metric's update_state"):
            mean.update_state([1.0])

    def test_writes_that_differ(self, two):
        var = make(two)
        text = (
            r"same on all replicas. Got replica-dependent values for 1 variable\(s\):\n  'seen' "
            r"\(shape \(\), float32, aggregation 'none', synchronization 'auto'\)\nSay how"
        )
        with pytest.raises(ReplicaDependentWriteError, match=text):
            two.run(lambda: var.assign(rank()))

    @pytest.mark.parametrize("form", ["loop", "branch", "grad", "jit"])
    def test_writes_inside_a_transformation(self, two, form):
        var = make(two, aggregation="sum")

        def write(x):
            var.assign_add(x)
            return x

        def step():
            x = jnp.ones(())
            if form == "loop":
                return jax.lax.fori_loop(0, 2, lambda _, y: write(y), x)
            if form == "branch":
                return jax.lax.cond(var.value > 0, write, lambda y: y, x)
            return jax.grad(write)(x) if form == "grad" else jax.jit(write)(x)

        text = r"top level of a step. Got a write to 'seen' .* at .*test_errors_strategies.py:\d+,"
        with pytest.raises(RuntimeError, match=text + r".*assign it afterwards.*GradientTape"):
            two.run(step)
        assert var.numpy() == 1.0

    def test_updates(self, two):
        text = "a keras.Variable to update. Got float. Pass the variable, not its value"
        with pytest.raises(TypeError, match=text):
            two.update(1.0, lambda v: v)
        text = "mirrored variable to update. Got 'seen' .*components need not be equal. Write it"
        with pytest.raises(ValueError, match=text):
            two.update(make(two, synchronization="on_read"), lambda v: v)
        text = r"same value on all replicas to update 'seen' .*(.|\n)*Reduce it first"
        with pytest.raises(ReplicaDependentWriteError, match=text):
            two.update(make(two), lambda v, x: v.assign(x), (PerReplica([1.0, 2.0]),))
