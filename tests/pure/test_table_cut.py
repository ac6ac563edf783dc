"""A dynamic table is copied as it was when that began, whatever happens to it meanwhile."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import TableFullError
from stratagem.parameter_server import initial
from stratagem.parameter_server.by_id import first_rows
from stratagem.parameter_server.dynamic import Piece
from stratagem.parameter_server.table_cut import TableCut

sys.path.insert(0, str(Path(__file__).parent))

from test_dynamic_table import (
    PROGRAM,
    SLOT,
    WEIGHT,
    actions,
    array,
    content,
    few_ids,
    policies,
    table,
)


def act(on, action, ids, number, now):
    """Changes a table in some way."""
    ids, none = array(ids), np.empty(0, np.int64)
    if action == "occur":
        with contextlib.suppress(TableFullError):
            on.rows_of(ids, now=now, times=number)
    elif action == "push":
        on.update(
            PROGRAM, [WEIGHT, SLOT], ids, [np.full((len(ids), 3), 1.0 + number, "f4")], now=now
        )
    elif action == "expire":
        on.expire(now)
    else:
        values = np.full((len(ids), 3), float(number), np.float32)
        times = np.full(len(ids), now)
        on.restore(Piece(ids, times, {WEIGHT: values}, none, none, np.empty(0)))


@settings(max_examples=150)
@given(policies, few_ids, actions, actions, st.integers(1, 5))
def test_it_is_the_table_when_the_cut_began(policy, ids, before, after, rows):
    ours = table(**vars(policy))
    act(ours, "move", ids, 3, 0.0)
    for now, (action, some, number) in enumerate(before):
        act(ours, action, some, number, float(now))
    expected = content(ours)
    cut = TableCut(ours, rows * 24)  # a weight and a slot of 12 bytes
    found, todo = [], iter(enumerate(after, 20))
    for piece in cut.pieces():
        found.append(piece)
        for now, (action, some, number) in [x for x in [next(todo, None), next(todo, None)] if x]:
            act(ours, action, some, number, float(now))
    cut.close()
    assert ours.before_write is None
    again = table()
    for piece in found:
        again.restore(piece)
    assert content(again) == expected


def test_a_change_before_the_first_piece_and_a_row_that_is_given_to_another_id():
    ours = table(max_rows=4, when_full="evict")
    act(ours, "occur", {1, 2, 3, 4}, 1, 1.0)
    act(ours, "push", {1, 2, 3, 4}, 1, 2.0)
    expected = content(ours)
    cut = TableCut(ours, 2 << 20)
    act(ours, "push", {2, 3}, 1, 3.0)
    act(ours, "occur", {7, 8}, 1, 4.0)  # in place of 1 and 4
    act(ours, "push", {7}, 1, 5.0)
    ours.add_column("more", (2,), "float32", first_rows(initial.constant(1), (2,), "float32"))
    again = table()
    for piece in cut.pieces():
        assert set(piece.columns) == {WEIGHT, SLOT}
        again.restore(piece)
    assert content(again) == expected


def test_it_takes_a_piece_of_memory_at_a_time():
    ours = table()
    ids = np.arange(100_000)
    ours.rows_of(ids, now=0.0)
    size = 2 * len(ids) * 12  # the weight and its slot
    tracemalloc.start()
    cut = TableCut(ours, 1 << 16)
    first, _ = tracemalloc.get_traced_memory()
    for _ in cut.pieces():
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert first < len(ids) * 30  # row numbers, ids and times
    assert peak - first < size / 4
