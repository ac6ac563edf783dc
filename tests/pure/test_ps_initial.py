"""First values that servers draw by themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.parameter_server import initial
from stratagem.parameter_server.partitioners import FixedShardsPartitioner
from stratagem.parameter_server.plan import Placement
from stratagem.parameter_server.store import Store

STARTS = {
    "constant": initial.constant(0.25),
    "uniform": initial.uniform(-0.5, 1.5, 7),
    "normal": initial.normal(1.0, 0.5, 7),
    "truncated_normal": initial.truncated_normal(1.0, 0.5, 7),
}


def drawn(start, shape, dtype="float32", parts=1, servers=1):
    spec = Placement(servers, FixedShardsPartitioner(parts)).place(0, "table", shape, dtype)
    stores = [Store(i) for i in range(servers)]
    for store in stores:
        store.create([spec], {0: start})
    arrays = [stores[s.server].blocks[0, i].array for i, s in enumerate(spec.shards)]
    return np.concatenate(arrays) if shape else arrays[0]


@settings(max_examples=25)
@given(
    kind=st.sampled_from(sorted(STARTS)), rows=st.integers(1, 400), parts=st.integers(1, 9),
    width=st.sampled_from([1, 1000, 70_000]), dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_values_do_not_depend_on_how_the_variable_is_cut(kind, rows, parts, width, dtype):
    shape = (min(rows, 400_000 // width), width)
    whole = drawn(STARTS[kind], shape, dtype)
    cut = drawn(STARTS[kind], shape, dtype, parts, servers=3)
    np.testing.assert_array_equal(cut, whole)


def test_rows_are_drawn_from_the_whole_distribution():
    shape = (3000, 100)
    u = drawn(STARTS["uniform"], shape)
    assert u.min() >= -0.5
    assert u.max() < 1.5
    assert abs(u.mean() - 0.5) < 0.01
    n = drawn(STARTS["normal"], shape, "float64")
    assert abs(n.mean() - 1) < 0.01
    assert abs(n.std() - 0.5) < 0.01
    t = drawn(STARTS["truncated_normal"], shape)
    assert abs(t - 1).max() <= 1.0001
    assert abs(t.std() - 0.5 * 0.8796) < 0.01  # of a normal that is cut at two deviations
    for values in (u, n, t):
        assert len(np.unique(values[:, 0])) > 2900  # no block is another's


def test_a_scalar_and_an_integer():
    assert drawn(initial.constant(3), (), "int64") == 3
    assert drawn(STARTS["normal"], ()).shape == ()


def test_another_seed_gives_other_values():
    a, b = (drawn(initial.uniform(0, 1, seed), (10,)) for seed in (1, 2))
    assert not (a == b).any()


@pytest.mark.parametrize(
    "start",
    [
        None, {}, {"kind": "zeros"}, {"kind": "constant"}, {"kind": ["constant"]},
        initial.constant(float("nan")), initial.uniform(0, 1, -1), initial.uniform(0, 1, 1 << 64),
        initial.uniform(0, "1", 3), {**initial.constant(1), "more": 1},
    ],
)  # fmt: skip
def test_what_is_no_start(start):
    with pytest.raises(ValueError, match="Expected a start of the kinds"):
        initial.check(start, "float32")


@pytest.mark.parametrize("dtype", ["int32", "bool", "int4"])
def test_random_values_of_integers(dtype):
    with pytest.raises(ValueError, match="floating-point dtype for random values"):
        initial.check(STARTS["normal"], dtype)


def test_a_table_over_the_limit_of_memory_is_refused_before_it_is_made():
    spec = Placement(1).place(0, "table", (1 << 30, 64), "float32")
    store = Store(0, memory_limit=1 << 20)
    with pytest.raises(MemoryError, match=r"at most 1,048,576 bytes.*274,877,906,944 more"):
        store.create([spec], {0: STARTS["uniform"]})
    assert not store.specs
    assert 1 << 28 < Store(0).memory_limit  # what this machine has
