"""Parity with tf.distribute: rows 1 to 45 of the measured behaviour, over every strategy.

The tables say what is done, what it gives for any number of replicas, what TensorFlow 2.21 gave
on two, and where and why we differ on purpose.
"""

from __future__ import annotations

import pytest

from conformance import rows_data, rows_reduce, rows_run, rows_variables
from conformance.table import Row, close, make, plain

ROWS: list[Row] = [
    *rows_reduce.ROWS,
    *rows_run.ROWS,
    *rows_variables.ROWS,
    *rows_data.ROWS,
]
CASES = [
    pytest.param(row, name, id=f"{row.number}-{row.name}-{name}") for row in ROWS for name in row.on
]


def test_every_row_is_here():
    assert {row.number for row in ROWS} == set(range(1, 46))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number}-{row.name}")
def test_what_is_expected_is_what_tensorflow_gave(row):
    """On two replicas, unless the row says why not."""
    if row.raises:
        same = row.observed in {base.__name__ for base in row.expected.__mro__}
        renamed = {"InvalidArgumentError": ValueError}.get(row.observed)
        assert same or row.differs or (renamed and issubclass(row.expected, renamed))
    elif not row.differs or not isinstance(row.observed, (str, type(None))):
        assert close(plain(row.expected(2)), row.observed)


@pytest.mark.parametrize(("row", "name"), CASES)
def test_row(row, name):
    strategy = make(name)
    if row.raises:
        with pytest.raises(row.expected, match=row.match):
            row.call(strategy)
        return
    result = row.call(strategy)
    expected = row.expected(strategy.num_replicas_in_sync)
    assert close(plain(result), plain(expected)), f"got {plain(result)}, expected {expected}"
    if row.dtype is not None:
        assert result.dtype == row.dtype
