"""Which datasets are accepted, and what is said about those that are not."""

from __future__ import annotations

import itertools
import json

import jax
import keras
import numpy as np
import pytest
from jax.sharding import Mesh

from stratagem.data import (
    AutoShardPolicy,
    batches,
    distribute_dataset,
    distribute_from_function,
    with_options,
)
from stratagem.recovery.position import decoded, encoded
from stratagem.values import PerReplica, is_distributed

grain = pytest.importorskip("grain", reason="Grain datasets are optional")

MESH = Mesh(np.array(jax.devices()[:2]), ("replica",))


def rows(dataset) -> list:
    """The rows that all replicas see, of the first array of each element."""
    seen = []
    for element in distribute_dataset(dataset, mesh=MESH):
        value = jax.tree.leaves(element, is_leaf=lambda v: isinstance(v, PerReplica))[0]
        seen += [row for part in value.values for row in np.asarray(part).tolist()]
    return seen


class Digits(keras.utils.PyDataset):
    def __init__(self, endless=False):
        super().__init__()
        self.endless = endless
        self.ended = 0

    @property
    def num_batches(self):
        return None if self.endless else 3

    def __getitem__(self, index):
        return np.arange(2) + 2 * index, np.ones(2)

    def on_epoch_end(self):
        self.ended += 1


class Sequence:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.arange(2) + 2 * index


def generator():
    for start in (0, 2, 4):
        yield np.arange(start, start + 2)


SOURCES = {
    "list": lambda: [np.arange(2), np.arange(2, 4), np.arange(4, 6)],
    "generator": generator,
    "generator function": lambda: generator,
    "function": lambda: lambda: [np.arange(6)],
    "arrays": lambda: batches(np.arange(6), 4),
    "sequence": Sequence,
    "PyDataset": Digits,
    "grain MapDataset": lambda: grain.MapDataset.range(6).batch(2),
    "grain IterDataset": lambda: grain.MapDataset.range(6).to_iter_dataset().batch(2),
    "grain DataLoader": lambda: grain.DataLoader(
        data_source=range(6),
        sampler=grain.samplers.SequentialSampler(6, grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(2)],
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_accepted(name):
    assert rows(SOURCES[name]()) == list(range(6))


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - {"generator"}))
def test_can_be_read_again(name):
    dataset = distribute_dataset(SOURCES[name](), mesh=MESH)
    assert len(list(dataset)) == len(list(dataset)) > 0


def test_py_dataset_epochs_and_cardinality():
    data = Digits()
    dataset = distribute_dataset(data, mesh=MESH)
    assert dataset.cardinality == 3
    list(dataset)
    list(dataset)
    assert data.ended == 2
    endless = distribute_dataset(Digits(endless=True), mesh=MESH)
    assert endless.cardinality == float("inf")
    iterator = iter(endless)
    assert [len(next(iterator)[0].values) for _ in range(5)] == [2] * 5


def test_torch_data_loader():
    torch = pytest.importorskip("torch", reason="torch is optional and not installed")
    data = torch.utils.data.TensorDataset(torch.arange(6), torch.ones(6, 2).bfloat16())
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    assert rows(loader) == list(range(6))
    dataset = distribute_dataset(loader, mesh=MESH)
    assert dataset.cardinality == 2
    assert next(iter(dataset))[1].values[0].dtype == jax.numpy.bfloat16


def test_tf_data():
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is optional and not installed")
    data = tf.data.Dataset.range(8).batch(4)
    assert rows(data) == list(range(8))
    dataset = distribute_dataset(data, mesh=MESH)
    assert dataset.cardinality == 2
    assert dataset.element_spec.values[0].shape == (None,)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    off = distribute_dataset(data.with_options(options), mesh=MESH)
    assert off.describe()[0].policy is AutoShardPolicy.OFF


# --- Refused ---


@pytest.mark.parametrize("dataset", [3, None, object(), "abc", b"abc", Digits])
def test_not_iterable(dataset):
    with pytest.raises(TypeError, match=r"keras.utils.PyDataset.*tf.data.Dataset.*Got (\w|the)"):
        distribute_dataset(dataset, mesh=MESH)


@pytest.mark.parametrize(
    ("dataset", "got"),
    [
        (np.ones((4, 2)), r"one array \(ndarray of shape \(4, 2\)\)"),
        (jax.numpy.ones((4, 2)), r"one array \(ArrayImpl of shape"),
        ((np.ones(4), np.ones(4)), "a tuple of length 2"),
        ({"x": np.ones(4)}, r"a dict with keys \['x'\]"),
    ],
)
def test_arrays_do_not_say_what_a_batch_is(dataset, got):
    with pytest.raises(TypeError, match=rf"Got {got}.*stratagem\.data\.batches"):
        distribute_dataset(dataset, mesh=MESH)


def test_function_that_returns_no_dataset():
    def wrong():
        return 3

    with pytest.raises(TypeError, match=r"wrong\(\) to return an iterable of batches. Got int"):
        list(distribute_dataset(wrong, mesh=MESH))


def test_distributed_twice():
    dataset = distribute_dataset([np.ones(2)], mesh=MESH)
    with pytest.raises(ValueError, match="Got a DistributedDataset"):
        distribute_dataset(dataset, mesh=MESH)


@pytest.mark.parametrize("dataset", [list, lambda: [], lambda: iter(())])
def test_empty(dataset):
    empty = distribute_dataset(dataset(), mesh=MESH)
    with pytest.raises(ValueError, match="Expected at least one batch. Got an empty dataset"):
        for _ in empty:
            pass


def test_empty_generator_says_it_may_be_used_up():
    used = iter([np.ones(2)])
    next(used)
    dataset = distribute_dataset(used, mesh=MESH)
    with pytest.raises(ValueError, match="already used up"):
        _ = dataset.element_spec
    with pytest.raises(ValueError, match="Expected at least one batch"):
        distribute_dataset([], mesh=MESH).element_spec  # noqa: B018


def test_zero_rows():
    with pytest.raises(ValueError, match="Got 0 rows in batch 1"):
        rows([np.ones(2), np.ones(0)])


def test_unbatched():
    with pytest.raises(ValueError, match=r"Got scalars in batch 0.*: batch\['a'\], batch\['b'\]"):
        rows([{"a": 1.0, "b": np.int32(2), "c": np.ones(2)}])
    with pytest.raises(ValueError, match=r"Batch the dataset first"):
        rows(grain.MapDataset.range(6))


def test_rows_that_differ_within_a_batch():
    with pytest.raises(ValueError, match=r"batch\[0\]: 4 rows, batch\[1\]: 3 rows in batch 0"):
        rows([(np.ones(4), np.ones(3))])


def test_structure_that_changes():
    with pytest.raises(
        ValueError, match=r"PyTreeDef\(\(\*, \*\)\).*Got PyTreeDef\(\[\*\]\) at element 1"
    ):
        rows([(np.ones(2), np.ones(2)), [np.ones(2)]])


def test_leaves_that_no_device_holds():
    batch = {"s": np.array(["a"]), "o": np.array([None]), "u": object(), "x": np.ones(1)}
    with pytest.raises(TypeError) as error:
        rows([batch])
    text = str(error.value)
    assert "batch['s'] of dtype <U1" in text
    assert "batch['o'] of dtype object" in text
    assert "batch['u'] of type builtins.object" in text
    assert "batch['x']" not in text
    assert "StringLookup" in text


def test_no_arrays_at_all():
    with pytest.raises(ValueError, match="at least one array. Got None as element 0"):
        rows([None])


# --- Options and arrays ---


def test_with_options_replaces_options_and_leaves_the_dataset_alone():
    data = [np.arange(4)]
    off = with_options(data, auto_shard_policy=AutoShardPolicy.OFF)
    data_policy = with_options(off, auto_shard_policy=AutoShardPolicy.DATA)
    assert data_policy.dataset is data
    assert [b.tolist() for b in off] == [[0, 1, 2, 3]]
    for options in (off, data_policy):
        dataset = distribute_dataset(options, mesh=MESH)
        assert dataset.describe()[0].policy is options.options.auto_shard_policy


def test_batches():
    data = batches({"x": np.arange(7), "y": np.arange(7) * 2}, 3)
    assert len(data) == 3
    assert [b["x"].tolist() for b in data] == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(batches(np.arange(7), 3, drop_remainder=True)) == 2
    assert len(list(batches(np.arange(6), 3))) == 2


def test_batches_shuffled():
    data = batches((np.arange(20), np.arange(20)), 8, shuffle_seed=1)
    first, second = ([x.tolist() for x, _ in data] for _ in range(2))
    assert first != second
    assert sorted(sum(first, [])) == list(range(20))
    again = batches((np.arange(20), np.arange(20)), 8, shuffle_seed=1)
    assert [x.tolist() for x, _ in again] == first
    assert all((x == y).all() for x, y in again)


def test_reading_the_spec_does_not_change_the_order():
    make = lambda: distribute_from_function(  # noqa: E731
        lambda _: batches(np.arange(20), 4, shuffle_seed=1), mesh=MESH
    )
    asked, not_asked = make(), make()
    _ = asked.element_spec
    values = [[np.asarray(e.stacked).tolist() for e in d if e.stacked is not None]
              for d in (asked, not_asked)]  # fmt: skip
    assert values[0] == values[1]


class Numbered:
    """Rows by number."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def test_batches_of_rows_by_number():
    data = batches(Numbered([{"x": np.full(2, i), "y": float(i)} for i in range(5)]), 2)
    got = list(data)
    assert [batch["x"].tolist() for batch in got] == [
        [[0, 0], [1, 1]], [[2, 2], [3, 3]], [[4, 4]],
    ]  # fmt: skip
    assert data.spec["x"].shape == (None, 2)
    assert len(data) == 3
    assert rows(batches(range(7), 4)) == list(range(7))
    shuffled = batches(Numbered(range(9)), 4, shuffle_seed=1)
    first, second = ([r for batch in shuffled for r in batch.tolist()] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(9))
    assert rows(batches(range(3), 1)) == [0, 1, 2]  # the second replica has no rows


def test_batches_of_a_grain_dataset_without_an_end():
    data = batches(grain.MapDataset.range(3).repeat(), 4)
    dataset = distribute_dataset(data, mesh=MESH)
    assert dataset.cardinality == float("inf")
    assert np.asarray(next(iter(dataset)).stacked).tolist() == [[0, 1], [2, 0]]
    with pytest.raises(ValueError, match="a source with an end.*shuffle_seed=1"):
        batches(grain.MapDataset.range(3).repeat(), 4, shuffle_seed=1)


def test_rows_by_number_that_are_no_rows():
    with pytest.raises(ValueError, match="Got None for row 1 of a .*, as a filter gives it"):
        rows(batches(grain.MapDataset.range(4).filter(lambda x: x != 1), 2))
    with pytest.raises(ValueError, match="structure of the first"):
        rows(batches(Numbered([1, (2,)]), 2))


def test_batches_errors():
    with pytest.raises(ValueError, match=r"same number of rows. Got shapes \[\(2,\), \(3,\)\]"):
        batches((np.ones(2), np.ones(3)), 2)
    with pytest.raises(ValueError, match=r"Got shapes \[\(\)\]"):
        batches(3.0, 2)
    with pytest.raises(ValueError, match="Got batch_size=0"):
        batches(np.ones(2), 0)


# --- Where a pass is ---


def of_one_array(dataset, steps=None):
    """The rows of each step, of the first array."""
    elements = (jax.tree.leaves(e, is_leaf=is_distributed)[0] for e in dataset)
    return [
        np.concatenate([np.asarray(v) for v in element.values]).tolist()
        for element in itertools.islice(elements, steps)
    ]


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - {"generator"}))
def test_a_pass_goes_on_from_its_state(name):
    whole = of_one_array(distribute_dataset(SOURCES[name](), mesh=MESH))
    iterator = iter(distribute_dataset(SOURCES[name](), mesh=MESH))
    assert of_one_array(iterator, 1) == whole[:1]
    state = encoded(iterator.get_state())
    json.dumps(state)
    rest = of_one_array(iterator)
    for again in (iterator, iter(distribute_dataset(SOURCES[name](), mesh=MESH))):
        again.set_state(decoded(state))
        assert of_one_array(again) == rest == whole[1:]


def test_the_passes_after_a_state_are_those_of_the_interrupted_run():
    make = lambda: distribute_dataset(batches(np.arange(12), 4, shuffle_seed=3), mesh=MESH)  # noqa: E731
    whole = make()
    passes = [of_one_array(whole) for _ in range(3)]
    interrupted = make()
    of_one_array(interrupted)
    iterator = iter(interrupted)
    next(iterator)
    resumed = make()
    again = iter(resumed)
    again.set_state(iterator.get_state())
    assert of_one_array(again) == passes[1][1:]
    assert of_one_array(resumed) == passes[2]


def test_a_state_beyond_the_end():
    iterator = iter(distribute_dataset([np.arange(2)] * 3, mesh=MESH))
    list(iterator)
    state = iterator.get_state()
    shorter = iter(distribute_dataset([np.arange(2)], mesh=MESH))
    with pytest.raises(ValueError, match="at least 3 batches, of which.*Got 1"):
        shorter.set_state(state)


def test_a_state_of_elements_of_a_function():
    make = lambda: distribute_from_function(lambda _: [np.arange(i) for i in (1, 2, 3, 4, 5)],  # noqa: E731
                                            mesh=MESH)  # fmt: skip
    whole = of_one_array(make())
    iterator = iter(make())
    of_one_array(iterator, 2)
    state = iterator.get_state()
    resumed = iter(make())
    resumed.set_state(state)
    assert of_one_array(resumed) == whole[2:]


@pytest.mark.parametrize("name", sorted(SOURCES))
@pytest.mark.parametrize("again", [False, True])
def test_other_replicas_go_on_with_the_same_batches(name, again):
    whole = of_one_array(distribute_dataset(SOURCES[name](), mesh=MESH))
    iterator = iter(distribute_dataset(SOURCES[name](), mesh=MESH))
    next(iterator)
    three = Mesh(np.array(jax.devices()[1:4]), ("replica",))
    iterator.redistribute(three, again=again)
    if again:
        with pytest.raises(RuntimeError, match=r"Call next\(iterator\) first"):
            iterator.get_state()
    element = next(iterator, None)
    if again:
        leaf = jax.tree.leaves(element, is_leaf=is_distributed)[0]
        assert len(leaf.values) == 3
        assert of_one_array([element]) == whole[:1]
    else:
        assert of_one_array([element] if element else []) == whole[1:2]
    assert of_one_array(iterator) == whole[1 if again else 2 :]


def test_nothing_to_give_again():
    iterator = iter(distribute_dataset([np.arange(2)], mesh=MESH))
    with pytest.raises(ValueError, match="Got a pass that gave none so far"):
        iterator.redistribute(MESH, again=True)


def test_a_pass_can_be_closed():
    closed = []

    def source():
        try:
            yield np.arange(2)
            yield np.arange(2)
        finally:
            closed.append(True)

    iterator = iter(distribute_dataset(source, mesh=MESH))
    next(iterator)
    iterator.close()
    assert closed
    assert list(iterator) == []
