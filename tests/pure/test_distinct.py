"""Distinct row numbers and places among them, by bits and by sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.step import distinct
from stratagem.step.distinct import Distinct


@given(
    st.integers(1, 200).flatmap(
        lambda rows: st.tuples(
            st.just(rows), st.lists(st.lists(st.integers(0, rows - 1), max_size=60), max_size=3)
        )
    ),
    st.sampled_from(["int32", "int64", "uint8", "uint32"]),
    st.sampled_from([0, 4096]),
)
def test_what_is_distinct(made, dtype, dense):
    rows, every = made
    known = Distinct(rows)
    old, distinct._DENSE = distinct._DENSE, dense
    try:
        for numbers in every:  # one after the other: nothing is left of the one before
            given = np.asarray(numbers, dtype)
            found, where = known.of(given)
            assert (found.dtype, where.dtype) == (np.int64, np.int32)
            np.testing.assert_array_equal(found, np.unique(given))
            np.testing.assert_array_equal(found[where], given)
    finally:
        distinct._DENSE = old


@pytest.mark.parametrize("rows", [63, 64, 65, 128, 1_000_000])
def test_the_first_and_the_last_row(rows):
    found, where = Distinct(rows).of(np.asarray([rows - 1, 0, rows - 1], np.int32))
    assert found.tolist() == [0, rows - 1]
    assert where.tolist() == [1, 0, 1]
