"""Bags of rows: sums of them, and gradients of sums, whole and cut by server."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.parameter_server import kernels
from stratagem.parameter_server.bags import Bagged, Bags
from stratagem.parameter_server.rounds import weighed

i32 = np.int32


@st.composite
def some_bags(draw):
    """Bags of some rows, the rows, and a gradient for each bag."""
    count = draw(st.integers(1, 9))
    every = draw(st.lists(st.lists(st.integers(0, count - 1), max_size=5), max_size=6))
    row = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    random = np.random.default_rng(draw(st.integers(0, 9)))
    bags = Bags(
        np.asarray([p for bag in every for p in bag], i32),
        np.cumsum([0, *map(len, every)], dtype=i32),
    )
    rows = random.normal(size=(count, *row)).astype(dtype)
    return bags, every, rows, random.normal(size=(len(every), *row)).astype(dtype)


@given(some_bags())
def test_sums_and_gradients_are_those_of_a_loop(made):
    bags, every, rows, gradients = made
    bags.check(len(rows))
    sums, back = np.zeros_like(gradients), np.zeros_like(rows)
    for i, bag in enumerate(every):
        for n, place in enumerate(bag):
            sums[i] = sums[i] + rows[place] if n else rows[place]
            back[place] += gradients[i]
    out = np.full_like(gradients, np.nan)
    assert bags.sums(rows, out) is out
    np.testing.assert_array_equal(out, sums)  # the same bits: added in this order
    found = Bagged(bags, gradients).by_row(len(rows))
    assert found.dtype == rows.dtype
    np.testing.assert_array_equal(found, back)


@given(some_bags(), st.lists(st.integers(0, 9), max_size=3))
def test_parts_of_bags_are_the_whole(made, cuts):
    bags, _, rows, gradients = made
    ends = sorted({0, len(rows), *(c for c in cuts if c < len(rows))})
    total, back = np.zeros_like(gradients), []
    for start, stop in zip(ends[:-1], ends[1:], strict=True):
        own = bags.within(start, stop, len(rows))
        own.check(stop - start)
        assert len(own) == len(bags)
        total += own.sums(rows[start:stop], np.empty_like(gradients))
        back.append(Bagged(own, gradients).by_row(stop - start))
    np.testing.assert_allclose(total, bags.sums(rows, np.empty_like(gradients)), atol=1e-5)
    np.testing.assert_array_equal(np.concatenate(back), Bagged(bags, gradients).by_row(len(rows)))


def test_rows_by_their_numbers():
    rows = np.arange(12, dtype="float32").reshape(6, 2)
    bags = Bags.of([(np.asarray([[0, 1], [1, 1]], i32), 2), (np.asarray([2], i32), 1)])
    assert bags.places.tolist() == [0, 1, 1, 1, 2]
    assert bags.bounds.tolist() == [0, 2, 4, 5]
    out = bags.sums(rows, np.empty((3, 2), "float32"), np.asarray([5, 0, 3]))
    np.testing.assert_array_equal(out, [rows[5] + rows[0], 2 * rows[0], rows[3]])


def test_gradients_of_bags_are_weighed():
    bags = Bags.of([(np.asarray([[0, 1]], i32), 1)])
    half = weighed(Bagged(bags, np.ones((1, 2), "float32")), 0.5)
    assert half.bags is bags
    assert half.by_row(2).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_bags_without_rows():
    empty = Bags.of([(np.zeros((3, 0), i32), 3), (np.zeros((0, 4), i32), 0)])
    assert (len(empty), len(empty.places)) == (3, 0)
    out = empty.sums(np.zeros((0, 2), "float32"), np.ones((3, 2), "float32"))
    assert not out.any()
    assert Bagged(empty, out).by_row(0).shape == (0, 2)


@pytest.mark.parametrize(
    ("places", "bounds", "match"),
    [
        (np.zeros(2, np.int64), np.asarray([0, 2], i32), r"bags as places int32\[n\] and bounds"),
        (np.zeros((2, 1), i32), np.asarray([0, 2], i32), r"Got int32\[2, 1\] and int32\[2\]"),
        (np.zeros(2, i32), np.zeros(0, i32), r"Got int32\[2\] and int32\[0\]"),
        (np.zeros(2, i32), np.asarray([0, 1], i32), "bounds of bags that ascend from 0 to 2"),
        (np.zeros(2, i32), np.asarray([1, 2], i32), "bounds of bags that ascend from 0 to 2"),
        (np.zeros(2, i32), np.asarray([0, 3, 1, 2], i32), "that ascend from 0 to 2. Got"),
        (np.asarray([0, 4], i32), np.asarray([0, 2], i32), "rows from 0 to 3. Got 0 to 4"),
        (np.asarray([-1, 3], i32), np.asarray([0, 2], i32), "rows from 0 to 3. Got -1 to 3"),
    ],
)
def test_what_are_no_bags(places, bounds, match):
    with pytest.raises(ValueError, match=match):
        Bags(places, bounds).check(4)


def test_compiled_loops_need_no_directory(monkeypatch):
    """A read-only installation for a user without a home compiles at each start."""
    real, said = numba.njit, []

    def njit(*functions, **options):
        if functions or "nogil" not in options:  # Numba's own
            return real(*functions, **options)
        said.append(options.pop("cache", False))
        if said[-1]:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", njit)
    kernels._compiled.cache_clear()
    try:
        out = np.zeros((2, 2), "float32")
        kernels.add_multiples(out, np.asarray([1]), np.float32(2), np.ones((1, 2), "float32"))
    finally:
        kernels._compiled.cache_clear()
    assert out.tolist() == [[0, 0], [2, 2]]
    assert said == [True, False]
