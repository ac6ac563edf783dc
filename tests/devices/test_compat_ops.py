"""Operations under TensorFlow's names: the values that TensorFlow gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem
from stratagem.compat import tensorflow as tf

X = [[1.0, 2.0], [3.0, 5.0]]

# Each with what TensorFlow 2.21 gives.
VALUES = [
    (lambda: tf.constant([1, 2]), [1, 2]),
    (lambda: tf.constant(3.0, shape=[2]), [3.0, 3.0]),
    (lambda: tf.constant([1, 2, 3, 4], shape=(2, 2)), [[1, 2], [3, 4]]),
    (lambda: tf.convert_to_tensor([tf.constant(1.0), 2.0]), [1.0, 2.0]),
    (lambda: tf.cast([1.7, -1.7], tf.int32), [1, -1]),
    (lambda: tf.reduce_mean([1, 2]), 1),
    (lambda: tf.reduce_mean(X), 2.75),
    (lambda: tf.reduce_sum(X, axis=0), [4.0, 7.0]),
    (lambda: tf.reduce_sum(X, axis=[0, 1]), 11.0),
    (lambda: tf.reduce_max(X, 1, keepdims=True), [[2.0], [5.0]]),
    (lambda: tf.reduce_any([True, False]), True),
    (lambda: tf.reduce_all([True, False]), False),
    (lambda: tf.reduce_prod(X), 30.0),
    (lambda: tf.reduce_logsumexp([0.0, 0.0]), np.log(2)),
    (lambda: tf.math.reduce_std(X), np.std(X)),
    (lambda: tf.math.reduce_variance(X), np.var(X)),
    (lambda: tf.add(1, 2), 3),
    (lambda: tf.add(tf.constant([1.0]), 2), [3.0]),
    (lambda: tf.divide(tf.constant([1, 2]), 2), [0.5, 1.0]),
    (lambda: tf.math.divide_no_nan([1.0, 2.0], [0.0, 4.0]), [0.0, 0.5]),
    (lambda: tf.math.floormod(-7, 3), 2),
    (lambda: tf.math.squared_difference([1.0], [4.0]), [9.0]),
    (lambda: tf.maximum([1, 5], 3), [3, 5]),
    (lambda: tf.add_n([tf.constant(1.0), tf.constant(2.0)]), 3.0),
    (lambda: tf.matmul(X, X, transpose_b=True), [[5.0, 13.0], [13.0, 34.0]]),
    (lambda: tf.einsum("ij,j->i", tf.constant(X), [1.0, 1.0]), [3.0, 8.0]),
    (lambda: tf.tensordot(X, X, 1), [[7.0, 12.0], [18.0, 31.0]]),
    (lambda: tf.cumsum([1, 2, 3], exclusive=True), [0, 1, 3]),
    (lambda: tf.cumsum([1, 2, 3], reverse=True), [6, 5, 3]),
    (lambda: tf.argmax(X), [1, 1]),
    (lambda: tf.argmin(X, axis=1), [0, 0]),
    (lambda: tf.equal([1, 2], [1, 3]), [True, False]),
    (lambda: tf.logical_not([True]), [False]),
    (lambda: tf.round([0.5, 1.5]), [0.0, 2.0]),
    (lambda: tf.norm([3.0, 4.0]), 5.0),
    (lambda: tf.norm(X, axis=1), np.linalg.norm(X, axis=1)),
    (lambda: tf.clip_by_value([1.0, 9.0], 0.0, 2.0), [1.0, 2.0]),
    (lambda: tf.clip_by_norm([3.0, 4.0], 1.0), [0.6, 0.8]),
    (lambda: tf.clip_by_global_norm([[3.0], [4.0]], 1.0)[0][1], [0.8]),
    (lambda: tf.linalg.global_norm([[3.0], None, [4.0]]), 5.0),
    (lambda: tf.shape(X), [2, 2]),
    (lambda: tf.shape(X).numpy(), [2, 2]),
    (lambda: tf.size(X), 4),
    (lambda: tf.rank(X), 2),
    (lambda: tf.zeros([2]), [0.0, 0.0]),
    (lambda: tf.ones(2, tf.int32), [1, 1]),
    (lambda: tf.fill([2], 7), [7, 7]),
    (lambda: tf.eye(2), [[1.0, 0.0], [0.0, 1.0]]),
    (lambda: tf.zeros_like(X), [[0.0, 0.0], [0.0, 0.0]]),
    (lambda: tf.ones_like(X, dtype=tf.int32), [[1, 1], [1, 1]]),
    (lambda: tf.range(3), [0, 1, 2]),
    (lambda: tf.range(1, 7, 2), [1, 3, 5]),
    (lambda: tf.linspace(0.0, 1.0, 3), [0.0, 0.5, 1.0]),
    (lambda: tf.reshape(X, [-1]), [1.0, 2.0, 3.0, 5.0]),
    (lambda: tf.transpose(X), [[1.0, 3.0], [2.0, 5.0]]),
    (lambda: tf.squeeze(tf.expand_dims(X, 0), [0]), X),
    (lambda: tf.concat([X, X], 1), [[1.0, 2.0, 1.0, 2.0], [3.0, 5.0, 3.0, 5.0]]),
    (lambda: tf.stack([[1], [2]], axis=1), [[1, 2]]),
    (lambda: tf.unstack(X)[1], [3.0, 5.0]),
    (lambda: tf.split([1, 2, 3], [1, 2])[1], [2, 3]),
    (lambda: tf.split([1, 2, 3, 4], 2)[0], [1, 2]),
    (lambda: tf.tile([1, 2], [2]), [1, 2, 1, 2]),
    (lambda: tf.repeat([1, 2], 2), [1, 1, 2, 2]),
    (lambda: tf.reverse([1, 2, 3], [0]), [3, 2, 1]),
    (lambda: tf.pad([1], [[1, 2]], constant_values=9), [9, 1, 9, 9]),
    (lambda: tf.pad([1, 2, 3], [[1, 0]], "REFLECT"), [2, 1, 2, 3]),
    (lambda: tf.gather([5, 6, 7], [2, 0]), [7, 5]),
    (lambda: tf.where([True, False], [1, 2], [3, 4]), [1, 4]),
    (lambda: tf.where([True, False, True]), [[0], [2]]),
    (lambda: tf.one_hot([1, 3], 3), [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    (lambda: tf.boolean_mask(X, [[True, False], [True, True]]), [1.0, 3.0, 5.0]),
    (lambda: tf.nn.softmax([[0.0, 0.0]]), [[0.5, 0.5]]),
    (lambda: tf.nn.log_softmax([[0.0, 0.0]]), [[-np.log(2)] * 2]),
    (lambda: tf.nn.relu([-1.0, 2.0]), [0.0, 2.0]),
    (lambda: tf.nn.leaky_relu([-1.0]), [-0.2]),
    (lambda: tf.nn.softmax_cross_entropy_with_logits([[1, 0]], [[0.0, 0.0]]), [np.log(2)]),
    (lambda: tf.nn.sparse_softmax_cross_entropy_with_logits([1], [[0.0, 0.0]]), [np.log(2)]),
    (lambda: tf.nn.sigmoid_cross_entropy_with_logits([1.0], [0.0]), [np.log(2)]),
    (lambda: tf.nn.l2_loss([3.0, 4.0]), 12.5),
    (lambda: tf.nn.l2_normalize([3.0, 4.0]), [0.6, 0.8]),
    (lambda: tf.nn.moments(tf.constant(X), [0])[1], [1.0, 2.25]),
    (lambda: tf.nn.embedding_lookup(X, [1, 1]), [[3.0, 5.0], [3.0, 5.0]]),
    (lambda: tf.nn.embedding_lookup([[3.0, 4.0]], [0], max_norm=1.0), [[0.6, 0.8]]),
    (lambda: tf.nn.bias_add(X, [1.0, 2.0]), [[2.0, 4.0], [4.0, 7.0]]),
    (lambda: tf.math.top_k([1.0, 9.0, 5.0], 2)[1], [1, 2]),
    (lambda: tf.cond(tf.constant(True), lambda: 1, lambda: 2), 1),
    (lambda: tf.while_loop(lambda i: i < 5, lambda i: i + 2, [0])[0], 6),
    (lambda: tf.while_loop(lambda i: i < 5, lambda i: i + 2, [0], maximum_iterations=1)[0], 2),
    (lambda: tf.map_fn(lambda row: tf.reduce_sum(row), X), [3.0, 8.0]),
    (lambda: tf.identity(tf.Variable(2.0)), 2.0),
]  # fmt: skip


@pytest.mark.parametrize(("op", "expected"), VALUES, ids=range(len(VALUES)))
def test_values(op, expected):
    found = np.asarray(op())
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype.kind == np.asarray(expected).dtype.kind


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.0, "float32"),
        (1, "int32"),
        (True, "bool"),
        ([1.0, 2.0], "float32"),
        (np.float64(1), "float32"),
        (np.zeros(2, np.uint8), "uint8"),
    ],
)
def test_dtypes_of_constants(value, dtype):
    assert tf.constant(value).dtype == tf.as_dtype(dtype)
    assert not tf.constant(value).weak_type


def test_convolution_and_pooling():
    image, kernel = tf.ones([1, 4, 4, 1]), tf.ones([3, 3, 1, 1])
    assert tf.nn.conv2d(image, kernel, strides=[1, 1, 1, 1], padding="VALID").shape == (1, 2, 2, 1)
    assert float(tf.nn.conv2d(image, kernel, 1, "SAME")[0, 0, 0, 0]) == 4.0
    assert tf.nn.max_pool2d(image, 2, 2, "VALID").shape == (1, 2, 2, 1)
    assert float(tf.nn.avg_pool2d(image, [2, 2], [2, 2], "VALID")[0, 0, 0, 0]) == 1.0


def test_random_numbers_repeat_with_the_seed():
    def draw():
        tf.random.set_seed(7)
        return [
            tf.random.normal([3]),
            tf.random.uniform([3], 2, 5),
            tf.random.truncated_normal([3]),
            tf.random.shuffle([1, 2, 3, 4]),
            tf.random.uniform([3], maxval=9, dtype=tf.int32),
        ]

    first, again = draw(), draw()
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.all((np.asarray(first[1]) >= 2) & (np.asarray(first[1]) < 5))


def test_integers_without_maxval_are_refused():
    with pytest.raises(
        ValueError, match="Expected maxval for integers. Got None, with dtype int32"
    ):
        tf.random.uniform([2], dtype=tf.int32)


def test_gather_refuses_batch_dims():
    with pytest.raises(NotImplementedError, match="Expected batch_dims=0. Got 1"):
        tf.gather(X, [0], batch_dims=1)


def test_operands_of_a_strategy():
    """Mirrored values and variables are tensors, per-replica ones are not."""
    two = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    with two.scope():
        v = tf.Variable([1.0, 3.0])
    assert float(tf.reduce_sum(v)) == 4.0
    assert float(tf.add(stratagem.Mirrored([jnp.float32(1)] * 2), 1.0)) == 2.0
    with pytest.raises(ValueError, match="Expected one tensor. Got a PerReplica value"):
        tf.reduce_sum(stratagem.PerReplica([1.0, 2.0]))


def test_in_a_replica():
    two = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])

    def step(x):
        total = tf.constant(0.0)
        for i in tf.range(3):
            total += tf.reduce_sum(x) * tf.cast(i, tf.float32)
        rows = tf.reshape(x, [tf.shape(x)[0], -1])
        picked = tf.cond(total > 3.0, lambda: total, lambda: -total)
        return picked + tf.cast(rows.shape[1], tf.float32)

    x = stratagem.PerReplica([np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32)])
    assert [float(v) for v in two.run(step, (x,)).values] == [8.0, 2.0]


def test_print(capfd):
    tf.print("loss:", tf.constant([1.0, 2.0]), sep=" ")
    stratagem.function(lambda x: tf.print("inside", x, 3))(tf.constant(4))
    jax.effects_barrier()
    assert capfd.readouterr().err == "loss: [1. 2.]\ninside 4 3\n"


def test_assertions():
    tf.debugging.assert_equal(tf.constant(1), 1)
    with pytest.raises(ValueError, match="Expected less: x is small. Got 2 and 1"):
        tf.debugging.assert_less(2, 1, message="x is small")
    with pytest.raises(NotImplementedError, match="assert_near outside compiled functions"):
        stratagem.function(lambda x: tf.debugging.assert_near(x, x))(tf.constant(1.0))


def test_device():
    with tf.device("/cpu:1"):
        assert tf.zeros([1]).devices() == {jax.devices()[1]}
    with tf.device(None):
        assert tf.zeros([1]).devices() == {jax.devices()[0]}


def test_structures():
    assert tf.nest.map_structure(lambda x: x + 1, {"a": (1, 2)}) == {"a": (2, 3)}
    assert tf.nest.flatten({"b": 2, "a": 1}) == [1, 2]
    assert tf.is_tensor(tf.Variable(1.0))
    assert not tf.is_tensor(np.ones(1))
    assert isinstance(tf.constant(1), tf.Tensor)
    assert tf.TensorSpec([None, 2], tf.float32).shape == (None, 2)


def test_unconnected_gradients():
    v, w = keras.Variable(2.0), keras.Variable(3.0)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            y = v * v
        return tape.gradient(y, [v, w], unconnected_gradients=tf.UnconnectedGradients.ZERO)

    assert [float(g) for g in gradient()] == [4.0, 0.0]
