"""How many rows each replica gets. The tables are what TensorFlow 2.21 does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.data import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from stratagem.data.policy import check_input_options, rebatch_rule
from stratagem.data.split import (
    RebatchRule,
    even_pattern,
    fill_batch,
    row_slices,
    split_rows,
)

CEIL, EVEN = RebatchRule.CEIL, RebatchRule.EVEN

# (replicas, rows of a full batch, rows of this batch, counts under AUTO, counts under OFF)
TENSORFLOW = [
    (2, 3, 3, (2, 1), (2, 1)),
    (2, 3, 1, (1, 0), (1, 0)),
    (2, 4, 4, (2, 2), (2, 2)),
    (2, 4, 1, (1, 0), (1, 0)),
    (2, 4, 2, (1, 1), (2, 0)),
    (2, 4, 3, (2, 1), (2, 1)),
    (2, 5, 3, (2, 1), (3, 0)),
    (2, 1, 1, (1, 0), (1, 0)),
    (3, 3, 1, (1, 0, 0), (1, 0, 0)),
    (3, 4, 4, (2, 2, 0), (2, 1, 1)),
    (3, 4, 2, (1, 1, 0), (2, 0, 0)),
    (3, 4, 3, (1, 1, 1), (2, 1, 0)),
    (3, 5, 5, (2, 2, 1), (2, 2, 1)),
    (3, 5, 3, (1, 1, 1), (2, 1, 0)),
    (3, 8, 8, (3, 3, 2), (3, 3, 2)),
    (3, 8, 1, (1, 0, 0), (1, 0, 0)),
]


@pytest.mark.parametrize(("replicas", "full", "rows", "auto", "off"), TENSORFLOW)
def test_counts_of_tensorflow(replicas, full, rows, auto, off):
    assert split_rows(rows, replicas, CEIL) == auto
    assert split_rows(rows, replicas, EVEN, full_rows=full) == off


@pytest.mark.parametrize(
    ("rows", "worker", "pattern"),
    [(7, 0, (2, 2, 2, 1)), (7, 1, (2, 1, 2, 2)), (3, 0, (1, 1, 1, 0)), (3, 1, (1, 0, 1, 1))],
)
def test_pattern_is_rotated_by_worker(rows, worker, pattern):
    assert even_pattern(rows, 4, num_workers=2, worker=worker) == pattern
    assert split_rows(rows, 4, EVEN, num_workers=2, worker=worker) == pattern


@given(st.integers(0, 100), st.integers(1, 9), st.sampled_from(RebatchRule))
def test_every_row_once_and_at_most_the_ceiling(rows, replicas, rule):
    counts = split_rows(rows, replicas, rule)
    assert len(counts) == replicas
    assert sum(counts) == rows
    assert max(counts) <= -(-rows // replicas)
    covered = [i for s in row_slices(counts) for i in range(s.start, s.stop)]
    assert covered == list(range(rows))


@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 4))
def test_patterns_of_all_workers_deal_the_same_sizes(rows, workers, each):
    patterns = [
        even_pattern(rows, workers * each, num_workers=workers, worker=w) for w in range(workers)
    ]
    assert {tuple(sorted(p)) for p in patterns} == {tuple(sorted(patterns[0]))}
    # The first step of all workers together is one global batch.
    assert sum(sum(p[:each]) for p in patterns) <= rows + workers * each


@pytest.mark.parametrize(
    ("batch_size", "at_hand", "counts"),
    [
        (6, [5, 3, 0, 7], [2, 2, 0, 2]),
        (7, [5, 5, 5], [3, 2, 2]),
        (8, [1, 1, 9], [1, 1, 6]),
        (4, [1, 1], [1, 1]),
        (2, [9, 9, 9, 9], [1, 1, 0, 0]),
        (4, [0, 0], [0, 0]),
    ],
)
def test_a_batch_is_filled_as_evenly_as_the_lanes_allow(batch_size, at_hand, counts):
    assert fill_batch(batch_size, at_hand) == counts


@given(st.integers(1, 40), st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_a_batch_is_full_while_there_are_rows(batch_size, at_hand):
    counts = fill_batch(batch_size, at_hand)
    assert sum(counts) == min(batch_size, sum(at_hand))
    assert all(0 <= c <= a for c, a in zip(counts, at_hand, strict=True))
    most = max(counts)
    assert all(c >= most - 1 or c == a for c, a in zip(counts, at_hand, strict=True))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rows": -1}, "rows=-1 is negative"),
        ({"num_replicas": 0}, "num_replicas=0 is not positive"),
        ({"num_workers": 3}, "num_replicas=2 is no multiple of num_workers=3"),
        ({"num_workers": 0}, "num_workers=0 is not positive"),
        ({"num_workers": 2, "worker": 2}, r"worker=2 is not in 0\.\.1"),
    ],
)
def test_counts_out_of_range(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        split_rows(**{"rows": 4, "num_replicas": 2, "rule": EVEN} | arguments)


def test_all_problems_are_named():
    with pytest.raises(ValueError, match=r"rows=-1.*num_replicas=0"):
        split_rows(-1, 0, CEIL)


def test_batch_larger_than_full():
    with pytest.raises(ValueError, match="at most full_rows=4 rows. Got rows=5"):
        split_rows(5, 2, EVEN, full_rows=4)


def test_policies_have_the_values_and_rules_of_tensorflow():
    assert {p.name: p.value for p in AutoShardPolicy} == {
        "OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3,
    }  # fmt: skip
    assert {p.name for p in AutoShardPolicy if rebatch_rule(p) is CEIL} == {"AUTO", "DATA"}


def test_per_replica_batch_size():
    context = InputContext(1, 0, 2)
    assert context.get_per_replica_batch_size(8) == 4
    with pytest.raises(ValueError, match="global_batch_size=5 for num_replicas_in_sync=2"):
        context.get_per_replica_batch_size(5)


def test_input_options_have_the_defaults_of_tensorflow():
    assert tuple(InputOptions()) == (True, InputReplicationMode.PER_WORKER, False, 1)
    assert InputOptions(experimental_fetch_to_device=False).experimental_fetch_to_device is False


PER_REPLICA = InputReplicationMode.PER_REPLICA


@pytest.mark.parametrize(
    ("options", "from_function", "error", "text"),
    [
        (AutoShardPolicy.OFF, False, TypeError, "of type InputOptions. Got AutoShardPolicy"),
        (InputOptions(None, PER_REPLICA), False, NotImplementedError, "from_function"),
        (
            InputOptions(experimental_place_dataset_on_device=True),
            True,
            ValueError,
            "replication_mode is not PER_REPLICA.*fetch_to_device is not False",
        ),
        (InputOptions(experimental_per_replica_buffer_size=0), True, ValueError, "less than 1"),
    ],
)
def test_options_that_mean_nothing(options, from_function, error, text):
    with pytest.raises(error, match=text):
        check_input_options(options, from_function=from_function)
