"""Snapshots: exact while pushes go on, checked, restored on any number of servers."""

from __future__ import annotations

import itertools
import json
import os
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import BackupError, BackupMismatchError, CorruptBackupError
from stratagem.parameter_server import initial, snapshot
from stratagem.parameter_server.partitioners import FixedShardsPartitioner
from stratagem.parameter_server.plan import Placement, Unit
from stratagem.parameter_server.restore import restoring
from stratagem.parameter_server.rounds import Change
from stratagem.parameter_server.store import Store

SGD = {
    "kind": "rows", "members": 1, "handed": ["rows", "scalar"],
    "steps": [["mul", [1, 2], None], ["sub", [0, 3], None]], "outputs": [4],
}  # fmt: skip
RATE = np.array(0.5, np.float32)
ROWS, WIDTH = 60, 3
UNITS = [Unit("w", (0,), SGD), Unit("n", (2,), SGD)]


def finish(steps, between=lambda: None):
    """Runs a job to its end; gives what it returns."""
    try:
        wait = next(steps)
        while True:
            if isinstance(wait, Future) and (error := wait.exception()):
                wait = steps.throw(error)
            else:
                between()
                wait = next(steps)
    except StopIteration as end:
        return end.value


def plan(servers, parts):
    placement = Placement(servers, FixedShardsPartitioner(parts))
    w = placement.place(0, "w", (ROWS, WIDTH), "float32")
    slot = placement.place(1, "slot", (ROWS, WIDTH), "bfloat16", beside=w)
    return [w, slot, placement.place(2, "n", (), "float32"), placement.place(3, "k", (5,), "int64")]


def stores(servers, parts=3):
    specs = plan(servers, parts)
    starts = {
        0: initial.uniform(-1, 1, 3), 1: initial.normal(0, 1, 4), 2: initial.constant(7),
        3: {"kind": "value", "arrays": {}},
    }  # fmt: skip
    value = np.arange(5) * 10
    starts[3]["arrays"] = {i: value[s.start : s.stop] for i, s in enumerate(specs[3].shards)}
    made = [Store(i) for i in range(servers)]
    for store in made:
        store.create(specs, starts)
        store.install(UNITS)
    return made, specs


def values(made, specs):
    return [
        [made[s.server].read(spec.vid, i, s.start, s.stop) for i, s in enumerate(spec.shards)]
        for spec in specs
    ]


def whole(made, specs):
    return [np.concatenate(v) if v[0].ndim else v[0] for v in values(made, specs)]


def push(store, closure, rows, shard=0):
    rows = None if rows is None else np.array(sorted(rows), np.int64)
    shape = store.blocks[0, shard].array.shape if rows is None else (len(rows), WIDTH)
    handed = (("rows", np.ones(shape, np.float32)), ("scalar", RATE))
    return store.push(closure, 0, [Change("w", shard, rows, handed)])


def take(store, directory, number=1, keep_from=0, between=lambda: None):
    return finish(snapshot.taking(store, directory, number, "job", keep_from), between)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 7 * WIDTH * 4)


_LOW = st.sets(st.integers(0, ROWS // 2 - 1), max_size=20)
_CHANGES = st.lists(
    st.tuples(st.sampled_from(["rows", "all", "assign", "scalar", "none", "new"]),
              st.integers(0, 1), _LOW),
    min_size=1, max_size=9,
)  # fmt: skip


def make(store, closure, kind, shard, rows):
    """Changes something."""
    block = store.blocks[0, shard]
    if kind == "rows":
        push(store, closure, {row + block.start for row in rows}, shard)
    elif kind == "all":
        push(store, closure, None, shard)
    elif kind == "assign":
        twice = np.array([block.stop - 1, block.start, block.start])
        store.assign(0, shard, "add", np.ones((3, WIDTH), np.float32), twice)
        some = block.stop - 9, block.stop - 7
        store.assign(0, shard, "set", np.zeros((2, WIDTH), np.float32), some)
    elif kind == "scalar":
        store.assign(2, 0, "add", np.array(1, np.float32))
    elif kind == "new":
        extra = Placement(1).place(100 + closure, "extra", (9, 9), "float32")
        store.create([extra], {extra.vid: initial.constant(1)})
        store.assign(extra.vid, 0, "add", np.ones((9, 9), np.float32))


@settings(max_examples=40)
@given(changes=_CHANGES)
def test_it_is_the_state_when_it_began_whatever_changes_meanwhile(tmp_path_factory, changes):
    directory = tmp_path_factory.mktemp("snapshots")
    (store,), specs = stores(1, parts=2)
    push(store, 0, [3, 4])
    before, closures = whole([store], specs), itertools.count(1)

    def change():
        closure = next(closures)
        make(store, closure, *changes[closure % len(changes)])

    written = take(store, directory, between=change)
    assert written.version == 1
    assert store.before_write is None
    new = Store(0)
    facts = finish(restoring(new, directory, 1, "job", specs, UNITS))
    assert facts == {"number": 1, "version": 1}
    for a, b in zip(before, whole([new], specs), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not push(new, 0, [3]).applied
    assert push(new, 1, [3]).applied


@settings(max_examples=25)
@given(
    old=st.tuples(st.integers(1, 4), st.integers(1, 70)),
    new=st.tuples(st.integers(1, 4), st.integers(1, 70)),
)
def test_it_is_restored_on_any_number_of_servers(tmp_path_factory, old, new):
    directory = tmp_path_factory.mktemp("snapshots")
    before, specs = stores(*old)
    for i, store in enumerate(before):
        store.push(i, 0, [])
        store.tokens.take(f"client {i}", 0, 0)
        take(store, directory)
    after = [Store(i) for i in range(new[0])]
    others = plan(*new)
    for store in after:
        finish(restoring(store, directory, 1, "job", others, UNITS))
    for a, b in zip(whole(before, specs), whole(after, others), strict=True):
        np.testing.assert_array_equal(a, b)
    if old == new:
        for a, b in zip(before, after, strict=True):
            assert a.applied.wire() == b.applied.wire()
            assert (a.version, a.tokens.wire()) == (b.version, b.tokens.wire())


def test_a_closure_that_any_server_has_applied_is_not_applied_again(tmp_path):
    (a, b), _ = stores(2, parts=2)
    a.push(5, 5, [])
    b.push(7, 6, [])
    take(a, tmp_path)
    take(b, tmp_path)
    new = Store(0)
    finish(restoring(new, tmp_path, 1, "job", plan(1, 1), UNITS))
    assert [n in new.applied for n in (5, 6, 7, 8)] == [True, False, True, False]


def test_the_files_can_be_mapped(tmp_path):
    (store,), _ = stores(1, parts=2)
    take(store, tmp_path)
    content = json.loads((tmp_path / "1-ps0.json").read_text())["content"]
    for piece in content["pieces"]:
        if piece["vid"] == 0:
            mapped = np.memmap(
                tmp_path / "1-ps0.data", piece["dtype"], "r", piece["offset"], tuple(piece["shape"])
            )
            np.testing.assert_array_equal(mapped, store.blocks[0, piece["shard"]].array)


def test_old_ones_stay_until_the_new_one_is_complete_on_all_servers(tmp_path):
    (a, b), _ = stores(2)
    for number in (1, 2):
        take(a, tmp_path, number, keep_from=1)
        take(b, tmp_path, number, keep_from=1)
    assert snapshot.numbers(tmp_path, 0) == snapshot.numbers(tmp_path) == [1, 2]
    # A third that comes to nothing on one of them:
    take(a, tmp_path, 3, keep_from=2)
    steps = snapshot.taking(b, tmp_path, 3, "job", 2)
    for _ in range(6):
        next(steps)
    steps.close()
    assert b.before_write is None
    assert (tmp_path / "3-ps1.data").exists()
    assert snapshot.numbers(tmp_path, 1) == [2]
    take(a, tmp_path, 4, keep_from=9)  # never itself
    assert snapshot.numbers(tmp_path, 0) == [4]
    assert sorted(os.listdir(tmp_path)) == ["4-ps0.data", "4-ps0.json"]


def damage_cut(data, manifest):
    data.write_bytes(data.read_bytes()[:-3])


def damage_flip(data, manifest):
    raw = bytearray(data.read_bytes())
    raw[100] ^= 1
    data.write_bytes(raw)


def damage_remove(data, manifest):
    data.unlink()


def damage_manifest(data, manifest):
    manifest.write_text(manifest.read_text().replace('"version": 0', '"version": 9'))


def damage_torn(data, manifest):
    manifest.write_text(manifest.read_text()[:50])


def damage_format(data, manifest):
    content = json.loads(manifest.read_text())["content"]
    manifest.write_text(snapshot.sealed({**content, "format": 77}))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (damage_cut, "1-ps0.data: expected rows"),
        (damage_flip, "1-ps0.data: expected rows .* as they were written. Got other bytes"),
        (damage_remove, "1-ps0.data: expected to read it. Got FileNotFoundError"),
        (damage_manifest, "1-ps0.json: expected what was written.*checksum"),
        (damage_torn, "1-ps0.json: expected what was written"),
        (damage_format, "format 77, this version reads 1"),
    ],
)
def test_damage_is_found(tmp_path, damage, match):
    (store,), specs = stores(1, parts=1)
    take(store, tmp_path)
    damage(tmp_path / "1-ps0.data", tmp_path / "1-ps0.json")
    new = Store(0)
    with pytest.raises(CorruptBackupError, match=rf"(?s){match}.*Put the file back from a copy"):
        finish(restoring(new, tmp_path, 1, "job", specs, UNITS))
    assert not new.specs


def test_what_cannot_be_restored(tmp_path):
    made, specs = stores(2)
    for store in made:
        take(store, tmp_path)
    for name, job, variables, error, match in (
        (2, "job", specs, BackupError, r"Expected snapshot 2 in .*there are \[1\]"),
        (1, "other", specs, BackupMismatchError, "expected a snapshot of the job 'other'"),
        (1, "job", [Placement(1).place(0, "w", (ROWS, 4), "float32")], BackupMismatchError,
         r"variable 0: expected 'w', float32\[60, 4\]. Got 'w', float32\[60, 3\]"),
        (1, "job", [Placement(1).place(0, "v", (ROWS, WIDTH), "float32")], BackupMismatchError,
         "expected 'v'"),
        (1, "job", [Placement(1).place(9, "w", (ROWS, WIDTH), "float32")], BackupError,
         "expected rows up to 60"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            finish(restoring(Store(0), tmp_path, name, job, variables, []))
    (tmp_path / "1-ps1.json").unlink()
    with pytest.raises(BackupError, match=r"Got none from .* in the files of servers \[0\]"):
        finish(restoring(Store(0), tmp_path, 1, "job", plan(1, 1), UNITS))


def test_one_at_a_time_and_where_nothing_can_be_written(tmp_path):
    (store,), _ = stores(1)
    first = snapshot.taking(store, tmp_path, 1, "job", 0)
    next(first)
    with pytest.raises(BackupError, match="expected one snapshot at a time"):
        finish(snapshot.taking(store, tmp_path, 2, "job", 0))
    finish(first)
    (tmp_path / "file").write_text("")
    with pytest.raises(BackupError, match="ps 0: expected to write snapshot 3 to .*file"):
        take(store, tmp_path / "file", 3)
    assert store.before_write is None
    assert take(store, tmp_path, 4).number == 4
