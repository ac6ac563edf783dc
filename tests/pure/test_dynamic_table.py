"""Tables without a preset size, beside a dictionary that does the same one id at a time."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import TableFullError
from stratagem.parameter_server import initial
from stratagem.parameter_server.buckets import BUCKETS, bucket_of, deal
from stratagem.parameter_server.by_id import first_rows
from stratagem.parameter_server.column import Column
from stratagem.parameter_server.dynamic import DynamicTable, Piece
from stratagem.parameter_server.index import IdIndex
from stratagem.parameter_server.policy import Policy
from stratagem.parameter_server.rows import RowProgram, Step

WEIGHT, SLOT = 7, 8
FIRST = first_rows(initial.uniform(-1, 1, seed=5), (3,), "float32")
# weight -= gradient; slot += gradient
PROGRAM = RowProgram(2, ("rows",), (Step("sub", (0, 2)), Step("add", (1, 2))), (3, 4))

few_ids = st.sets(st.integers(-12, 12) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=9)


def array(ids):
    return np.array(sorted(ids), np.int64)


def table(**policy):
    made = DynamicTable("users", Policy(**policy))
    made.add_column(WEIGHT, (3,), "float32", FIRST)
    made.add_column(SLOT, (3,), "float32", first_rows(initial.constant(0.5), (3,), "float32"))
    return made


def values(of, ids, vid=WEIGHT):
    return of.gather(vid, array(ids), of.rows_of(array(ids), now=0.0, create=False))


def content(of, buckets=None):
    pieces = list(of.pieces(buckets, rows=4))
    rows = {}
    for p in pieces:
        columns = [p.columns[vid].tolist() for vid in (WEIGHT, SLOT)]
        rows |= dict(
            zip(p.ids.tolist(), zip(p.touched.tolist(), *columns, strict=True), strict=True)
        )
    seen = {}
    for p in pieces:
        notes = zip(p.seen_times.tolist(), p.seen_touched.tolist(), strict=True)
        seen |= dict(zip(p.seen.tolist(), notes, strict=True))
    return rows, seen


class Model:
    """A table in a dictionary: id -> (touched, weight, slot)."""

    def __init__(self, policy):
        self.policy, self.rows, self.seen, self.dropped = policy, {}, {}, 0

    def occur(self, ids, times, now):
        policy, found = self.policy, {i for i in ids if i in self.rows}
        count = {i: times + self.seen.get(i, (0, 0.0))[0] for i in ids - found}
        new = {i for i in count if count[i] >= policy.admit_after}
        over = len(self.rows) + len(new) - (policy.max_rows or 10**9)
        if new and over > 0:
            idle = sorted(self.rows.keys() - found, key=lambda i: (self.rows[i][0], i))
            if policy.when_full == "error" or over > len(idle):
                raise TableFullError
            for i in idle[: max(over, policy.max_rows // 32)]:
                del self.rows[i]
        for i in count.keys() - new:
            self.seen[i] = (count[i], now)
        for i in new:
            self.seen.pop(i, None)
            self.rows[i] = (now, *self.start(i))
        for i in found:
            self.rows[i] = (max(now, self.rows[i][0]), *self.rows[i][1:])

    def start(self, i):
        return FIRST(array({i}))[0].tolist(), [0.5] * 3

    def push(self, gradient, now):
        for i, g in gradient.items():
            if i not in self.rows:
                self.dropped += 1
                continue
            touched, weight, slot = self.rows[i]
            weight = (np.float32(weight) - np.float32(g)).tolist()
            self.rows[i] = (max(touched, now), weight, [s + g for s in slot])

    def expire(self, now):
        if (after := self.policy.expire_after) is not None:
            self.rows = {i: r for i, r in self.rows.items() if r[0] > now - after}
            self.seen = {i: s for i, s in self.seen.items() if s[1] > now - after}


policies = st.builds(
    Policy,
    admit_after=st.integers(1, 3),
    expire_after=st.none() | st.integers(1, 4),
    max_rows=st.none() | st.integers(1, 12),
    when_full=st.sampled_from(["error", "evict"]),
)
actions = st.lists(
    st.tuples(st.sampled_from(["occur", "push", "expire", "move"]), few_ids, st.integers(1, 3)),
    max_size=12,
)


@settings(max_examples=70)
@given(policies, actions, st.lists(st.integers(-1, 3), min_size=12, max_size=12))
def test_it_does_what_a_dictionary_does(policy, todo, ticks):
    ours, model, now = table(**vars(policy)), Model(policy), 0.0
    for (action, ids, number), tick in zip(todo, ticks, strict=False):
        now += tick  # also back: workers' news arrive in any order
        if action == "occur":
            try:
                model.occur(ids, number, now)
            except TableFullError:
                with pytest.raises(TableFullError):
                    ours.rows_of(array(ids), now=now, times=number)
            else:
                rows = ours.rows_of(array(ids), now=now, times=number)
                assert [r >= 0 for r in rows] == [i in model.rows for i in sorted(ids)]
        elif action == "push":
            gradient = {i: float(i % 5 + number) for i in ids}
            model.push(gradient, now)
            handed = np.repeat(np.float32([gradient[i] for i in sorted(ids)])[:, None], 3, 1)
            applied = ours.update(PROGRAM, [WEIGHT, SLOT], array(ids), [handed], now=now)
            assert applied == len(ids & model.rows.keys())
        elif action == "expire":
            model.expire(now)
            ours.expire(now)
        else:
            whole = list(ours.pieces(rows=number))
            ours, counts = table(**vars(policy)), ours.counts
            ours.counts = counts
            for piece in whole:
                ours.restore(piece)
        assert content(ours) == (model.rows, model.seen)
        assert ours.counts.dropped == model.dropped
        asked = sorted(ids | {1, 2})
        expected = [model.rows[i][1] if i in model.rows else model.start(i)[0] for i in asked]
        assert values(ours, asked).tolist() == expected


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            few_ids | st.sets(st.integers()),
        ),
        max_size=8,
    ).map(lambda steps: [(add, {((i + 2**63) % 2**64) - 2**63 for i in ids}) for add, ids in steps])
)
def test_an_index_is_a_dictionary_of_numbers(steps):
    index, model = IdIndex(), {}
    for add, ids in steps:
        ids = {i for i in ids if (i in model) != add}
        if add:
            model |= dict(zip(sorted(ids), index.add(array(ids)).tolist(), strict=True))
        else:
            index.remove(index.find(array(ids)))
            model = {i: n for i, n in model.items() if i not in ids}
        asked = array(ids | model.keys() | {0, -1, -2})
        assert index.find(asked).tolist() == [model.get(int(i), -1) for i in asked]
        assert index.numbers().tolist() == sorted(model.values())
        assert len(index) == len(model)
        assert set(index.ids(index.numbers()).tolist()) == model.keys()


def test_an_index_grows_and_forgets_without_keeping_dead_slots():
    index, numbers = IdIndex(), []
    rng = np.random.default_rng(0)
    for _ in range(30):
        ids = np.unique(rng.integers(-(2**63), 2**63 - 1, 3000, dtype=np.int64))
        numbers.append(index.add(ids))
        assert np.array_equal(index.find(ids), numbers[-1])
        assert np.array_equal(index.ids(numbers[-1]), ids)
        if len(numbers) > 2:
            index.remove(numbers.pop(0))
    assert len(index) == sum(map(len, numbers))
    assert index.end <= 9000  # numbers are given out again
    assert len(index._slots) <= 8 * 9000


def test_rows_start_from_their_ids_alone():
    ids = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5000, dtype=np.int64))
    one, other = table(), table()
    one.rows_of(ids, now=0.0)
    for part in np.array_split(ids[::-1], 7):
        other.rows_of(part[::-1], now=1.0)
    assert np.array_equal(values(one, ids), values(other, ids))
    assert np.array_equal(values(one, ids), values(table(), ids))  # also without a row


@pytest.mark.parametrize(
    ("start", "mean", "deviation", "low", "high"),
    [
        (initial.uniform(-2, 4, 1), 1, 6 / 12**0.5, -2, 4),
        (initial.normal(1, 2, 1), 1, 2, -12, 14),
        (initial.truncated_normal(1, 2, 1), 1, 2 * 0.8796, -3, 5),
        (initial.constant(3), 3, 0, 3, 3),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("ids", [np.arange(20_000), np.arange(20_000) * 2**40 - 2**50])
def test_distributions(start, mean, deviation, low, high, dtype, ids):
    rows = first_rows(start, (2, 5), dtype)(ids)
    assert rows.shape == (20_000, 2, 5)
    assert rows.dtype.name == dtype
    wide = rows.astype(np.float64)
    assert abs(wide.mean() - mean) < 0.03
    assert abs(wide.std() - deviation) < 0.03
    assert low <= wide.min() <= wide.max() <= high
    if deviation:
        neighbours = wide.reshape(-1, 10)
        assert abs(np.corrcoef(neighbours[:-1].ravel(), neighbours[1:].ravel())[0, 1]) < 0.02
        assert abs(np.corrcoef(neighbours[:, 0], neighbours[:, 1])[0, 1]) < 0.03
        other = first_rows(start | {"seed": 2}, (2, 5), dtype)(ids).astype(np.float64)
        assert abs(np.corrcoef(other.ravel(), wide.ravel())[0, 1]) < 0.02


def test_a_start_that_is_none_is_refused():
    with pytest.raises(ValueError, match="Expected a start of the kinds"):
        first_rows({"kind": "value"}, (3,), "float32")


def test_more_rows_than_the_first_room_keep_their_values():
    big = DynamicTable("big")
    big.add_column(0, (128,), "float32", first_rows(initial.normal(0, 1, 3), (128,), "float32"))
    ids = np.arange(-9000, 9000)
    for part in np.array_split(ids, 9):
        big.rows_of(part, now=0.0)
    rows = big.rows_of(ids, now=0.0, create=False)
    first = first_rows(initial.normal(0, 1, 3), (128,), "float32")(ids)
    assert np.array_equal(big.gather(0, ids, rows), first)
    none = np.empty(0, np.int64)
    big.restore(Piece(ids[:5], np.zeros(5), {0: first[:5] + 1}, none, none, np.empty(0)))
    assert np.array_equal(big.gather(0, ids, rows)[:6], np.r_[first[:5] + 1, first[5:6]])


class NoMoves(mmap.mmap):
    """Memory of a system that cannot move pages."""

    def resize(self, newsize):
        raise SystemError("mmap: resizing not available--no mremap()")


class NoMemory(mmap.mmap):
    def resize(self, newsize):
        raise OSError(12, "Cannot allocate memory")


def test_a_column_grows_where_pages_cannot_be_moved(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", NoMoves)
    column = Column((3,), np.dtype(np.float32))
    written = np.zeros((0, 3), np.float32)
    for size in (1, 90_000, 150_000):
        column.reserve(size)
        rows = np.arange(len(written), size)
        column.put(rows, np.repeat(rows[:, None], 3, 1).astype(np.float32))
        written = np.repeat(np.arange(size)[:, None], 3, 1).astype(np.float32)
        assert np.array_equal(column.take(np.arange(size)), written)


def test_a_column_without_memory_says_so(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", NoMemory)
    column = Column((3,), np.dtype(np.float32))
    with pytest.raises(MemoryError, match=r"Expected 1,048,572 bytes for 87,381 rows of a dynamic"):
        column.reserve(1)


def test_a_column_does_not_move_under_a_view():
    column = Column((3,), np.dtype(np.float32))
    column.reserve(1)
    view = column.block.array
    with pytest.raises(BufferError):
        column.reserve(10**6)
    assert not view.any()
    del view
    column.reserve(10**6)


def test_a_column_that_comes_later_starts_for_all_rows():
    late = table()
    late.rows_of(array({4, -4}), now=0.0)
    late.add_column("momentum", (), "float64", lambda ids: ids.astype(np.float64) * 2)
    assert values(late, {4, -4, 9}, "momentum").tolist() == [-8.0, 8.0, 18.0]
    with pytest.raises(ValueError, match=r"table 'users' does not have. Got 'momentum' again"):
        late.add_column("momentum", (), "float64", FIRST)


def test_reading_changes_nothing():
    still = table(admit_after=2, expire_after=1)
    still.rows_of(array({1}), now=0.0, times=2)
    before = content(still)
    values(still, {1, 2, 3})
    assert content(still) == before
    assert vars(still.counts) == {"created": 1, "expired": 0, "evicted": 0, "dropped": 0}


def test_a_full_table_says_so_and_is_as_it_was():
    full = table(max_rows=3)
    full.rows_of(array({1, 2}), now=0.0)
    before = content(full)
    with pytest.raises(
        TableFullError,
        match=r"at most 3 rows of dynamic table 'users' on one parameter server. Got 2 new ids "
        r"while it has 2 rows, 1 of them in use.* choose when_full='evict'",
    ):
        full.rows_of(array({1, 8, 9}), now=5.0)
    assert content(full) == before


def test_the_least_recently_used_go_and_what_is_in_use_stays():
    lru = table(max_rows=3, when_full="evict")
    lru.rows_of(array({1, 2, 3}), now=0.0)
    lru.rows_of(array({2}), now=1.0)
    lru.rows_of(array({1, 4}), now=2.0)
    assert content(lru)[0].keys() == {1, 2, 4}
    assert lru.counts.evicted == 1
    with pytest.raises(TableFullError, match="3 of them in use"):
        lru.rows_of(array({1, 2, 4, 5}), now=3.0)


def test_rows_that_went_start_again():
    short = table(expire_after=2)
    short.rows_of(array({1, 2}), now=0.0)
    short.update(PROGRAM, [WEIGHT, SLOT], array({1}), [np.ones((1, 3), np.float32)], now=1.0)
    assert short.expire(2.0) == 1  # id 2
    assert short.expire(3.0) == 1
    assert table().expire(1e9) == 0
    assert (len(short), short.counts.expired) == (0, 2)
    short.rows_of(array({1}), now=4.0)
    assert np.array_equal(values(short, {1}), FIRST(array({1})))


def test_servers_that_do_not_fit_the_buckets_are_refused():
    for servers in (0, 1025):
        with pytest.raises(ValueError, match=rf"1 and 1024 parameter servers .* Got {servers}"):
            deal(servers)


def test_buckets_are_even_also_for_ids_in_a_row():
    for ids in (np.arange(200_000), np.arange(200_000) * 1024, np.arange(200_000) << 40):
        counts = np.bincount(bucket_of(ids), minlength=BUCKETS)
        assert 100 < counts.min() <= counts.max() < 300
    assert bucket_of(array({-1, 0, 1, 2**63 - 1})).tolist() == [379, 0, 485, 701]  # for ever


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_servers_has_everything(count):
    """Snapshots of two servers, restored on others, each of which takes its own buckets."""
    rng = np.random.default_rng(1)
    ids = np.unique(rng.integers(-(2**63), 2**63 - 1, 400, dtype=np.int64))
    owner = deal(2)
    servers = [table(admit_after=2) for _ in range(2)]
    for i, server in enumerate(servers):
        mine = ids[owner[bucket_of(ids)] == i]
        server.rows_of(mine[: len(mine) // 2], now=1.0, times=2)
        server.rows_of(mine[len(mine) // 2 :], now=2.0)
        there = mine[: len(mine) // 2]
        gradient = rng.standard_normal((len(there), 3)).astype(np.float32)
        server.update(PROGRAM, [WEIGHT, SLOT], there, [gradient], now=3.0)
    before = [content(server) for server in servers]

    others = [table(admit_after=2) for _ in range(count)]
    for i, other in enumerate(others):
        for server in servers:
            for piece in server.pieces(rows=50):
                other.restore(piece, deal(count) == i)
    after = [content(other) for other in others]
    for part in (0, 1):  # rows, and ids that were seen
        joined = {k: v for c in before for k, v in c[part].items()}
        assert {k: v for c in after for k, v in c[part].items()} == joined
        assert sum(len(c[part]) for c in after) == len(joined)
        assert all(c[part] for c in after)
    for i, other in enumerate(others):
        held = array(content(other)[0])
        assert (deal(count)[bucket_of(held)] == i).all()


def test_pieces_of_other_tables_are_refused():
    none = np.empty(0, np.int64)
    for columns, what in (
        ({"other": np.zeros((1, 3), np.float32)}, "variable 'other' of float32 .* has none"),
        ({WEIGHT: np.zeros((1, 1), np.float32)}, r"of shape \(1,\) a row, .* of shape \(3,\)"),
        ({WEIGHT: np.zeros((1, 3), np.float64)}, r"of float64 .* float32 of shape"),
    ):
        piece = Piece(array({1}), np.zeros(1), columns, none, none, np.empty(0))
        with pytest.raises(ValueError, match=what):
            table().restore(piece)


def test_pushes_are_checked_before_they_are_applied():
    some = table()
    some.rows_of(array({1, 2}), now=0.0)
    before = content(some)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) for 2 ids .*'users'. Got \[\(1, 3\)\]"):
        some.update(PROGRAM, [WEIGHT, SLOT], array({1, 2}), [np.zeros((1, 3), np.float32)], now=0.0)
    assert content(some) == before


def test_buckets_must_be_a_mask():
    with pytest.raises(ValueError, match=r"bool of shape \(1024,\). Got int64 of shape \(2,\)"):
        list(table().pieces(np.array([1, 2])))


@pytest.mark.parametrize(
    "ids", [np.array([2, 1]), np.array([1, 1]), np.array([[1]]), np.array([1], np.int32)]
)
def test_ids_are_checked(ids):
    for call in (
        lambda: table().rows_of(ids, now=0.0),
        lambda: table().update(PROGRAM, [WEIGHT, SLOT], ids, [], now=0.0),
    ):
        with pytest.raises(ValueError, match=r"ids of dtype int64, shape \[n\], ascending"):
            call()


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        ({"admit_after": 0}, "admit_after of an integer of 1 or more"),
        ({"max_rows": 1.5}, "max_rows of an integer of 1 or more for a dynamic table. Got 1.5"),
        ({"expire_after": 0}, "expire_after of a number above 0"),
        ({"when_full": "panic"}, "when_full of 'error' or 'evict' .* Got 'panic'"),
    ],
)
def test_policies_are_checked(policy, what):
    with pytest.raises(ValueError, match=what):
        Policy(**policy)
