"""ShardedVariable over rows in memory, which counts what is read of them.

Values of the tables are what TensorFlow 2.21 gives.
"""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stratagem.strategies.sharded import ShardedVariable
from stratagem.values import IndexedSlices


class Fake(ShardedVariable):
    """Rows in one array, in shards of the given sizes."""

    def __init__(self, value, sizes):
        self.held = np.array(value)
        self.name, self.shape, self.dtype = "table", self.held.shape, self.held.dtype.name
        ends = np.cumsum(sizes).tolist()
        self.shard_ranges = list(zip([0, *ends], ends, strict=False))
        self.reads, self.writes = [], []

    def read(self, start, stop):
        self.reads.append((start, stop))
        return self.held[start:stop].copy()

    def assign_rows(self, start, rows):
        self.writes.append((start, start + len(rows)))
        self.held[start : start + len(rows)] = rows

    def scatter(self, op, indices, updates):
        assert indices.dtype == np.int64
        assert updates.shape == (len(indices), *self.shape[1:])
        assert (np.diff(indices) > 0).all()
        do = {
            "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
            "min": np.minimum, "max": np.maximum, "set": lambda _, new: new,
        }[op]  # fmt: skip
        self.writes.append(indices.tolist())
        self.held[indices] = do(self.held[indices], updates)


def ten():
    return Fake(np.arange(1.0, 11.0, dtype=np.float32).reshape(5, 2), (2, 2, 1))


def rows_read(fake):
    return sorted(row for start, stop in fake.reads for row in range(start, stop))


def test_a_negative_step_as_in_tensorflow():
    fake = ten()
    assert fake[::-2].tolist() == [[9, 10], [5, 6], [1, 2]]
    assert rows_read(fake) == [0, 2, 4]


def test_scatter_add_as_in_tensorflow():
    fake = ten()
    assert fake.scatter_add(IndexedSlices(np.ones((2, 2)), [1, 4])) is fake
    assert fake.held.tolist() == [[1, 2], [4, 5], [5, 6], [7, 8], [10, 11]]
    assert fake.reads == []


def test_shards():
    fake = ten()
    assert [v.shape for v in fake.variables] == [(2, 2), (2, 2), (1, 2)]
    assert [v.name for v in fake] == ["table/part_0", "table/part_1", "table/part_2"]
    assert {v.dtype for v in fake} == {"float32"}
    assert fake.reads == []
    assert fake.variables[1].numpy().tolist() == [[5, 6], [7, 8]]
    assert fake.reads == [(2, 4)]
    assert np.asarray(fake.variables[2]).tolist() == [[9, 10]]
    assert jnp.asarray(fake.variables[2]).tolist() == [[9, 10]]
    assert repr(fake.variables[2]) == "<ShardView 'table/part_2', shape=(1, 2), dtype=float32>"
    assert fake.numpy().tolist() == fake.held.tolist()


def test_a_shard_writes_its_rows():
    fake = ten()
    first, second, third = fake
    assert first.assign(np.zeros((2, 2))) is first
    second.assign_add(np.ones((2, 2)))
    third.assign_sub([[1, 2]])
    assert fake.held.tolist() == [[0, 0], [0, 0], [6, 7], [8, 9], [8, 8]]
    assert fake.writes == [(0, 2), [2, 3], [4]]
    with pytest.raises(ValueError, match=r"shape \(2, 2\) for 'table/part_1'. Got \(1, 2\)"):
        second.assign_add([[1, 2]])


def test_a_shard_reads_some_of_its_rows():
    fake = ten()
    assert fake.variables[1].sparse_read([1, 0, 1]).tolist() == [[7, 8], [5, 6], [7, 8]]
    assert rows_read(fake) == [2, 3]
    with pytest.raises(IndexError, match="below 2, the rows of 'table/part_1'. Got 2"):
        fake.variables[1].sparse_read([2])


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (0, [0]),
        (-1, [4]),
        (np.int64(2), [2]),
        ((3, 1), [3]),
        ((3, ..., slice(None, None, -1)), [3]),
        (slice(1, 3), [1, 2]),
        (slice(4, 0, -3), [1, 4]),
        (slice(None, None, -1), range(5)),
        ((slice(3, 9), 0), [3, 4]),
        (slice(3, 3), []),
        (slice(4, 1), []),
        ((None, 1), [1]),
        ((None, None, slice(0, 2), 0), [0, 1]),
        ((slice(1, 2), None), [1]),
        (..., range(5)),
        ((..., 0), range(5)),
        ((), range(5)),
        ([True, False, False, True, True], [0, 3, 4]),
        (np.zeros(5, bool), []),
        (np.array([[False, True], [False, False], [True, True], [False] * 2, [False] * 2]), [0, 2]),
        (jnp.array([False, True, False, False, False]), [1]),
    ],
    ids=str,
)
def test_indices_read_what_they_need(index, rows):
    fake = ten()
    expected = fake.held[np.asarray(index) if isinstance(index, list) else index]
    found = fake[index]
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)
    assert rows_read(fake) == list(rows)


optional = st.none() | st.integers(-9, 9)


@given(
    st.integers(1, 7),
    st.builds(slice, optional, optional, optional.filter(lambda step: step != 0)),
    st.data(),
)
def test_slices_and_rows_are_those_of_an_array(rows, index, data):
    fake = Fake(np.arange(rows * 2).reshape(rows, 2), (rows,))
    assert np.array_equal(fake[index], fake.held[index])
    assert rows_read(fake) == sorted(range(rows)[index])
    fake.reads.clear()
    some = data.draw(st.lists(st.integers(0, rows - 1), max_size=9))
    assert np.array_equal(fake.sparse_read(some), fake.held[np.array(some, int)])
    assert rows_read(fake) == sorted(set(some))
    mask = data.draw(hnp.arrays(bool, (rows,)))
    assert np.array_equal(fake[mask], fake.held[mask])


@pytest.mark.parametrize("index", [5, -6])
def test_rows_that_are_not_there(index):
    with pytest.raises(IndexError, match=f"Expected an index below 5.*'table'. Got {index}"):
        ten()[index]


@pytest.mark.parametrize("index", [jnp.array(1), np.array([0, 1]), [0, 1], (0, jnp.array(1)), 1.0])
def test_tensors_are_no_indices(index):
    with pytest.raises(TypeError, match=r"integers, slices.*Got .*Use sparse_read"):
        ten()[index]


def test_masks_have_the_shape_of_rows():
    with pytest.raises(IndexError, match=r"mask of the shape of 'table', \(5, 2\).* Got \(4,\)"):
        ten()[np.ones(4, bool)]


def test_sparse_read_uses_one_request_where_there_is_one():
    fake = ten()
    fake.read_rows = lambda rows: fake.held[rows] * 10
    assert fake.sparse_read([4, 0, 4]).tolist() == [[90, 100], [10, 20], [90, 100]]
    assert fake[::3].tolist() == [[10, 20], [70, 80]]
    assert fake.reads == []
    assert fake.sparse_read([]).shape == (0, 2)


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("scatter_add", [[8, 9], [6, 7]]),
        ("scatter_sub", [[-6, -5], [0, 1]]),
        ("scatter_mul", [[10, 20], [9, 12]]),
        ("scatter_div", [[0.1, 0.2], [1, 4 / 3]]),
        ("scatter_min", [[1, 2], [3, 3]]),
        ("scatter_max", [[5, 5], [3, 4]]),
        ("scatter_update", [[2, 2], [3, 3]]),
        ("batch_scatter_update", [[2, 2], [3, 3]]),
    ],
)
def test_scatter_of_equal_indices(method, changed):
    fake = ten()
    values = [[5, 5], [3, 3], [2, 2]]
    getattr(fake, method)(IndexedSlices(np.float32(values), np.array([0, 1, 0])), True, name="s")
    assert np.allclose(fake.held[:2], changed)
    assert fake.held[2:].tolist() == [[5, 6], [7, 8], [9, 10]]
    assert fake.reads == []
    assert fake.writes == [[0, 1]]


def test_scatter_of_a_scalar_and_of_nothing():
    fake = ten()
    fake.scatter_add(IndexedSlices(2.0, jnp.array([3, 0])))
    assert fake.held[:, 0].tolist() == [3, 3, 5, 9, 9]
    fake.scatter_add(IndexedSlices(np.zeros((0, 2)), []))
    assert len(fake.writes) == 1


def test_scatter_is_checked():
    fake = ten()
    with pytest.raises(TypeError, match="IndexedSlices for 'table'. Got ndarray"):
        fake.scatter_add(np.ones((5, 2)))
    with pytest.raises(ValueError, match=r"shape \(1, 2\), or a scalar, for 1 rows.*Got \(2,\)"):
        fake.scatter_add(IndexedSlices(np.ones(2), [0]))
    with pytest.raises(IndexError, match="below 5, the rows of 'table'. Got 5"):
        fake.scatter_update(IndexedSlices(np.ones((2, 2)), [0, 5]))
    with pytest.raises(IndexError, match="Got -1"):
        fake.scatter_update(IndexedSlices(np.ones((1, 2)), [-1]))
    for read in (fake.sparse_read, lambda i: fake.scatter_sub(IndexedSlices(1.0, i))):
        with pytest.raises(ValueError, match=r"indices of shape \[n\] for 'table'. Got \(1, 1\)"):
            read([[1]])
        with pytest.raises(TypeError, match="integer indices for 'table'. Got float64"):
            read([1.0])
    assert fake.writes == fake.reads == []


def test_other_layouts_have_no_rows_by_number():
    fake = Fake(np.zeros((5, 2), np.float32), (1, 2, 2))
    for call in (lambda: fake.sparse_read([0]), lambda: fake.scatter_min(IndexedSlices(1.0, [0]))):
        with pytest.raises(NotImplementedError, match=r"layout 'div'.*Got shards of \[1, 2, 2\]"):
            call()
    assert fake[1:4].shape == (3, 2)  # whole ranges do not care


def sharded_keras_variable(value, sizes):
    """What a parameter server strategy makes: Keras' class below, the rows elsewhere."""
    fake = Fake(value, sizes)

    class Sharded(ShardedVariable, keras.Variable):
        shard_ranges = fake.shard_ranges
        read, assign_rows, scatter = fake.read, fake.assign_rows, fake.scatter

        @property
        def _value(self):
            return jnp.asarray(fake.read(0, fake.shape[0]))

        @_value.setter
        def _value(self, new):
            if new is not None:
                fake.assign_rows(0, np.asarray(new))

    return Sharded(np.array(value), name="table"), fake


def test_the_whole_is_that_of_keras():
    variable, fake = sharded_keras_variable(ten().held, (2, 2, 1))
    assert isinstance(variable, keras.Variable)
    assert (variable + 1).tolist() == (fake.held + 1).tolist()
    assert (2 * variable).tolist() == (variable * 2).tolist() == (2 * fake.held).tolist()
    assert variable.numpy().tolist() == fake.held.tolist()
    variable.assign_add(np.ones((5, 2)))
    variable.assign_sub(2 * np.ones((5, 2)))
    assert fake.held[0].tolist() == [0, 1]
    variable.assign(np.zeros((5, 2)))
    assert not fake.held.any()
    fake.reads.clear()
    assert variable[::-2].shape == (3, 2)
    assert rows_read(fake) == [0, 2, 4]


def test_inside_a_step_nothing_is_read():
    variable, fake = sharded_keras_variable(ten().held, (2, 2, 1))
    fake.reads.clear()
    writes = list(fake.writes)
    step = jnp.asarray(ten().held) * 10
    with keras.StatelessScope(state_mapping=[(variable, step)]):
        assert variable[1].tolist() == [30, 40]
        assert variable[::-2].tolist() == [[90, 100], [50, 60], [10, 20]]
        assert variable[np.array([True] + [False] * 4)].tolist() == [[10, 20]]
        assert variable.sparse_read(jnp.array([4, 4])).tolist() == [[90, 100]] * 2
        assert variable[jnp.array([0, -1])].tolist() == [[10, 20], [90, 100]]
        assert variable[[0, 4]].tolist() == [[10, 20], [90, 100]]
        assert variable.numpy().tolist() == step.tolist()
        shard = variable.variables[2]
        assert shard.value.tolist() == shard.numpy().tolist() == [[90, 100]]
        assert variable.variables[1].sparse_read(jnp.array([1, 0])).tolist() == [[70, 80], [50, 60]]
        with pytest.raises(NotImplementedError, match="scatter methods of 'table' outside of a"):
            variable.scatter_add(IndexedSlices(1.0, [0]))
        for method in ("assign", "assign_add", "assign_sub"):
            wanted = f"Expected {method} of the shard 'table/part_2' outside.*variable itself, 'ta"
            with pytest.raises(NotImplementedError, match=wanted):
                getattr(shard, method)(np.ones((1, 2)))
    assert fake.reads == []
    assert fake.writes == writes
