"""tf.function: one program, or plain Python around compiled steps where it reads a dataset."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem.compat import tensorflow as tf
from stratagem.errors import ReplicaBranchError
from stratagem.step.same import identity


@pytest.fixture
def two():
    return stratagem.MirroredStrategy(["cpu:0", "cpu:1"])


def dataset(strategy, count=8):
    pytest.importorskip("grain", reason="tf.data stands on Grain, which is optional")
    numbers = tf.data.Dataset.range(count).map(lambda x: tf.cast(x, tf.float32)).batch(2)
    return strategy.experimental_distribute_dataset(numbers)


def test_plain_mathematics():
    traced = []

    @tf.function
    def f(x, y=2.0):
        traced.append(1)
        return x * y + 1

    assert f(tf.constant([1.0, 2.0])).numpy().tolist() == [3.0, 5.0]
    before = len(traced)
    assert f(tf.constant([2.0, 3.0])).numpy().tolist() == [5.0, 7.0]
    assert len(traced) == before


def test_python_numbers_are_constants():
    @tf.function(jit_compile=True)
    def power(x, n):
        for _ in range(n):
            x = x * x
        return x if n > 1 else -x

    assert float(power(tf.constant(2.0), 2)) == 16.0
    assert float(power(tf.constant(2.0), 1)) == -4.0


def test_gradients_and_variables():
    v = tf.Variable(3.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = v * v * x
        v.assign_sub(0.1 * tape.gradient(loss, v))
        return loss

    assert float(step(tf.constant(2.0))) == 18.0
    assert float(v.numpy()) == pytest.approx(1.8)


def test_run_and_reduce_are_one_program(two):
    @tf.function
    def step(x):
        return two.reduce("SUM", two.run(lambda v: v * 2, (x,)), axis=None)

    x = stratagem.PerReplica([np.float32(1), np.float32(2)])
    assert float(step(x)) == 6.0
    assert step.lower(x).as_text().count("all_reduce") == 1


def test_functions_in_replicas(two):
    @tf.function
    def double(x):
        return x * 2

    x = stratagem.PerReplica([np.float32(1), np.float32(2)])
    assert [float(v) for v in two.run(double, (x,)).values] == [2.0, 4.0]


def test_methods():
    class Loop:
        scale = 3.0

        @tf.function
        def step(self, x):
            return x * self.scale

    assert float(Loop().step(tf.constant(2.0))) == 6.0
    assert Loop.step.python_function(Loop(), 2.0) == 6.0


# Each reads a distributed dataset inside a tf.function, as the tutorials do.


def test_an_iterator_as_argument_does_not_retrace(two):
    traced = []

    @tf.function
    def train_step(iterator):
        def step_fn(x):
            traced.append(1)
            return tf.reduce_sum(x)

        return two.reduce("SUM", two.run(step_fn, (next(iterator),)), axis=None)

    iterator = iter(dataset(two))
    first = float(train_step(iterator))
    before = len(traced)
    assert [first, *(float(train_step(iterator)) for _ in range(3))] == [1.0, 5.0, 9.0, 13.0]
    assert len(traced) == before


def test_a_dataset_as_argument(two):
    @tf.function
    def epoch(batches):
        total = 0.0
        for x in batches:
            total += two.reduce("SUM", two.run(tf.reduce_sum, (x,)), axis=None)
        return total

    assert float(epoch(dataset(two))) == 28.0


def test_an_iterator_that_it_captured(two):
    iterator = iter(dataset(two))

    @tf.function
    def step():
        return two.reduce("SUM", two.run(tf.reduce_sum, (next(iterator),)), axis=None)

    assert [float(step()) for _ in range(4)] == [1.0, 5.0, 9.0, 13.0]  # no batch is lost
    with pytest.raises(tf.errors.OutOfRangeError, match="Got its end, in .*step"):
        step()


def test_a_dataset_without_a_strategy():
    numbers = tf.data.Dataset.range(5)

    @tf.function
    def total():
        return sum(int(x) for x in numbers)

    assert total() == 10


def test_branches_on_tensors_are_explained(two):
    @tf.function
    def step(x):
        return x if x > 0 else -x

    with pytest.raises(ReplicaBranchError, match="Choose between values with `jnp.where"):
        step(tf.constant(1.0))


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match=r"Expected options of tf.function.*Got \['colour'\]"):
        tf.function(colour="red")


class TestSameFunctions:
    """A function that is defined anew at each call is the same step when it does the same."""

    @staticmethod
    def make(factor, other=None, default=1):
        def fn(x, y=default):
            return x * factor + y if other is None else other(x)

        return fn

    def test_the_same(self):
        model = object()
        assert identity(self.make(model)) == identity(self.make(model))
        assert hash(identity(self.make(model))) == hash(identity(self.make(model)))
        inner = self.make(model)
        assert identity(self.make(1, inner)) == identity(self.make(1, self.make(model)))

    def test_not_the_same(self):
        model = object()
        assert identity(self.make(model)) != identity(self.make(object()))
        assert identity(self.make(model)) != identity(self.make(model, default=object()))
        assert identity(self.make(model)) != identity(lambda x: x)
        assert identity(len) != identity(max)
        inner = self.make(object())
        assert identity(self.make(1, inner)) != identity(self.make(1, self.make(object())))

    def test_functions_that_capture_themselves(self):
        def make():
            def a(n):
                return b(n - 1) if n else 0

            def b(n):
                return a(n - 1) if n else 1

            return a

        fn = make()
        assert identity(fn) == identity(fn)
        assert identity(fn) != identity(make())

    def test_a_captured_name_without_a_value(self):
        def make():
            def fn():
                return later

            key = identity(fn)
            later = 1
            return fn, key, later

        fn, key, _ = make()
        assert key != identity(fn)
        assert identity(fn) == identity(fn)

    def test_captured_objects_stay_alive(self, two):
        """A new object may not get the id, and so the program, of one that is gone."""
        for number in range(6):
            captured = jnp.float32(number)
            assert (
                float(two.run(lambda x, c=captured: x + c, (tf.constant(0.0),)).values[0]) == number
            )
            del captured

    def test_models_train_in_steps_that_are_made_anew(self, two):
        with two.scope():
            model = keras.Sequential(
                [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
            )
            optimizer = keras.optimizers.SGD(0.1)

        @tf.function
        def train(iterator):
            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(x))
                grads = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
                return loss

            return two.reduce("SUM", two.run(step, (next(iterator),)), axis=None)

        batches = two.experimental_distribute_dataset([np.ones((2, 1), np.float32)] * 3)
        iterator = iter(batches)
        found = [float(train(iterator)) for _ in range(3)]
        np.testing.assert_allclose(found, [2.0, 1.2, 0.4], rtol=1e-5)
        assert int(jax.device_get(optimizer.iterations.value)) == 3
