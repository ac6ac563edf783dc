"""Datasets made of files: batches that no number of workers changes, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from stratagem.cluster.channel import Channel, LocalStore
from stratagem.data import AutoShardPolicy, distribute_dataset, from_files, with_options
from stratagem.data.exchange import Exchange
from stratagem.data.file_feed import FileFeed

MESH = Mesh(np.array(jax.devices()[:2]), ("replica",))


def made(lengths, batch_size, chunk=3, **kwargs):
    """Files of consecutive numbers, read in chunks."""
    ends = np.cumsum([0, *lengths])
    contents = {str(i): np.arange(ends[i], ends[i + 1]) for i in range(len(lengths))}

    def reader(path):
        rows = contents[path]
        return (rows[i : i + chunk] for i in range(0, len(rows), chunk))

    return from_files(list(contents), reader, batch_size, **kwargs)


def by_file(make, workers, state, steps=None):
    """The global batches that workers make who share by file, and the state after `steps`."""
    store = LocalStore()
    names = [f"worker {w}" for w in range(workers)]

    def one(worker):
        exchange = None
        if workers > 1:
            exchange = Exchange(Channel(store, worker, names, 60), "pass")
        feed = FileFeed(make(), None, SimpleNamespace(index=worker, count=workers), "", None)
        batches, after = [], state
        for share in feed.shares(state, exchange):
            batches.append(share.rows.leaves[0].tolist())
            assert len(batches[-1]) == share.per_worker[worker]
            after = share.state
            if len(batches) == steps:
                break
        return batches, after

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(one, range(workers)))
    assert all(after == results[0][1] for _, after in results)
    parts = [batches for batches, _ in results]
    return [sorted(sum(step, [])) for step in zip(*parts, strict=True)], results[0][1]


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 9), min_size=3, max_size=9),
    st.integers(1, 8),
    st.sampled_from([3, 4, 16]),
    st.sampled_from([None, 1]),
)
def test_batches_do_not_depend_on_the_number_of_workers(lengths, size, interleave, seed):
    lengths[0] += 1
    make = lambda: made(lengths, size, interleave=interleave, shuffle_seed=seed)  # noqa: E731
    alone = [sorted(batch.tolist()) for batch in make()]
    assert sorted(sum(alone, [])) == list(range(sum(lengths)))
    assert all(len(batch) == size for batch in alone[:-1])
    for workers in (2, 3):
        assert by_file(make, workers, {"pass": 0})[0] == alone


def test_other_workers_go_on_where_they_were_left():
    make = lambda: made([5, 9, 2, 7, 11], 4, shuffle_seed=2)  # noqa: E731
    alone = [sorted(batch.tolist()) for batch in make()]
    first, state = by_file(make, 3, {"pass": 0}, steps=4)
    second, state = by_file(make, 2, state, steps=2)
    iterator = iter(make())
    iterator.set_state(state)
    assert first + second + [sorted(batch.tolist()) for batch in iterator] == alone


def test_a_worker_whose_files_are_empty_knows_the_structure():
    batches, _ = by_file(lambda: made([3, 0], 2), 2, {"pass": 0})
    assert batches == [[0, 1], [2]]


def test_passes_differ_when_shuffled_and_a_file_stays_with_its_worker():
    data = made([6, 5, 4], 5, shuffle_seed=1)
    first, second = ([b.tolist() for b in data] for _ in range(2))
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(15))
    again = made([6, 5, 4], 5, shuffle_seed=1)
    assert [b.tolist() for b in again] == first


def test_a_state_names_its_pass():
    data = made([6, 5, 4], 4, shuffle_seed=1)
    list(data)
    iterator = iter(data)
    next(iterator)
    state = iterator.get_state()
    rest = [b.tolist() for b in iterator]
    resumed = iter(made([6, 5, 4], 4, shuffle_seed=1))
    resumed.set_state(state)
    assert [b.tolist() for b in resumed] == rest


def test_drop_remainder():
    assert [len(b) for b in made([5, 2], 3, drop_remainder=True)] == [3, 3]


def test_structures_and_whole_files():
    data = from_files(["a", "b"], lambda path: {"x": np.full((2, 3), ord(path))}, 3)
    first, second = list(data)
    assert first["x"].shape == (3, 3)
    assert second["x"].shape == (1, 3)


def test_on_one_worker_files_are_split_between_its_replicas():
    dataset = distribute_dataset(made([5, 4], 4), mesh=MESH)
    assert dataset.describe()[0].policy is AutoShardPolicy.FILE
    assert dataset.element_spec.values[0].shape == (None,)
    steps = [[np.asarray(v).tolist() for v in step.values] for step in dataset]
    assert [[len(part) for part in step] for step in steps] == [[2, 2], [2, 2], [1, 0]]
    assert sorted(sum((part for step in steps for part in step), [])) == list(range(9))
    data = with_options(made([5, 4], 4), auto_shard_policy=AutoShardPolicy.DATA)
    assert distribute_dataset(data, mesh=MESH).describe()[0].policy is AutoShardPolicy.DATA


def test_a_pattern_lists_files_in_order(tmp_path):
    for name in ("b", "a", "c"):
        np.save(tmp_path / f"{name}.npy", np.arange(1))
    data = from_files(str(tmp_path / "*.npy"), np.load, 2)
    assert [path[-5:] for path in data.files] == ["a.npy", "b.npy", "c.npy"]
    assert from_files([tmp_path / "a.npy"], np.load, 1).files == (str(tmp_path / "a.npy"),)
    with pytest.raises(FileNotFoundError, match=r"match '.*\*\.txt'. Got none"):
        from_files(str(tmp_path / "*.txt"), np.load, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([], np.load, 2), ValueError, "at least one file. Got an empty list"),
        ((["a", 3, None], np.load, 2), TypeError, "paths of files. Got 3, None"),
        ((["a", "b", "a"], np.load, 2), ValueError, "every file once. Got several times: a"),
        ((["a"], "np.load", 2), TypeError, "reader that takes a path.*Got str"),
        ((["a"], np.load, 0), ValueError, "at least 1. Got batch_size=0"),
    ],
)
def test_arguments_that_mean_nothing(arguments, error, text):
    with pytest.raises(error, match=text):
        from_files(*arguments)


def test_all_small_numbers_are_named():
    with pytest.raises(ValueError, match="batch_size=0, interleave=-1"):
        from_files(["a"], np.load, 0, interleave=-1)


@pytest.mark.parametrize(
    ("read", "error", "text"),
    [
        (lambda path: [np.ones(2)], TypeError, "Got a list for 'a', which may be rows or chunks"),
        (lambda path: np.float32(1), ValueError, "File 'a', chunk 0.*Got scalars"),
        (lambda path: (np.ones(2), np.ones(3)), ValueError, "File 'a'.*0 rows|File 'a'.*2 rows"),
        (lambda path: iter([np.array(["x"])]), TypeError, "File 'a'.*of dtype <U1"),
    ],
)
def test_readers_that_give_no_rows(read, error, text):
    with pytest.raises(error, match=text):
        list(from_files(["a"], read, 2))


def test_files_that_differ():
    data = from_files(["a", "b"], lambda path: np.ones((2, 1 + (path == "b"))), 4)
    with pytest.raises(ValueError, match=r"(?s)from every file. Got.*a: float64\[1\].*b: float64"):
        list(data)


def test_no_rows_at_all():
    empty = distribute_dataset(from_files(["a"], lambda path: np.ones(0), 2), mesh=MESH)
    with pytest.raises(ValueError, match=r"Got an empty dataset \(files\)"):
        list(empty)
    with pytest.raises(ValueError, match=r"Got an empty dataset \(files\)"):
        _ = empty.element_spec


def test_a_state_of_other_lanes():
    iterator = iter(made([2, 2, 2], 2))
    next(iterator)
    state = iterator.get_state()
    other = iter(made([2, 2], 2))
    other.set_state(state)
    with pytest.raises(ValueError, match="the interleave that the position.*3. Got 2"):
        next(other)


@pytest.mark.parametrize("again", [False, True])
def test_other_replicas_go_on_with_the_same_files(again):
    whole = [sorted(b.tolist()) for b in made([5, 4, 6], 4, shuffle_seed=1)]
    iterator = iter(distribute_dataset(made([5, 4, 6], 4, shuffle_seed=1), mesh=MESH))
    with pytest.raises(ValueError, match="a pass that gave none so far"):
        iterator.redistribute(MESH, again=True)
    next(iterator)
    next(iterator)
    iterator.redistribute(Mesh(np.array(jax.devices()[:3]), ("replica",)), again=again)
    rest = [[np.asarray(v).tolist() for v in step.values] for step in iterator]
    assert all(len(step) == 3 for step in rest)
    assert [sorted(sum(step, [])) for step in rest] == whole[1 if again else 2 :]
