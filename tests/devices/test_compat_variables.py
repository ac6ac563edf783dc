"""tf.Variable and tf.Module: TensorFlow's constructor and methods on Keras variables."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem
from stratagem.compat import tensorflow as tf
from stratagem.errors import ReplicaDependentWriteError

SUM = tf.VariableAggregation.SUM
ON_READ = tf.VariableSynchronization.ON_READ


@pytest.fixture
def two():
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1"])


def replica_number():
    rid = stratagem.get_replica_context().replica_id_in_sync_group
    return tf.cast(rid, tf.float32) + 1


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [(1, "int32", ()), (1.5, "float32", ()), ([[1.0, 2.0]], "float32", (1, 2)), (True, "bool", ())],
)
def test_values(value, dtype, shape):
    v = tf.Variable(value)
    assert v.dtype == dtype
    assert v.get_shape() == v.shape == shape
    np.testing.assert_array_equal(v.numpy(), value)
    np.testing.assert_array_equal(v.read_value(), value)


def test_it_is_a_keras_variable():
    v = tf.Variable(lambda: tf.ones([2]), name="mine", trainable=False, dtype=tf.float16)
    assert isinstance(v, keras.Variable)
    assert (v.name, v.trainable, v.dtype) == ("mine", False, "float16")
    assert tf.Variable(0.0, synchronization=ON_READ).trainable is False
    assert tf.Variable(0.0, constraint=abs).constraint is abs

    class Scale(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.factor = tf.Variable(2.0)

        def call(self, x):
            return self.factor * x

    layer = Scale()
    assert float(layer(np.float32(3))) == 6.0
    assert layer.trainable_variables == [layer.factor]


def test_assignments_return_the_new_value():
    v = tf.Variable(1.0)
    assert v.assign(3.0).numpy() == 3.0
    assert v.assign_add(1.0, read_value=True).numpy() == 4.0
    assert v.assign_sub(2.0, use_locking=False).numpy() == 2.0
    w = tf.Variable([1.0, 2.0, 3.0])
    w.scatter_add(tf.IndexedSlices([1.0, 1.0], [1, 1]))
    w.scatter_sub(tf.IndexedSlices([3.0], [2]))
    assert w.numpy().tolist() == [1.0, 4.0, 0.0]


# Row 24 and 25 of the parity table: 10, then each replica writes its number.
@pytest.mark.parametrize(
    ("aggregation", "assigned", "added"),
    [("SUM", 3.0, 13.0), ("MEAN", 1.5, 11.5), ("ONLY_FIRST_REPLICA", 1.0, 11.0)],
)
def test_aggregation(two, aggregation, assigned, added):
    with two.scope():
        v = tf.Variable(10.0, aggregation=tf.VariableAggregation[aggregation])
    two.run(lambda: v.assign_add(replica_number()))
    assert v.numpy() == added
    two.run(lambda: v.assign(replica_number()))
    assert v.numpy() == assigned
    assert v.aggregation == aggregation.lower()


def test_no_aggregation_is_an_error(two):
    with two.scope():
        v = tf.Variable(10.0)
    with pytest.raises(ReplicaDependentWriteError, match="aggregation"):
        two.run(lambda: v.assign_add(replica_number()))


def test_synchronization_on_read(two):
    with two.scope():
        v = tf.Variable(10.0, synchronization=ON_READ, aggregation=SUM)
    assert v.numpy() == 20.0
    two.run(lambda: v.assign_add(replica_number()))
    assert v.numpy() == v.read_value().numpy() == 23.0


def test_rows_are_aggregated(two):
    with two.scope():
        v = tf.Variable([1.0, 2.0, 3.0], aggregation=SUM)
    two.run(lambda: v.scatter_add(tf.IndexedSlices(replica_number()[None], [1])))
    assert v.numpy().tolist() == [1.0, 5.0, 3.0]


def test_created_in_a_step(two):
    class Counter:
        v = None

    def step():
        if Counter.v is None:
            Counter.v = tf.Variable(lambda: tf.zeros([]), aggregation=SUM)
        return Counter.v.assign_add(1.0)

    two.run(step)
    two.run(step)
    assert Counter.v.numpy() == 4.0


def test_keys():
    v, w = tf.Variable(1.0), tf.Variable(1.0)
    assert {v.ref(): "v", w.ref(): "w"}[v.ref()] == "v"
    assert v.ref() != w.ref()
    assert v.ref().deref() is v


def test_errors(two):
    with pytest.raises(ValueError, match="Expected an initial value for tf.Variable. Got None"):
        tf.Variable()
    with pytest.raises(ValueError, match=r"Expected an initial value of shape \(3,\).*Got \(2,\)"):
        tf.Variable([1.0, 2.0], shape=[3])
    with two.scope(), pytest.raises(ValueError, match="Expected a float dtype"):
        tf.Variable(1, aggregation=tf.VariableAggregation.MEAN)


def test_modules():
    class Inner(tf.Module):
        def __init__(self):
            super().__init__("inner")
            self.w = tf.Variable(1.0)
            self.owner = None

    class Outer(tf.Module):
        def __init__(self):
            super().__init__()
            self.parts = [Inner(), {"b": tf.Variable(2.0, trainable=False)}]
            self.again = self.parts[0]
            self.again.owner = self
            self.dense = keras.layers.Dense(1)
            self.dense.build((None, 2))

    outer = Outer()
    assert outer.name == "outer"
    assert len(outer.variables) == 4
    assert len(outer.trainable_variables) == 3
