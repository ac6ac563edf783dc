"""`CrossDeviceOps.reduce`, `batch_reduce` and `broadcast`, called outside a step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
    TreeAllReduce,
)
from stratagem.errors import UnevenShapesError
from stratagem.values import IndexedSlices, Mirrored, PerReplica, ReduceOp

EVERY = [
    NcclAllReduce(),
    HierarchicalCopyAllReduce(),
    ReductionToOneDevice(),
    RingAllReduce(),
    TreeAllReduce(),
]


def on_devices(*values: object) -> PerReplica:
    """A value whose parts live on the first devices, one each."""
    pairs = zip(values, jax.devices("cpu"), strict=False)
    return PerReplica([jax.device_put(jnp.asarray(v), d) for v, d in pairs])


def numbers(value: Mirrored) -> list[float]:
    return [float(part) for part in value.values]


@pytest.mark.parametrize("ops", EVERY, ids=lambda ops: type(ops).__name__)
class TestReduce:
    def test_to_the_devices_of_a_value(self, ops):
        value = on_devices(1.0, 2.0)
        result = ops.reduce("SUM", value, destinations=value)
        assert isinstance(result, Mirrored)
        assert numbers(result) == [3, 3]
        assert [part.device for part in result.values] == jax.devices("cpu")[:2]
        assert numbers(ops.reduce(ReduceOp.MEAN, value, value)) == [1.5, 1.5]

    def test_parts_that_share_a_device(self, ops):
        value = PerReplica([1.0, 2.0, 4.0])
        assert numbers(ops.reduce("sum", value, value)) == [7, 7, 7]

    def test_to_one_device(self, ops):
        result = ops.reduce("SUM", on_devices(1, 2), "/cpu:3")
        assert isinstance(result, jax.Array)
        assert result.device == jax.devices("cpu")[3]
        assert result.dtype == jnp.int32
        assert int(result) == 3

    def test_to_several_devices(self, ops):
        result = ops.reduce("SUM", on_devices(1.0, 2.0), ["/cpu:1", "/cpu:2", "/cpu:3"])
        assert numbers(result) == [3, 3, 3]
        assert [part.device for part in result.values] == jax.devices("cpu")[1:4]
        assert isinstance(ops.reduce("SUM", on_devices(1.0, 2.0), ["/cpu:1"]), jax.Array)

    def test_to_where_an_array_lives(self, ops):
        target = jax.device_put(jnp.zeros(5), jax.devices("cpu")[2])
        result = ops.reduce("SUM", on_devices(1.0, 2.0), target)
        assert float(result) == 3
        assert result.device == jax.devices("cpu")[2]
        assert float(ops.reduce("SUM", on_devices(1.0, 2.0), np.zeros(2))) == 3

    def test_mean_of_integers_is_a_float(self, ops):
        result = ops.reduce("MEAN", on_devices(1, 2), "/cpu:0")
        assert result.dtype == jnp.float32
        assert float(result) == 1.5

    def test_one_value_is_one_replica(self, ops):
        assert float(ops.reduce("SUM", jnp.asarray(5.0), "/cpu:0")) == 5

    def test_batch(self, ops):
        a, b = on_devices(1.0, 2.0), on_devices([1, 2], [3, 4])
        first, second = ops.batch_reduce("SUM", [(a, a), (b, "/cpu:1")])
        assert numbers(first) == [3, 3]
        np.testing.assert_array_equal(second, [4, 6])
        assert ops.batch_reduce("SUM", []) == []

    def test_broadcast(self, ops):
        result = ops.broadcast(jnp.asarray(7.0), ["/cpu:0", "/cpu:1"])
        assert isinstance(result, Mirrored)
        assert numbers(result) == [7, 7]
        assert numbers(ops.broadcast(3.0, on_devices(1.0, 2.0))) == [3, 3]
        assert float(ops.broadcast(3.0, "/cpu:1")) == 3


def test_stacked_values_and_variables_as_destination():
    mesh = jax.make_mesh((2,), ("replica",), devices=jax.devices("cpu")[:2])
    spread = jax.NamedSharding(mesh, jax.P("replica"))
    value = PerReplica.from_stacked(jax.device_put(jnp.asarray([1.0, 2.0]), spread))
    assert numbers(RingAllReduce().reduce("SUM", value, value)) == [3, 3]
    replicated = jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, jax.P()))
    result = RingAllReduce().reduce("SUM", value, replicated)
    assert result.sharding.is_fully_replicated
    assert len(result.devices()) == 2
    with pytest.raises(ValueError, match=r"shape \[2\] that is split over 2 devices"):
        RingAllReduce().reduce("SUM", value, value.stacked)


class TestIndexedSlices:
    def test_rows_of_all_replicas_in_order_next_to_a_dense_value(self):
        rows = [IndexedSlices([[1.0]], [1], (3, 1)), IndexedSlices([[2.0], [3.0]], [1, 0], (3, 1))]
        dense = on_devices(1.0, 2.0)
        ops = RingAllReduce()
        sparse, total = ops.batch_reduce("SUM", [(PerReplica(rows), "/cpu:1"), (dense, dense)])
        np.testing.assert_array_equal(sparse.indices, [1, 1, 0])
        np.testing.assert_array_equal(sparse.values, [[1], [2], [3]])
        np.testing.assert_array_equal(sparse.to_dense(), [[3], [3], [0]])
        assert sparse.values.device == jax.devices("cpu")[1]
        assert numbers(total) == [3, 3]
        mean = ops.reduce("MEAN", PerReplica(rows), dense)
        assert isinstance(mean, Mirrored)
        np.testing.assert_array_equal(mean.values[1].to_dense(), [[1.5], [1.5], [0]])
        assert isinstance(ops.reduce("SUM", PerReplica(rows), PerReplica(rows)), Mirrored)

    def test_parts_that_do_not_fit(self):
        mixed = PerReplica([IndexedSlices(jnp.ones((1, 2)), [0], (3, 2)), 1.0])
        message = r"value 0: replica 0 rows float32\[2\] of \[3, 2\], replica 1 float\. Use"
        with pytest.raises(UnevenShapesError, match=message):
            RingAllReduce().reduce("SUM", mixed, "/cpu:0")


def test_a_fold_of_ones_own_and_a_device_to_fold_on():
    ops = ReductionToOneDevice("/cpu:1", lambda parts: functools.reduce(jnp.multiply, parts))
    value = on_devices(2.0, 3.0)
    assert numbers(ops.reduce("SUM", value, value)) == [6, 6]
    assert numbers(ops.reduce("MEAN", value, value)) == [3, 3]


def test_a_batch_is_one_all_reduce():
    calls = []

    class Counting(TreeAllReduce):
        def all_reduce(self, values, axis_name, axis_size):
            calls.append(len(values))
            return super().all_reduce(values, axis_name, axis_size)

    a, b = on_devices(1.0, 2.0), on_devices(3.0, 4.0)
    Counting().batch_reduce("SUM", [(a, a), (b, b)])
    assert calls == [2]


class TestSubclassInTheMannerOfTensorFlow:
    class Largest(CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            self.seen = reduce_op, options
            return max(float(v) for v in per_replica_value.values)

        def broadcast_implementation(self, tensor, destinations):
            return tensor, destinations

    def test_overrides_are_called(self):
        ops = self.Largest()
        value = on_devices(1.0, 4.0)
        assert ops.reduce("mean", value, value, options="hints") == 4
        assert ops.seen == (ReduceOp.MEAN, "hints")
        assert ops.batch_reduce("SUM", [(value, value), (PerReplica([1, 2]), "/cpu:0")]) == [4, 2]
        assert ops.broadcast(1, "/cpu:0") == (1, "/cpu:0")

    def test_checks_come_first(self):
        with pytest.raises(ValueError, match="Expected destinations"):
            self.Largest().reduce("SUM", on_devices(1.0, 2.0), [])

    def test_a_batch_of_ones_own(self):
        class Batch(CrossDeviceOps):
            def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
                return [len(value_destination_pairs)]

        assert Batch().batch_reduce("SUM", [(1.0, "/cpu:0"), (2.0, "/cpu:0")]) == [2]

    def test_in_a_step_it_says_what_to_define(self):
        with pytest.raises(NotImplementedError, match=r"Expected Largest to define all_reduce\("):
            self.Largest().all_reduce([jnp.ones(())], "replica", 2)


class TestErrors:
    ops = RingAllReduce()

    @pytest.mark.parametrize("destinations", [[], (), None])
    def test_no_destinations(self, destinations):
        value = on_devices(1.0, 2.0)
        with pytest.raises(ValueError, match=r"Expected destinations: .* pass the value itself"):
            self.ops.reduce("SUM", value, destinations)
        with pytest.raises(ValueError, match="Expected destinations"):
            self.ops.batch_reduce("SUM", [(value, value), (value, destinations)])
        with pytest.raises(ValueError, match="Expected destinations"):
            self.ops.broadcast(1.0, destinations)

    def test_destinations_of_no_place(self):
        with pytest.raises(TypeError, match=r"Expected destinations: .*Got dict"):
            self.ops.reduce("SUM", on_devices(1.0, 2.0), {})

    def test_unknown_op(self):
        with pytest.raises(ValueError, match=r"Got 'MAX'"):
            self.ops.reduce("MAX", on_devices(1.0, 2.0), "/cpu:0")

    def test_pairs(self):
        value = on_devices(1.0, 2.0)
        with pytest.raises(TypeError, match=r"list of \(value, destinations\)\. Got PerReplica"):
            self.ops.batch_reduce("SUM", value)
        with pytest.raises(ValueError, match=r"Got at \[0\]: PerReplica, \[2\]: int\. Pair each"):
            self.ops.batch_reduce("SUM", [value, (value, value), 3])

    def test_shapes_and_dtypes_that_differ_are_all_named(self):
        pairs = [
            (on_devices([1.0], [1.0, 2.0]), "/cpu:0"),
            (on_devices(1.0, 2.0), "/cpu:0"),
            (on_devices(1.0, 2), "/cpu:0"),
        ]
        message = (
            r"value 0: replica 0 float32\[1\], replica 1 float32\[2\]; "
            r"value 2: replica 0 float32\[\], replica 1 int32\[\]\. Pad"
        )
        with pytest.raises(UnevenShapesError, match=message):
            self.ops.batch_reduce("SUM", pairs)

    def test_different_numbers_of_replicas(self):
        pairs = [(on_devices(1.0, 2.0), "/cpu:0"), (on_devices(1.0, 2.0, 3.0), "/cpu:0")]
        with pytest.raises(ValueError, match=r"value 0: 2, value 1: 3\. Reduce them one by one"):
            self.ops.batch_reduce("SUM", pairs)

    def test_booleans(self):
        with pytest.raises(TypeError, match=r"values\[0\]: bool\[\] in RingAllReduce"):
            self.ops.reduce("SUM", on_devices(True, False), "/cpu:0")

    def test_options(self):
        value = on_devices(1.0, 2.0)
        with pytest.raises(ValueError, match=r"no options for RingAllReduce.*Got 'ring'"):
            self.ops.reduce("SUM", value, value, options="ring")

    def test_more_replicas_than_devices(self):
        value = PerReplica([float(i) for i in range(9)])
        with pytest.raises(
            ValueError, match=r"each of 9 replicas\. Got 8: .*set_virtual_devices\(9\)"
        ):
            self.ops.reduce("SUM", value, value)


def test_a_packed_op_must_say_how_a_pack_is_summed():
    from stratagem.collectives.packed import PackedAllReduce

    class Half(PackedAllReduce):
        pass

    with pytest.raises(NotImplementedError, match="Expected Half to define pack_sum. Got none"):
        Half().pack_sum(None, "replica", 2, 0)
    with pytest.raises(NotImplementedError, match="Expected Half to define pack_cost. Got none"):
        Half().cost([np.zeros(3, np.float32)], 2)
