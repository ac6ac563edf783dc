"""One server's state: what pulls, pushes, rounds and assignments do, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.parameter_server import initial, rounds
from stratagem.parameter_server.applied import Applied, Tokens
from stratagem.parameter_server.bags import Bagged, Bags
from stratagem.parameter_server.partitioners import FixedShardsPartitioner
from stratagem.parameter_server.plan import Placement, Unit
from stratagem.parameter_server.rounds import Change
from stratagem.parameter_server.store import Store
from stratagem.parameter_server.whole import WholeProgram, program_of

# w -= rate * gradient; and Adagrad's: a += gradient ** 2, w -= rate * gradient / sqrt(a).
SGD = {
    "kind": "rows", "members": 1, "handed": ["rows", "scalar"],
    "steps": [["mul", [1, 2], None], ["sub", [0, 3], None]], "outputs": [4],
}  # fmt: skip
ADAGRAD = {
    "kind": "rows", "members": 2, "handed": ["rows", "scalar"],
    "steps": [
        ["mul", [2, 2], None], ["add", [1, 4], None], ["sqrt", [5], None],
        ["mul", [2, 3], None], ["div", [7, 6], None], ["sub", [0, 8], None],
    ],
    "outputs": [9, 5],
}  # fmt: skip
ROWS, WIDTH = 40, 3
RATE = np.array(0.5, np.float32)


def table(store=None, parts=1):
    """A store with a table, a slot beside it, and units for both."""
    store = store or Store(0)
    placement = Placement(1, FixedShardsPartitioner(parts))
    w = placement.place(0, "w", (ROWS, WIDTH), "float32")
    a = placement.place(1, "a", (ROWS, WIDTH), "float32", beside=w)
    store.create([w, a], {0: initial.uniform(-1, 1, 3), 1: initial.constant(0.1)})
    store.install([Unit("sgd", (0,), SGD), Unit("adagrad", (0, 1), ADAGRAD)])
    return store


def numbers(*rows):
    return np.array(rows, np.int64)


def change(rows, gradient=None, uid="sgd", rate=RATE):
    rows = None if rows is None else np.asarray(rows, np.int64)
    count = ROWS if rows is None else len(rows)
    gradient = np.ones((count, WIDTH), np.float32) if gradient is None else gradient
    return Change(uid, 0, rows, (("rows", gradient), ("scalar", rate)))


def test_pulled_rows_are_copies():
    store = table()
    old = store.read(0, 0, 0, ROWS)
    whole, rows = store.pull([(0, 0)], [(0, 0, numbers(1, 5, 39))])
    store.push(0, 0, [change(None)])
    np.testing.assert_array_equal(whole, old)
    np.testing.assert_array_equal(rows, old[[1, 5, 39]])
    np.testing.assert_array_equal(store.pull([(0, 0)], [])[0], old - 0.5)
    (roomy,) = store.pull([], [(0, 0, numbers(1, 5, 39))], rooms=[6])
    np.testing.assert_array_equal(roomy[:3], old[[1, 5, 39]] - 0.5)
    assert roomy[3:].tolist() == [[0.0] * 3] * 3


def test_sums_are_pulled_and_their_gradients_pushed():
    store = table()
    rows, bags = numbers(1, 5, 39), Bags.of([(np.asarray([[0, 2], [2, 2]], np.int32), 2)])
    old = store.read(0, 0, 0, ROWS)
    (sums,) = store.pull([], [(0, 0, rows)], bags=[bags])
    np.testing.assert_array_equal(sums, [old[1] + old[39], old[39] + old[39]])
    gradients = np.asarray([[1, 2, 3], [4, 5, 6]], np.float32)
    found = store.updates.by_row("sgd", rows, Bagged(bags, gradients), store.specs)
    np.testing.assert_array_equal(found, [[1, 2, 3], [0, 0, 0], [9, 12, 15]])


def test_what_cannot_be_added_up():
    store = table()
    place = Placement(1)
    whole, scalar = place.place(7, "i", (4, 2), "int32"), place.place(8, "s", (), "float32")
    store.create([whole, scalar], dict.fromkeys((7, 8), initial.constant(0)))
    store.install([Unit("i", (7,), SGD)])
    bags = Bags.of([(np.zeros((1, 2), np.int32), 1)])
    with pytest.raises(ValueError, match=r"variable 'i': expected a table of a preset size with"):
        store.pull([], [(7, 0, numbers(0))], bags=[bags])
    with pytest.raises(ValueError, match=r"bags of rows from 0 to -1. Got 0 to 0"):
        store.pull([], [(0, 0, numbers())], bags=[bags])

    def push(uid, gradients):
        store.updates.by_row(uid, numbers(0), Bagged(bags, gradients), store.specs)

    with pytest.raises(ValueError, match="Got a variable, int32"):
        push("i", np.ones((1, 2), "int32"))
    with pytest.raises(ValueError, match="Expected a unit that is installed. Got 'none'"):
        push("none", np.ones((1, 2), "float32"))
    with pytest.raises(ValueError, match=r"gradients float32\[1, 3\] of 1 bags. Got float32\[2, 3"):
        push("sgd", np.ones((2, 3), "float32"))


def test_rows_of_one_shard_are_named_by_their_numbers_in_the_whole_variable():
    store = table(parts=3)
    whole = np.concatenate(
        [store.read(0, i, s.start, s.stop) for i, s in enumerate(store.specs[0].shards)]
    )
    start = store.specs[0].shards[1].start
    (rows,) = store.pull([], [(0, 1, numbers(start, start + 2))])
    np.testing.assert_array_equal(rows, whole[[start, start + 2]])
    with pytest.raises(ValueError, match=f"Expected row numbers from {start} to"):
        store.pull([], [(0, 1, numbers(0))])


@settings(max_examples=30)
@given(data=st.data(), uid=st.sampled_from(["sgd", "adagrad"]), width=st.sampled_from([1, 3, 4000]))
def test_a_push_of_rows_changes_these_rows_as_a_push_of_all_does(data, uid, width):
    placement = Placement(1)
    w = placement.place(0, "w", (ROWS, width), "float32")
    a = placement.place(1, "a", (ROWS, width), "float32", beside=w)
    stores = [Store(0), Store(0)]
    for store in stores:
        store.create([w, a], {0: initial.uniform(-1, 1, 3), 1: initial.constant(0.1)})
        store.install([Unit("sgd", (0,), SGD), Unit("adagrad", (0, 1), ADAGRAD)])
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, ROWS - 1)))), np.int64)
    gradient = np.random.default_rng(0).normal(size=(ROWS, width)).astype(np.float32)
    stores[0].push(0, 0, [Change(uid, 0, rows, (("rows", gradient[rows]), ("scalar", RATE)))])
    stores[1].push(0, 0, [Change(uid, 0, None, (("rows", gradient), ("scalar", RATE)))])
    others = np.setdiff1d(np.arange(ROWS), rows)
    for vid in (0, 1):
        some, every = (store.read(vid, 0, 0, ROWS) for store in stores)
        np.testing.assert_array_equal(some[rows], every[rows])
        fresh = Store(0)
        fresh.create([w, a], {0: initial.uniform(-1, 1, 3), 1: initial.constant(0.1)})
        np.testing.assert_array_equal(some[others], fresh.read(vid, 0, 0, ROWS)[others])


@settings(max_examples=60)
@given(order=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=40))
def test_a_closure_is_applied_once_whatever_comes_how_often(order):
    store, done, finished = table(), set(), 0
    old = store.read(0, 0, 0, ROWS)
    for closure, below in order:
        below = min(below, closure)
        expected = closure not in done and closure >= finished
        finished = max(finished, below)
        assert store.push(closure, below, [change([closure])]).applied is expected
        if expected:
            done.add(closure)
    new = store.read(0, 0, 0, ROWS)
    for row in range(13):
        np.testing.assert_allclose(new[row], old[row] - 0.5 * (row in done), rtol=1e-6)
    assert store.version == len(done)


def test_staleness_counts_the_pushes_since_the_pull():
    store = table()
    for closure in range(3):
        assert store.push(closure, 0, [change([1])], pulled=0).staleness == closure
    assert store.push(3, 0, [change([1])], pulled=9).staleness == 0  # pulled before a restore
    assert store.push(4, 0, [change([1])]).staleness == 0


def test_memory_of_what_was_applied_is_bounded():
    applied = Applied()
    for number in range(10_000):
        applied.add(number)
    assert (applied.below, len(applied)) == (10_000, 0)
    applied.add(20_000)
    applied.advance(20_000)
    assert (applied.below, len(applied)) == (20_001, 0)
    applied = Applied(0, range(1, 1 + (1 << 20)))
    with pytest.raises(ValueError, match="Expected `below` to follow what is finished"):
        applied.check_room()
    tokens = Tokens()
    for client in range(5000):
        assert tokens.take(f"client {client}", 0, 0)
    assert len(tokens.wire()) == 4096


@given(st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)), st.integers(0, 30))
def test_sets_of_what_was_applied_merge(some, others, below):
    a, b = Applied(below, some), Applied(0, others)
    b.merge(a)
    assert [n in b for n in range(40)] == [n < below or n in some or n in others for n in range(40)]
    assert Applied.from_wire(b.wire()).wire() == b.wire()


@pytest.mark.parametrize("data", [None, [1], [-1, []], [0, ["1"]], [0, 1]])
def test_what_is_no_set_of_numbers(data):
    with pytest.raises(ValueError, match="Expected numbers of what was applied"):
        Applied.from_wire(data)
    with pytest.raises(ValueError, match="Expected"):
        Tokens.from_wire(data)


def test_a_round_is_the_weighted_mean_of_exactly_its_closures():
    store = table()
    old = store.read(0, 0, 0, ROWS)
    for closure, rows, weight in ((1, [0, 2], 1.0), (2, [2, 7], 3.0), (3, [0], 5.0)):
        gradient = np.full((len(rows), WIDTH), closure, np.float32)
        pushed = store.push(closure, 0, [change(rows, gradient)], number=0, weight=weight)
        assert (pushed.applied, pushed.late) == (True, False)
    assert not store.push(2, 0, [change([1])], number=0, weight=9.0).applied  # again
    np.testing.assert_array_equal(store.read(0, 0, 0, ROWS), old)
    assert store.version == 0
    done = store.commit(0, [1, 2])
    assert (done.applied, done.missing, done.dropped) == (True, (), 1)
    expected = old.copy()
    expected[0] -= 0.5 * (1 * 1 / 4)
    expected[2] -= 0.5 * (1 * 1 / 4 + 2 * 3 / 4)
    expected[7] -= 0.5 * (2 * 3 / 4)
    np.testing.assert_allclose(store.read(0, 0, 0, ROWS), expected, rtol=1e-6)
    assert store.version == 1
    assert not store.commit(0, [1, 2]).applied  # again
    late = store.push(4, 0, [change([1])], number=0)
    assert (late.applied, late.late) == (False, True)
    assert (store.status()["late"], store.status()["dropped"]) == (1, 1)
    assert store.rounds.nbytes == 0


def test_a_round_of_dense_gradients_sums_with_given_weights():
    store = table()
    old = store.read(0, 0, 0, ROWS)
    store.push(1, 0, [change(None)], number=3)
    store.push(2, 0, [change(None)], number=3)
    store.commit(3, [1, 2], weights=[1.0, 2.0], mean=False)
    # The rate, which is the same for both, is not summed.
    np.testing.assert_allclose(store.read(0, 0, 0, ROWS), old - 0.5 * 3, rtol=1e-6)


def test_a_round_with_a_closure_that_was_not_staged_is_not_committed():
    store = table()
    store.push(1, 0, [change([1])], number=0)
    assert store.commit(0, [1, 2, 9]).missing == (2, 9)
    assert store.version == 0
    store.push(2, 0, [change([1])], number=0)
    assert store.commit(0, [1, 2]).applied
    assert store.commit(1, []).applied  # nobody came


def test_staged_values_are_copies():
    store = table()
    old = store.read(0, 0, 0, ROWS)
    gradient = np.ones((1, WIDTH), np.float32)
    store.push(1, 0, [change([1], gradient)], number=0)
    gradient[:] = 7
    store.commit(0, [1])
    np.testing.assert_array_equal(store.read(0, 0, 0, ROWS)[1], old[1] - 0.5)


def test_hybrid_some_units_wait_and_others_do_not():
    store = table()
    placement = Placement(1)
    b = placement.place(5, "b", (ROWS, WIDTH), "float32")
    store.create([b], {5: initial.constant(1)})
    store.install([Unit("dense", (5,), SGD)])
    old = store.read(0, 0, 0, ROWS)
    both = [change([1]), change(None, uid="dense")]
    assert store.push(1, 0, both, number=0, staged=["dense"]).applied
    np.testing.assert_array_equal(store.read(0, 0, 0, ROWS)[1], old[1] - 0.5)
    assert (store.read(5, 0, 0, ROWS) == 1).all()
    assert not store.push(1, 0, both, number=0, staged=["dense"]).applied
    store.commit(0, [1])
    assert (store.read(5, 0, 0, ROWS) == 0.5).all()
    np.testing.assert_array_equal(store.read(0, 0, 0, ROWS)[1], old[1] - 0.5)


def test_sums_of_small_floats_and_integers():
    store = Store(0)
    placement = Placement(1)
    half = placement.place(0, "half", (2,), "bfloat16")
    count = placement.place(1, "count", (2,), "int32")
    store.create([half, count], {0: initial.constant(0), 1: initial.constant(0)})
    add = {**SGD, "handed": ["rows"], "steps": [["add", [0, 1], None]], "outputs": [2]}
    store.install([Unit("half", (0,), add), Unit("count", (1,), add)])
    for closure in range(5):
        value = np.array([256, 1], half_dtype := store.blocks[0, 0].array.dtype)
        changes = [
            Change("half", 0, None, (("rows", value),)),
            Change("count", 0, None, (("rows", np.array([1, 2], np.int32)),)),
        ]
        store.push(closure, 0, changes, number=0)
    store.commit(0, range(5), mean=False)
    assert store.read(0, 0, 0, 2).tolist() == [1280, 5]
    assert store.read(1, 0, 0, 2).tolist() == [5, 10]
    assert half_dtype.name == "bfloat16"


OPERATIONS = {
    "set": lambda a, b: b, "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "div": np.divide, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


@pytest.mark.parametrize("op", OPERATIONS)
def test_assignments(op):
    store = table()
    expected = store.read(0, 0, 0, ROWS)
    rng = np.random.default_rng(1)
    for rows in (None, (3, 9), numbers(7, 2, 30)):
        where = slice(None) if rows is None else slice(*rows) if isinstance(rows, tuple) else rows
        value = rng.uniform(1, 2, expected[where].shape).astype(np.float32)
        assert store.assign(0, 0, op, value, rows)
        expected[where] = OPERATIONS[op](expected[where], value)
        np.testing.assert_allclose(store.read(0, 0, 0, ROWS), expected, rtol=1e-6)


def test_an_assignment_to_a_row_twice_and_to_a_scalar():
    store = table()
    store.assign(0, 0, "set", np.zeros((ROWS, WIDTH), np.float32))
    store.assign(0, 0, "add", np.ones((3, WIDTH), np.float32), numbers(4, 4, 5))
    assert store.read(0, 0, 4, 6)[:, 0].tolist() == [2, 1]
    n = Placement(1).place(9, "n", (), "int64")
    store.create([n], {9: initial.constant(3)})
    store.assign(9, 0, "add", np.array(4, np.int64))
    store.assign(9, 0, "mul", np.array(2, np.int64), (0, 1))
    assert store.read(9, 0, 0, 1) == 14
    assert store.pull([(9, 0)], [])[0] == 14


def test_an_assignment_is_done_once_by_its_token():
    store = table()
    one = np.ones((ROWS, WIDTH), np.float32)
    assert store.assign(0, 0, "set", one, token=("c", 0, 0))
    assert not store.assign(0, 0, "add", one, token=("c", 0, 0))
    assert store.assign(0, 0, "add", one, token=("d", 0, 0))
    assert store.assign(0, 0, "add", one, token=("c", 2, 2))
    assert not store.assign(0, 0, "add", one, token=("c", 1, 1))  # nobody waits for it
    assert (store.read(0, 0, 0, ROWS) == 3).all()


def test_creation_never_overwrites_and_other_descriptions_are_refused():
    store = table()
    old = store.read(0, 0, 0, ROWS)
    spec = store.specs[0]
    store.create([spec], {0: initial.constant(9)})
    np.testing.assert_array_equal(store.read(0, 0, 0, ROWS), old)
    other = Placement(1).place(0, "w", (ROWS, 4), "float32")
    with pytest.raises(ValueError, match="expected Spec.*which exists"):
        store.create([other], {0: initial.constant(9)})
    with pytest.raises(ValueError, match="Expected a start"):
        store.create([Placement(1).place(7, "new", (), "float32")], {})
    good = np.arange(6, dtype=np.float32).reshape(3, 2)
    value = Placement(1).place(8, "value", (3, 2), "float32")
    for bad in (good[:2], good.astype(np.float64), None):
        with pytest.raises(ValueError, match="as the value of shard 0"):
            store.create([value], {8: {"kind": "value", "arrays": {0: bad}}})
    store.create([value], {8: {"kind": "value", "arrays": {0: good}}})
    good[:] = 0
    assert store.read(8, 0, 0, 3)[2, 1] == 5


def test_deleted_variables_take_their_units_along():
    store = table()
    store.delete([1, 77])
    assert (sorted(store.specs), sorted(store.units)) == ([0], ["sgd"])
    with pytest.raises(ValueError, match="Expected a unit that is installed. Got 'adagrad'"):
        store.push(0, 0, [change([1], uid="adagrad")])
    with pytest.raises(ValueError, match="Expected a shard that is on ps 0"):
        store.read(1, 0, 0, 1)


@pytest.mark.parametrize(
    ("unit", "match"),
    [
        (Unit("sgd", (1,), SGD), "expected the one that is installed"),
        (Unit("new", (0, 99), ADAGRAD), "expected variables that exist"),
        (Unit("new", (0, 0), ADAGRAD), "each once"),
        (Unit("new", (0, 1), SGD), "expected a program of 2 arrays"),
        (Unit("new", (0, 2), ADAGRAD), "of one shape and with the same shards"),
        (Unit("new", (0,), {"kind": "rows"}), "Expected"),
        (
            Unit("new", (3,), {"kind": "whole", "handed": 1, "written": [True], "program": b""}),
            "expected variables that are whole",
        ),
    ],
)
def test_units_that_are_refused(unit, match):
    store = table()
    others = Placement(1, FixedShardsPartitioner(2))
    specs = [others.place(2, "x", (ROWS, 1), "float32"), others.place(3, "y", (4,), "float32")]
    store.create(specs, {2: initial.constant(0), 3: initial.constant(0)})
    before = dict(store.units)
    with pytest.raises(ValueError, match=match):
        store.install([Unit("good", (0,), SGD), unit])
    assert store.units == before


ONE = np.ones((1, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (change([ROWS]), "Expected row numbers from 0 to 39"),
        (change([-1]), "Expected row numbers from 0 to 39"),
        (change([3, 2]), "sorted, none twice"),
        (change([3, 3]), "sorted, none twice"),
        (Change("sgd", 0, np.array([1]), (("rows", ONE),)), "of the kinds"),
        (Change("sgd", 0, np.array([1]), (("whole", ONE), ("scalar", RATE))), "of the kinds"),
        (change([1, 2], ONE), "expected values of shape"),
        (change([1], ONE[:, :2]), "expected values of shape"),
        (change(None, ONE), "expected values of shape"),
        (change([1], rate=np.ones(1, np.float32)), "scalars of"),
        (Change("sgd", 1, None, ()), "Expected a shard that is on ps 0"),
        (Change("none", 0, None, ()), "Expected a unit that is installed"),
        (
            Change("sgd", 0, np.array([1], np.int32), (("rows", ONE), ("scalar", RATE))),
            r"Expected row numbers int64\[n\]",
        ),
        (change([1], np.array([["a"] * WIDTH])), "expected values that its program can use"),
    ],
)
def test_a_push_that_is_refused_leaves_the_state_as_it_was(bad, match):
    store = table()
    before = store.read(0, 0, 0, ROWS)
    for number in (None, 0):
        with pytest.raises(ValueError, match=match):
            store.push(5, 0, [change([1]), bad], number=number)
        np.testing.assert_array_equal(store.read(0, 0, 0, ROWS), before)
        assert (store.version, 5 in store.applied, store.rounds.staged) == (0, False, {})
    assert store.push(5, 0, [change([1])]).applied


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s: s.push(1, 2, []), "Expected a closure that may be at work"),
        (lambda s: s.pull([(0, 3)], []), "Expected a shard that is on ps 0"),
        (lambda s: s.read(0, 0, 3, 2), "Expected a range of rows"),
        (lambda s: s.read(0, 0, 0, ROWS + 1), "Expected a range of rows"),
        (lambda s: s.assign(0, 0, "pow", ONE), "Expected an operation of"),
        (lambda s: s.assign(0, 0, "set", ONE), r"expected float32\[40, 3\]"),
        (lambda s: s.assign(0, 0, "set", ONE, (0, 2)), r"expected float32\[2, 3\]"),
        (lambda s: s.assign(0, 0, "set", ONE, (40, 41)), "Expected a range of rows"),
        (lambda s: s.assign(0, 0, "set", ONE, numbers(40)), "Expected row numbers from 0"),
        (lambda s: s.assign(0, 0, "set", ONE.astype(int), numbers(4)), "expected float32"),
        (lambda s: s.pull([], [(9, 0, numbers(0))]), "of a variable that has rows"),
        (lambda s: s.pull([], [(0, 0, numbers(1, 2))], rooms=[1]), "an array for 2 to 40 rows"),
        (lambda s: s.pull([], [(0, 0, numbers(1, 2))], rooms=[41]), "Got one for 41. Use the"),
        (lambda s: s.read(9, 0, 0, 0), "the one row of a scalar"),
        (lambda s: s.commit(0, [1], weights=[0.0]), "weights with a positive sum"),
    ],
)
def test_what_else_is_refused(call, match):
    store = table()
    store.create([Placement(1).place(9, "n", (), "int64")], {9: initial.constant(3)})
    store.push(1, 0, [change([1])], number=0)
    with pytest.raises(ValueError, match=match):
        call(store)


def test_a_round_of_different_functions_is_refused():
    store = table()
    store.push(1, 0, [change([1])], number=0)
    store.push(2, 0, [change(None)], number=0)
    with pytest.raises(ValueError, match="rows from all closures of a round, or from none"):
        store.commit(0, [1, 2])
    assert store.version == 0


def test_gradients_that_wait_count_towards_the_limit_of_memory():
    store = table(Store(0, memory_limit=2 * ROWS * WIDTH * 4 + 1000))
    for closure in range(2):
        store.push(closure, 0, [change(None)], number=0)
    with pytest.raises(MemoryError, match="gradients of a round"):
        store.push(2, 0, [change(None)], number=0)
    store.commit(0, [0])
    assert store.push(2, 0, [change(None)], number=1).applied


class Doubling(WholeProgram):
    """Doubles a variable; raises where it is handed a negative number."""

    def run(self, state, handed):
        if handed[0] < 0:
            raise FloatingPointError("negative")
        return [state[0] * 2 if handed[0] else state[0][:1]]


def test_an_update_of_the_whole_that_fails_leaves_all_as_it_was(monkeypatch):
    made = Doubling(1, ("whole",), (True,), b"")
    monkeypatch.setattr(
        "stratagem.parameter_server.units.program_of",
        lambda data: made if data["kind"] == "whole" else program_of(data),
    )
    store = table()
    store.install([Unit("double", (1,), {"kind": "whole"})])
    old = [store.read(vid, 0, 0, ROWS) for vid in (0, 1)]

    def push(closure, number, rows=None):
        whole = Change("double", 0, rows, (("whole", np.array(number)),))
        return store.push(closure, 0, [change([1]), whole])

    with pytest.raises(FloatingPointError):
        push(1, -1)
    with pytest.raises(ValueError, match="expected an update that keeps"):
        push(1, 0)
    with pytest.raises(ValueError, match="expected no row numbers"):
        push(1, 1, numbers(3))
    for vid in (0, 1):
        np.testing.assert_array_equal(store.read(vid, 0, 0, ROWS), old[vid])
    assert push(1, 1).applied
    np.testing.assert_array_equal(store.read(1, 0, 0, ROWS), old[1] * 2)
    np.testing.assert_array_equal(store.read(0, 0, 0, ROWS)[1], old[0][1] - 0.5)


def test_scalars_that_differ_are_combined_in_a_round():
    """The gradient of a variable of one element travels as a scalar; a learning rate is one too."""
    found = rounds._sum(
        [
            (0.25, Change("sgd", 0, None, (("scalar", np.float32(4)), ("scalar", RATE)))),
            (0.75, Change("sgd", 0, None, (("scalar", np.float32(8)), ("scalar", RATE)))),
        ]
    )
    (_, gradient), (_, rate) = found.handed
    assert gradient == 7.0
    assert rate == RATE
    flags = [(0.5, Change("sgd", 0, None, (("scalar", np.bool_(v)),))) for v in (True, False)]
    assert rounds._sum(flags).handed[0][1] == np.bool_(False)
    counts = [(0.5, Change("rows", 0, None, (("scalar", np.int32(n)),))) for n in (8, 8)]
    assert rounds._sum(counts, frozenset([("rows", 0)])).handed[0][1] == 16


def test_an_operation_that_a_dtype_lacks_takes_no_token():
    store = Store(0)
    spec = Placement(1).place(0, "on", (3,), "bool")
    store.create([spec], {0: initial.constant(False)})
    with pytest.raises(ValueError, match="an operation that bool has. Got 'sub'"):
        store.assign(0, 0, "sub", np.ones(3, bool), token=("client", 0, 0))
    assert store.assign(0, 0, "set", np.ones(3, bool), token=("client", 0, 0))


def test_two_units_of_one_name_are_refused_together():
    store = table()
    with pytest.raises(ValueError, match="unit new: expected the one that is installed"):
        store.install([Unit("new", (0,), SGD), Unit("new", (1,), SGD)])
    assert "new" not in store.units


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_variables_without_elements(shape):
    spec = Placement(1, FixedShardsPartitioner(2)).place(0, "v", shape, "float32")
    store = Store(0)
    store.create([spec], {0: initial.uniform(0, 1, 1)})
    assert sum(store.read(0, i, s.start, s.stop).size for i, s in enumerate(spec.shards)) == 0
