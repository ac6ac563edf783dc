"""tf.data on Grain: the elements that TensorFlow gives, in fit and under strategies."""

from __future__ import annotations

import jax
import keras
import numpy as np
import pytest

import stratagem
from stratagem.compat import streams
from stratagem.compat import tensorflow as tf
from stratagem.errors import OutOfRangeError, ReadInsideProgramError

pytest.importorskip("grain", reason="tf.data stands on Grain, which is optional")

Dataset = tf.data.Dataset


def rows(dataset) -> list:
    return [jax.tree.map(lambda a: a.tolist(), e) for e in dataset.as_numpy_iterator()]


def numbers(count: int):
    """A stream: Grain cannot reach its elements by number."""
    return Dataset.from_generator(lambda: iter(range(count)), output_types=tf.int32)


# Each with what TensorFlow 2.21 gives; both for datasets that Grain can index and for streams.
STEPS = [
    (lambda ds: ds.batch(3), [[0, 1, 2], [3, 4, 5], [6]]),
    (lambda ds: ds.batch(3, drop_remainder=True), [[0, 1, 2], [3, 4, 5]]),
    (lambda ds: ds.batch(4).batch(1), [[[0, 1, 2, 3]], [[4, 5, 6]]]),
    (lambda ds: ds.take(2), [0, 1]),
    (lambda ds: ds.take(0), []),
    (lambda ds: ds.take(-1), [0, 1, 2, 3, 4, 5, 6]),
    (lambda ds: ds.take(99), [0, 1, 2, 3, 4, 5, 6]),
    (lambda ds: ds.skip(5), [5, 6]),
    (lambda ds: ds.skip(9), []),
    (lambda ds: ds.skip(-1), []),
    (lambda ds: ds.shard(3, 1), [1, 4]),
    (lambda ds: ds.take(3).repeat(2), [0, 1, 2, 0, 1, 2]),
    (lambda ds: ds.take(2).repeat().take(5), [0, 1, 0, 1, 0]),
    (lambda ds: ds.repeat(0), []),
    (lambda ds: ds.take(3).repeat(2).batch(4), [[0, 1, 2, 0], [1, 2]]),
    (lambda ds: ds.map(lambda x: x * 2).take(3), [0, 2, 4]),
    (lambda ds: ds.map(lambda x: (x, [x, x])).take(1), [(0, [0, 0])]),
    (lambda ds: ds.map(lambda x: {"a": tf.cast(x, tf.float32)}).take(2), [{"a": 0.0}, {"a": 1.0}]),
    (lambda ds: ds.filter(lambda x: x % 2 == 0).batch(3), [[0, 2, 4], [6]]),
    (lambda ds: ds.enumerate(5).take(2), [(5, 0), (6, 1)]),
    (lambda ds: ds.take(2).concatenate(ds.skip(5)), [0, 1, 5, 6]),
    (lambda ds: ds.batch(4).unbatch(), [0, 1, 2, 3, 4, 5, 6]),
    (lambda ds: ds.take(4).interleave(lambda x: Dataset.range(x), 2), [0, 0, 1, 0, 1, 2]),
    (lambda ds: ds.take(3).flat_map(lambda x: Dataset.range(x)), [0, 0, 1]),
    (lambda ds: Dataset.zip((ds, ds.skip(5))), [(0, 5), (1, 6)]),
    (lambda ds: Dataset.zip(ds.take(1), ds.take(1)), [(0, 0)]),
    (lambda ds: ds.cache().prefetch(tf.data.AUTOTUNE).take(2), [0, 1]),
    (lambda ds: ds.apply(lambda d: d.skip(6)), [6]),
    (lambda ds: ds.take(2).with_options(tf.data.Options()), [0, 1]),
]  # fmt: skip


@pytest.mark.parametrize("source", [Dataset.range, numbers])
@pytest.mark.parametrize(("step", "expected"), STEPS, ids=range(len(STEPS)))
def test_elements(step, expected, source):
    dataset = step(source(7))
    assert rows(dataset) == expected
    assert rows(dataset) == expected  # a second pass
    if (count := int(dataset.cardinality())) >= 0:
        assert count == len(expected)


def test_interleave_in_blocks():
    """The example of TensorFlow's documentation."""
    dataset = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6), cycle_length=2, block_length=4
    )
    expected = [1] * 4 + [2] * 4 + [1] * 2 + [2] * 2 + [3] * 4 + [4] * 4 + [3] * 2 + [4] * 2
    assert rows(dataset) == expected + [5] * 6


def test_sources():
    assert rows(Dataset.from_tensor_slices({"a": [1, 2], "b": [[1.0], [2.0]]})) == [
        {"a": 1, "b": [1.0]},
        {"a": 2, "b": [2.0]},
    ]
    assert rows(Dataset.from_tensors(([1.0], 2))) == [([1.0], 2)]
    assert rows(Dataset.range(1, 6, 2)) == [1, 3, 5]
    text = next(iter(Dataset.from_tensor_slices(["a", "b"]).batch(2)))
    assert text.tolist() == ["a", "b"]


def test_generators_are_called_for_each_pass_with_their_arguments():
    calls = []

    def count(n):
        calls.append(n)
        yield from ((i, [i, i]) for i in range(n))

    spec = (tf.TensorSpec((), tf.int32), tf.TensorSpec((2,), tf.float32))
    dataset = Dataset.from_generator(count, args=(2,), output_signature=spec)
    first, second = dataset
    assert first[0].dtype == tf.int32
    assert second[1].dtype == tf.float32
    assert rows(dataset) == [(0, [0.0, 0.0]), (1, [1.0, 1.0])]
    assert calls == [2, 2]
    assert rows(Dataset.from_generator(lambda: iter([(1, 2)]))) == [(1, 2)]


def test_cardinality():
    assert int(Dataset.range(7).batch(2).cardinality()) == 4
    assert int(Dataset.range(7).repeat().batch(2).cardinality()) == tf.data.INFINITE_CARDINALITY
    assert int(numbers(3).cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert len(Dataset.range(7).shard(2, 1)) == 3
    assert Dataset.range(0)
    with pytest.raises(TypeError, match="Got one of infinite length"):
        len(Dataset.range(7).repeat())
    with pytest.raises(TypeError, match="Got one of unknown length"):
        len(numbers(3))


def test_loops_see_tensors():
    dataset = Dataset.from_tensor_slices(([1.0, 2.0], [3, 4])).batch(2)
    for x, y in dataset:
        assert isinstance(x, jax.Array)
        assert x.numpy().tolist() == [1.0, 2.0]
        assert y.dtype == tf.int32
    assert float(dataset.reduce(0.0, lambda total, xy: total + tf.reduce_sum(xy[0]))) == 3.0
    iterator = iter(dataset)
    assert iterator.element_spec == dataset.element_spec
    assert iterator.get_next()[1].tolist() == [3, 4]
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(OutOfRangeError, match="Got the end of the dataset"):
        iterator.get_next()


def test_element_spec():
    spec = Dataset.from_tensor_slices(np.zeros((5, 2), np.float64)).batch(2).element_spec
    assert spec == tf.TensorSpec((None, 2), tf.float32)
    assert Dataset.range(4).batch(2, drop_remainder=True).element_spec.shape == (2,)
    assert Dataset.from_tensors([1.0]).element_spec.shape == (1,)


@pytest.mark.parametrize("source", [Dataset.range, numbers])
class TestShuffle:
    def test_orders_differ_between_passes_and_repetitions(self, source):
        dataset = source(20).shuffle(20, seed=3)
        first, second = rows(dataset), rows(dataset)
        assert first != second != list(range(20))
        assert sorted(first) == sorted(second) == list(range(20))
        twice = rows(source(20).shuffle(20).repeat(2))
        assert twice[:20] != twice[20:]
        assert sorted(twice[:20]) == sorted(twice[20:]) == list(range(20))

    def test_the_same_order_when_it_is_asked_for(self, source):
        dataset = source(20).shuffle(20, reshuffle_each_iteration=False)
        assert rows(dataset) == rows(dataset)
        twice = rows(dataset.repeat(2))
        assert twice[:20] == twice[20:]

    def test_the_same_seed_repeats_a_run(self, source):
        assert rows(source(20).shuffle(20)) == rows(source(20).shuffle(20))
        assert rows(source(20).shuffle(20, seed=1)) != rows(source(20).shuffle(20, seed=2))

    def test_behind_an_endless_repeat(self, source):
        assert sorted(rows(source(4).repeat().shuffle(4).take(4))) == [0, 1, 2, 3]


def test_the_global_seed_changes_shuffles():
    tf.random.set_seed(5)
    first = rows(Dataset.range(20).shuffle(20))
    tf.random.set_seed(6)
    assert rows(Dataset.range(20).shuffle(20)) != first


def test_cache_reads_once():
    read = []

    def source():
        read.append(1)
        yield from range(3)

    dataset = Dataset.from_generator(source).cache()
    assert rows(dataset) == rows(dataset) == [0, 1, 2]
    assert read == [1]


# Keras warns when the end of a dataset of unknown length ends the first epoch, of tf.data's too.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("stream", [False, True])
def test_fit_takes_it(stream):
    """The same history as from arrays."""
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    y = x.sum(1, keepdims=True)

    def history(data, **how):
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.001), loss="mse")
        return model.fit(data, epochs=2, verbose=0, shuffle=False, **how).history["loss"]

    if stream:
        spec = (tf.TensorSpec((2,), tf.float32), tf.TensorSpec((1,), tf.float32))
        dataset = Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=spec)
    else:
        dataset = Dataset.from_tensor_slices((x, y))
    expected = history(x, y=y, batch_size=4)
    np.testing.assert_allclose(history(dataset.batch(4)), expected, rtol=1e-6)
    endless = dataset.batch(4).repeat()
    np.testing.assert_allclose(history(endless, steps_per_epoch=2), expected, rtol=1e-6)
    with stratagem.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        np.testing.assert_allclose(history(dataset.batch(4)), expected, rtol=1e-6)


def test_distributed():
    two = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = Dataset.range(7).batch(4).with_options(options)
    distributed = two.experimental_distribute_dataset(dataset)
    found = [[np.asarray(v).tolist() for v in x.values] for x in distributed]
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert distributed.cardinality == 2
    assert distributed.describe()[0].policy is tf.data.experimental.AutoShardPolicy.OFF


def test_options_merge():
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    plain = tf.data.Options()
    plain.deterministic = True
    plain.autotune.enabled = True
    kept = Dataset.range(1).with_options(off).with_options(plain).options()
    assert kept.experimental_distribute.auto_shard_policy.name == "OFF"
    with pytest.raises(AttributeError, match="Expected an option of tf.data.Options"):
        plain.colour = "red"


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda: Dataset.from_tensor_slices(3), ValueError, r"Got shapes \[\(\)\]"),
        (lambda: Dataset.from_tensor_slices(([1], [1, 2])), ValueError, r"\[\(1,\), \(2,\)\]"),
        (lambda: Dataset.from_generator(iter([1])), TypeError, "Pass the function, not what it"),
        (lambda: Dataset.range(3).shard(2, 2), ValueError, "Expected an index from 0 to 1"),
        (lambda: Dataset.range(3).cache("file"), ValueError, r"Expected cache\(\) in memory"),
        (
            lambda: rows(Dataset.from_generator(lambda: iter([[1], [1, 2]])).batch(2)),
            ValueError,
            "Expected elements of one structure and shape to batch",
        ),
        (lambda: Dataset.range(1).padded_batch(2), AttributeError, "tf.data.Dataset.padded_batch"),
        (lambda: Dataset.list_files("*"), AttributeError, "tf.data.Dataset.list_files"),
    ],
)  # fmt: skip
def test_errors(wrong, error, text):
    with pytest.raises(error, match=text):
        wrong()


def test_reading_inside_a_step_is_refused():
    two = stratagem.MirroredStrategy(["cpu:0", "cpu:1"])
    iterator = iter(Dataset.range(3))
    with pytest.raises(ReadInsideProgramError, match="Expected a dataset to be read outside"):
        two.run(lambda: next(iterator))
    with pytest.raises(ReadInsideProgramError, match="Expected a dataset to be read outside"):
        two.run(lambda: list(Dataset.range(3)))


def test_without_grain(monkeypatch):
    monkeypatch.setattr(streams, "grain", None)
    with pytest.raises(ImportError, match="Expected Grain, which tf.data.Dataset stands on"):
        Dataset.range(3)
