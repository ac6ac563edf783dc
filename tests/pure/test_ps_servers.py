"""Several servers as one, over the in-process network with its faults, and hostile requests."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import (
    BackupError,
    JobMismatchError,
    MalformedMessageError,
    NotReadyError,
    PeerTimeoutError,
    RemoteError,
)
from stratagem.parameter_server import initial, taking
from stratagem.parameter_server.bags import Bagged, Bags
from stratagem.parameter_server.client import Item, Servers
from stratagem.parameter_server.gathered import Gathered
from stratagem.parameter_server.holder import SILENT_SECONDS
from stratagem.parameter_server.jobs import WAITING, Jobs
from stratagem.parameter_server.partitioners import FixedShardsPartitioner
from stratagem.parameter_server.plan import Placement, Unit
from stratagem.parameter_server.server import ParameterServer
from stratagem.transport.local import LocalNetwork
from stratagem.transport.message import Message

SGD = {
    "kind": "rows", "members": 1, "handed": ["rows", "scalar"],
    "steps": [["mul", [1, 2], None], ["sub", [0, 3], None]], "outputs": [4],
}  # fmt: skip
RATE = np.array(0.5, np.float32)


class Cluster:
    """Servers and clients on a network of their own."""

    def __init__(self, count, directory=None, **options):
        self.network = LocalNetwork()
        self.count, self.directory, self.options = count, directory, options
        self.servers = [self.serve(i) for i in range(count)]
        self.hub = self.network.hub("chief")

    def serve(self, i):
        hub = self.network.hub(f"ps {i}")
        server = ParameterServer(hub, i, self.directory, eager=True, **self.options)
        hub.listen(f"ps{i}:1", server.serve)
        return server

    def client(self, name="chief", job="job", seconds=60.0, hub=None):
        hub = hub or self.hub
        peers = [hub.connect(f"ps{i}:1", f"ps {i}") for i in range(self.count)]
        return Servers(hub, peers, job, name, seconds)


def model(servers, count, parts=5):
    """A table, a small variable and a scalar on all servers, with units."""
    placement = Placement(count, FixedShardsPartitioner(parts))
    table = placement.place(0, "table", (50, 3), "float32")
    dense = placement.place(1, "dense", (4, 2), "float32")
    scalar = placement.place(2, "scalar", (), "float32")
    value = np.arange(8, dtype=np.float32).reshape(4, 2)
    starts = {0: initial.uniform(-1, 1, 5), 1: value, 2: np.float32(3)}
    servers.create([table, dense, scalar], starts)
    units = [Unit("table", (0,), SGD), Unit("dense", (1,), SGD), Unit("scalar", (2,), SGD)]
    servers.install(units)
    return (table, dense, scalar), units


def item(unit, rows, value):
    return Item(unit, rows, [("rows", np.asarray(value, np.float32)), ("scalar", RATE)])


@settings(max_examples=25)
@given(
    count=st.integers(1, 4), parts=st.integers(1, 60), rows=st.sets(st.integers(0, 49)),
)  # fmt: skip
def test_pulls_and_pushes_do_not_depend_on_how_variables_are_cut(count, parts, rows):
    servers = Cluster(count).client()
    servers.hello(start=True)
    (table, dense, scalar), units = model(servers, count, parts)
    ids = np.array(sorted(rows), np.int64)
    start = servers.read(table)
    np.testing.assert_array_equal(start, servers.pull([table]).whole[0])
    longer = len(ids) + 3
    roomy = servers.pull([], [(table, ids), (table, ids[:1])], [min(longer, 50), len(ids[:1])])
    assert [len(rows) for rows in roomy.rows] == [min(longer, 50), len(ids[:1])]
    np.testing.assert_array_equal(roomy.rows[0][: len(ids)], start[ids])
    assert not roomy.rows[0][len(ids) :].any()
    pulled = servers.pull([scalar, dense], [(table, ids), (table, ids[:1])])
    np.testing.assert_array_equal(pulled.rows[0], start[ids])
    np.testing.assert_array_equal(pulled.rows[1], start[ids[:1]])
    assert pulled.whole[0] == 3
    assert pulled.whole[1].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    gradient = np.random.default_rng(1).normal(size=(len(ids), 3)).astype(np.float32)
    items = [
        item(units[0], ids, gradient),
        item(units[1], None, np.ones((4, 2))),
        item(units[2], None, 4),
    ]
    pushed = servers.push(1, 0, items, pulled.versions)
    assert pushed.applied
    assert set(pushed.staleness) == {0}
    assert not servers.push(1, 0, items, pulled.versions).applied
    expected = start.copy()
    expected[ids] -= RATE * gradient
    np.testing.assert_array_equal(servers.read(table), expected)
    np.testing.assert_array_equal(servers.read(table, 7, 31), expected[7:31])
    assert servers.read(dense)[0].tolist() == [-0.5, 0.5]
    assert servers.read(scalar) == 1


@settings(max_examples=25)
@given(
    count=st.integers(1, 4), parts=st.integers(1, 60), rows=st.sets(st.integers(0, 49), min_size=1),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_sums_of_bags_do_not_depend_on_how_variables_are_cut(count, parts, rows, seed):
    servers = Cluster(count).client()
    servers.hello(start=True)
    (table, _, scalar), units = model(servers, count, parts)
    ids = np.array(sorted(rows), np.int64)
    random = np.random.default_rng(seed)
    places = random.integers(0, len(ids), (4, 3)).astype(np.int32)
    bags = Bags.of([(places, 4)])
    start = servers.read(table)
    pulled = servers.pull([scalar], [(table, ids), (table, ids)], None, [bags, None])
    np.testing.assert_allclose(pulled.rows[0], start[ids[places]].sum(1), atol=1e-6)
    np.testing.assert_array_equal(pulled.rows[1], start[ids])
    assert pulled.whole[0] == 3
    gradients = random.normal(size=(4, 3)).astype(np.float32)
    change = Item(units[0], ids, [("bags", Bagged(bags, gradients)), ("scalar", RATE)])
    assert servers.push(1, 0, [change], pulled.versions).applied
    assert not servers.push(1, 0, [change], pulled.versions).applied
    expected = start.copy()
    expected[ids] -= RATE * Bagged(bags, gradients).by_row(len(ids))
    np.testing.assert_array_equal(servers.read(table), expected)


def test_bags_of_no_rows_are_zero():
    servers = Cluster(2).client()
    servers.hello(start=True)
    (table, _, _), _ = model(servers, 2)
    bags = Bags.of([(np.zeros((3, 0), np.int32), 3)])
    (found,) = servers.pull([], [(table, np.zeros(0, np.int64))], None, [bags]).rows
    assert found.tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("seed", range(5))
def test_lost_and_repeated_messages_change_nothing(seed):
    random = Random(seed)
    cluster = Cluster(2)
    servers = cluster.client()
    servers.hello(start=True)
    (table, *_), units = model(servers, 2)
    start = servers.read(table)
    for pair in (("chief", "ps 0"), ("ps 0", "chief"), ("chief", "ps 1"), ("ps 1", "chief")):
        cluster.network.faults(*pair).chosen = lambda: random.random() < 0.2
        cluster.network.duplicate(*pair, count=random.randrange(5))
    for closure in range(10):
        servers.push(closure, closure, [item(units[0], np.arange(50), np.ones((50, 3)))])
        servers.assign(table, "add", np.full((2, 3), 0.5), np.array([7, 49]))
    expected = start - 5
    expected[[7, 49]] += 5
    np.testing.assert_allclose(servers.read(table), expected, rtol=1e-5)


def test_a_worker_that_is_thought_dead_pushes_late():
    """Its closure ran again elsewhere: both push under one number, and one counts."""
    cluster = Cluster(1)
    servers = cluster.client()
    servers.hello(start=True)
    (table, *_), units = model(servers, 1)
    hub = cluster.network.hub("worker 0")
    zombie = cluster.client("worker 0", hub=hub)
    zombie.know([table])
    start = servers.read(table)
    cluster.network.cut("worker 0", "ps 0")
    everything = [item(units[0], None, np.ones((50, 3)))]
    waiting = zombie.post_push(3, 3, everything)
    assert servers.push(3, 3, everything).applied
    cluster.network.mend("worker 0", "ps 0")
    assert not waiting.done
    assert not waiting.result().applied
    np.testing.assert_array_equal(servers.read(table), start - 0.5)


def test_rounds_over_all_servers():
    cluster = Cluster(3)
    servers = cluster.client()
    servers.hello(start=True)
    (table, *_), units = model(servers, 3)
    start = servers.read(table)
    for closure, row in ((1, 0), (2, 49)):
        servers.push(closure, 0, [item(units[0], np.array([row]), np.ones((1, 3)))], round=0)
    assert servers.commit(0, [1, 2, 3]).missing == [3]
    assert servers.commit(0, [1]) == servers.commit(0, [1]).__class__(True, [], 1)
    start[0] -= 0.5
    np.testing.assert_array_equal(servers.read(table), start)
    assert servers.push(4, 0, [item(units[0], np.array([1]), np.ones((1, 3)))], round=0).late


def test_squares_of_a_round_and_numbers_for_it():
    """What clipping by a norm needs: sums over all servers, and the same number on all of them."""
    cluster = Cluster(3)
    servers = cluster.client()
    servers.hello(start=True)
    (table, *_), units = model(servers, 3)
    start = servers.read(table)
    mean = np.zeros_like(start)
    for closure, row in ((1, 0), (2, 49)):
        gradient = np.full((1, 3), closure + 1.0, np.float32)
        servers.push(closure, 0, [item(units[0], np.array([row]), gradient)], round=0)
        mean[row] = gradient / 2
    uid = units[0].uid

    def ask(method, arrays=(), **fields):
        fields = {"round": 0, "closures": [1, 2], "weights": [1.0, 1.0], "mean": True, **fields}
        return servers.wait([servers.post(s, method, fields, arrays) for s in range(3)])

    answers = ask("squares", places=[[uid, 0], ["other", 0]])
    assert [a.fields for a in answers] == [{"missing": []}] * 3
    totals = np.sum([a.arrays[0] for a in answers], axis=0)
    np.testing.assert_allclose(totals, [np.square(mean).sum(), 0.0])
    assert all(
        a.fields["missing"] == [7] for a in ask("squares", closures=[7], weights=None, places=[])
    )
    with pytest.raises(ValueError, match="expected units and numbers from 0 on as 'places'"):
        ask("squares", places=[[uid, -1]])
    with pytest.raises(ValueError, match="expected a number for each as 'places'"):
        ask("commit", [np.ones(2, np.float32)], places=[[uid, 1]])
    with pytest.raises(ValueError, match="expected the place of one of 0 arrays as 'places'"):
        ask("commit", places=[[uid, 1]])
    np.testing.assert_array_equal(servers.read(table), start)
    # The second value that its update is handed is the rate.
    assert all(a.fields["applied"] for a in ask("commit", [np.float32(2.0)], places=[[uid, 1]]))
    np.testing.assert_allclose(servers.read(table), start - 2 * mean, rtol=1e-6)


def test_what_a_server_without_state_says():
    cluster = Cluster(2)
    servers = cluster.client()
    assert [(h["job"], h["ready"], h["server"]) for h in servers.hello()] == [
        ("", False, 0), ("", False, 1),
    ]  # fmt: skip
    placement = Placement(2)
    with pytest.raises(NotReadyError, match="ps 0: expected the state of job 'job'. Got none"):
        servers.create([placement.place(0, "w", (3,), "float32")], {0: initial.constant(0)})
    servers.hello(start=True)
    model(servers, 2)
    assert servers.hello(start=True)[0]["ready"]  # again: nothing is lost
    assert servers.status()[0]["variables"] == 2
    other = cluster.client(job="other", hub=cluster.network.hub("other"))
    with pytest.raises(JobMismatchError, match="ps 0.*: expected requests of the job"):
        other.pull([servers.specs[0]])
    with pytest.raises(JobMismatchError, match="ps 0.*: expected requests of the job"):
        other.stop()
    assert not cluster.servers[0].stopped
    taking.leave(servers)
    cluster.hub.turn(1.0)
    other.hello(start=True)
    assert other.status()[0]["variables"] == 0
    cluster.network.kill(cluster.servers[0].hub)
    cluster.servers[0] = cluster.serve(0)
    assert [h["ready"] for h in other.hello()] == [False, True]


def test_a_server_belongs_to_one_job_at_a_time(tmp_path):
    """Until its coordinator leaves, or is not heard; the job's own may come again at any time."""
    cluster = Cluster(2, tmp_path)
    servers = cluster.client()
    servers.hello(start=True)
    model(servers, 2)
    other = cluster.client(job="other", hub=cluster.network.hub("other"))
    taken = (
        r"ps 0.*: expected to be taken by one job at a time. Got job 'other', while job 'job' has "
        r"it, whose coordinator \(process \d+ on .*\) was heard 0.0 s ago. End that program"
    )
    for take in (lambda: other.hello(start=True), other.hello, lambda: other.restore(1, [], [])):
        with pytest.raises(JobMismatchError, match=taken):
            take()
    again = cluster.client(hub=cluster.network.hub("again"))
    assert [h["ready"] for h in again.hello()] == [True, True]
    cluster.network.kill(again.hub)
    end = other.hub.now() + SILENT_SECONDS
    while other.hub.now() < end:
        with pytest.raises(JobMismatchError, match="one job at a time"):
            other.hello()
        other.hub.turn(1.0)
    other.hello(start=True)
    assert other.status()[0]["variables"] == 0


def test_long_work_ends_where_the_state_that_it_writes_is_replaced():
    server = ParameterServer(LocalNetwork().hub("ps 0"), 0)
    server.jobs = Jobs()  # not eager: each step on its own
    ends = []
    for _ in range(2):  # a restore, and a second one before the first is done
        server._begin("job")
        server.jobs.start(server._while_here(iter_twice()), ends.append)
    server.jobs.run(10.0)
    assert isinstance(ends[0], NotReadyError)
    assert "a later request restores it" in str(ends[0])
    assert ends[1:] == ["done"]


def iter_twice():
    yield
    yield
    return "done"


def test_a_server_that_is_silent_is_named():
    cluster = Cluster(2)
    servers = cluster.client(seconds=5)
    servers.hello(start=True)
    (table, *_), _ = model(servers, 2)
    cluster.network.cut("chief", "ps 1")
    with pytest.raises(PeerTimeoutError, match="ps 1"):
        servers.pull([table])


def test_servers_stop_and_bytes_are_counted():
    cluster = Cluster(1)
    servers = cluster.client()
    servers.hello(start=True)
    (table, *_), _ = model(servers, 1)
    servers.sent.clear()
    servers.received.clear()
    servers.pull([], [(table, np.array([1, 2]))])
    assert (servers.sent["pull"], servers.received["pull"]) == (16, 24)
    servers.delete([0])
    with pytest.raises(ValueError, match="ps 0 at ps0:1, pull: Expected a shard that is on ps 0"):
        servers.pull([table])
    servers.stop()
    cluster.servers[0].run()  # returns


def test_a_limit_of_memory_reaches_the_client():
    servers = Cluster(1, memory_limit=100).client()
    servers.hello(start=True)
    with pytest.raises(MemoryError, match="expected at most 100 bytes"):
        model(servers, 1)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda s, t, u: s.pull([], [(t, np.array([50]))]), "expected row numbers from 0 to 49"),
        (lambda s, t, u: s.pull([], [(t, np.array([1], np.int32))]), r"row numbers int64\[n\]"),
        (lambda s, t, u: s.pull([], [(t, np.array([3, 2, 9]))]), "sorted, none twice"),
        (lambda s, t, u: s.read(t, 3, 51), "expected a range of its 50 rows"),
        (lambda s, t, u: s.assign(t, "set", np.ones(3)), "expected values of shape"),
        (lambda s, t, u: s.assign(t, "set", np.ones((2, 3)), (49, 51)), "a range of its 50 rows"),
        (lambda s, t, u: s.assign(t, "set", np.ones((1, 3)), np.array([50])), "row numbers from"),
        (lambda s, t, u: s.push(1, 0, [item(u, None, np.ones((3, 3)))]), "values of 50 rows"),
        (lambda s, t, u: s.create([t], {0: np.ones(3)}), "expected a value of shape"),
    ],
)
def test_what_the_client_refuses(call, match):
    servers = Cluster(1).client()
    servers.hello(start=True)
    (table, *_), units = model(servers, 1)
    with pytest.raises(ValueError, match=match):
        call(servers, table, units[0])


def test_requests_are_served_while_a_snapshot_is_written(tmp_path, request):
    network = LocalNetwork()
    hub, chief = network.hub("ps 0"), network.hub("chief")
    server = ParameterServer(hub, 0, tmp_path)
    request.addfinalizer(server.close)
    hub.listen("ps0:1", server.serve)
    servers = Servers(chief, [chief.connect("ps0:1", "ps 0")], "job", "chief")
    servers.hello(start=True)

    def finish(ticket):
        while not ticket.done:
            network.run(0.01)
            server.turn(0.0)
            time.sleep(0.0005)  # the thread that writes lives in another time than the network
        return ticket.result()

    spec = Placement(1).place(0, "table", (100_000, 64), "float32")
    start = {"specs": [spec.wire()], "starts": [[0, initial.uniform(0, 1, 2)]], "job": "job"}
    finish(servers.peers[0].post("create", start, seconds=1e6))
    fields = {"number": 1, "keep_from": 0, "job": "job"}
    ticket = servers.peers[0].post("snapshot", fields, seconds=1e6)
    network.run(0.01)
    server.turn(0.0)
    before = servers.read(spec, 0, 1)
    servers.assign(spec, "add", np.ones((100_000, 64)))
    assert not ticket.done
    with pytest.raises(BackupError, match="one snapshot at a time. Got number 2 while 1 is"):
        servers.snapshot(2, 0)
    with pytest.raises(BackupError, match="Expected no snapshot to be written during a restore"):
        servers.restore(1, [spec], [])
    servers.job = "next"
    with pytest.raises(BackupError, match="Expected no job to start while a snapshot is written"):
        servers.hello(start=True)
    servers.job = "job"
    assert finish(ticket).fields["bytes"] == spec.nbytes
    fields = {"number": 1, "specs": [spec.wire()], "units": [], "job": "job"}
    ticket = servers.peers[0].post("restore", fields, seconds=1e6)
    network.run(0.01)
    with pytest.raises(NotReadyError):
        servers.read(spec)
    finish(ticket)
    np.testing.assert_array_equal(servers.read(spec, 0, 1), before)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 60) | st.sampled_from(["table", "rows", "set", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["vid", "kind", "value"]), inner, max_size=3
    ),
    max_leaves=6,
)  # fmt: skip
_GOOD = {
    "pull": {"whole": [[1, 0]], "rows": [[0, 0, 0, 2, False]]},
    "read": {"vid": 0, "shard": 0, "start": 0, "stop": 3},
    "push": {"each": [{
        "closure": 5, "below": 1, "pulled": 0, "round": None, "staged": None, "weight": 1.0,
        "items": [["table", 0, 0, [["rows", 1], ["scalar", 2]]]], "arrays": 3,
    }]},
    "commit": {"round": 0, "closures": [], "weights": None, "mean": True, "totals": [["t", 0]]},
    "squares": {"round": 0, "closures": [], "weights": None, "mean": True, "places": [["t", 0]]},
    "assign": {"vid": 2, "shard": 0, "op": "set", "rows": None, "token": ["c", 0, 0]},
    "create": {"specs": [], "starts": [[7, {"kind": "value", "places": [[0, 1]]}]]},
    "install": {"units": []},
    "delete": {"vids": [99]},
    "mirror": {"of": 1, "session": ["a", 1], "number": 0, "what": "begin", "fields": {}},
    "mirror_rows": {"of": 1, "vid": 0, "shard": 0, "start": 0, "stop": 1},
    "snapshot": {"number": 1, "keep_from": 0},
    "restore": {"number": 1, "specs": [], "units": []},
    "recover": {},
}  # fmt: skip


@settings(max_examples=150)
@given(data=st.data())
def test_requests_with_wrong_fields_are_refused_and_change_nothing(data):
    servers, state = _hostile()
    method = data.draw(st.sampled_from(sorted(_GOOD)))
    fields = dict(_GOOD[method])
    one = fields
    if method == "push" and data.draw(st.booleans()):
        one = dict(fields["each"][0])
        fields["each"] = [one]
    name = data.draw(st.sampled_from([*sorted(one), "job"]))
    one[name] = data.draw(_PLAIN)
    arrays = (np.array([1, 3]), np.ones((2, 3), np.float32), RATE)
    before = state()
    peer = servers.peers[0]
    message = {"job": "job", **fields}
    refused = None
    try:
        answer = servers.hub.call(peer, method, message, arrays, seconds=5)
        refused = next((e["type"] for e in answer.fields.get("each", ()) if "type" in e), None)
    except RemoteError as error:
        refused = error.type_name
    if refused is not None:
        assert refused in ("ValueError", "JobMismatchError", "BackupError", "MemoryError")
        assert state() == before


_ARRAYS = st.builds(
    lambda values, dtype, column: np.asarray(values, dtype).reshape((-1, 1) if column else -1),
    st.lists(st.integers(-1, 4), max_size=5),
    st.sampled_from(["int32", "int64", "float32", "bool"]),
    st.sampled_from([False, False, False, True]),
)


@settings(max_examples=150)
@given(
    places=_ARRAYS, bounds=_ARRAYS, count=st.integers(0, 4), width=st.sampled_from([0, 3, 3, 4]),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
)  # fmt: skip
def test_bags_that_are_none_are_refused_and_change_nothing(places, bounds, count, width, dtype):
    servers, state = _hostile()
    ids, gradients = np.array([1, 3]), np.ones((count, width), dtype)
    good = places.dtype == bounds.dtype == np.int32 and places.ndim == bounds.ndim == 1
    good = good and len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(places)
    good = good and (np.diff(bounds) >= 0).all() and all(p in (0, 1) for p in places)
    fields = {"job": "job", "whole": [], "rows": [[0, 0, 0, 2, True]]}
    peer = servers.peers[0]
    if good:
        answer = servers.hub.call(peer, "pull", fields, (ids, places, bounds), seconds=5)
        assert answer.arrays[0].shape == (len(bounds) - 1, 3)
    else:
        with pytest.raises(RemoteError, match="ValueError"):
            servers.hub.call(peer, "pull", fields, (ids, places, bounds), seconds=5)
    before = state()
    push = {
        **_GOOD["push"]["each"][0], "closure": _hostile_numbers.pop(), "arrays": 5,
        "items": [["table", 0, 0, [["bags", 1], ["scalar", 4]]]],
    }  # fmt: skip
    arrays = (ids, gradients, places, bounds, RATE)
    answer = servers.hub.call(peer, "push", {"job": "job", "each": [push]}, arrays, seconds=5)
    (told,) = answer.fields["each"]
    fits = good and gradients.shape == (len(bounds) - 1, 3) and dtype == "float32"
    assert told.get("type") == (None if fits else "ValueError")
    assert fits or state() == before


_hostile_numbers = list(range(10_000, 1_000, -1))
_made: list = []


def _hostile():
    """Servers for many requests, and what tells whether their state changed."""
    if not _made:
        cluster = Cluster(1)
        servers = cluster.client()
        servers.hello(start=True)
        model(servers, 1, parts=1)
        _made.append((cluster, servers))
    cluster, servers = _made[0]
    store = cluster.servers[0].store

    def state():
        values = {key: block.array.tobytes() for key, block in store.blocks.items()}
        return values, store.version, store.applied.wire(), store.tokens.wire(), sorted(store.specs)

    return servers, state


def test_small_pushes_leave_together_and_are_answered_each():
    servers = Cluster(2).client()
    servers.hello(start=True)
    (_, dense, _), (_, unit, _) = model(servers, 2)
    there = servers.peers[dense.shards[0].server]
    before, opened = servers.read(dense), there.open
    wrong = [Item(unit, None, [("rows", np.ones((4, 2), np.float32))])]
    with servers.gathered.together():
        good = [servers.post_push(i, 0, [item(unit, None, np.ones((4, 2)))]) for i in (0, 1)]
        bad = servers.post_push(2, 0, wrong)
        good.append(servers.post_push(3, 0, [item(unit, None, np.ones((4, 2)))]))
        assert there.open == opened
        with pytest.raises(RuntimeError, match="Got one that has not been sent"):
            bad.tickets[0].result()
        (now,) = servers.pull([dense]).whole
        good.append(servers.post_push(4, 0, [item(unit, None, np.ones((4, 2)))]))
    np.testing.assert_array_equal(now, before - 1.5)
    with pytest.raises(ValueError, match="ps .*, push: unit dense: expected"):
        bad.result()
    assert [post.result().applied for post in good] == [True] * 4
    np.testing.assert_array_equal(servers.read(dense), before - 2)


def test_a_large_push_leaves_by_itself_in_its_turn():
    servers = Cluster(1).client()
    servers.hello(start=True)
    large = Placement(1).place(9, "large", (4096,), "float32")
    servers.create([large], {9: np.zeros(4096, np.float32)})
    unit = Unit("large", (9,), SGD)
    servers.install([unit])
    with servers.gathered.together():
        first = servers.post_push(0, 0, [item(unit, None, np.ones(4096))])
        assert servers.peers[0].open == 1
    assert first.result().applied


def test_pushes_that_could_not_be_sent_and_answers_that_are_none():
    def send(server, fields, arrays):
        raise PeerTimeoutError("no room")

    gathered = Gathered(send)
    part = gathered.add(0, {}, ())
    assert part.done
    with pytest.raises(PeerTimeoutError, match="no room"):
        part.result()

    network = LocalNetwork()
    network.hub("old").listen("old:1", lambda request: Message("", {"applied": True}, ()))
    hub = network.hub("chief")
    peer = hub.connect("old:1", "ps 0")
    gathered = Gathered(lambda server, fields, arrays: peer.post("push", fields, arrays, seconds=5))
    with pytest.raises(MalformedMessageError, match="Expected an answer of ps 0.* to each push"):
        hub.wait([gathered.add(0, {}, ())])


def test_a_method_that_is_none():
    servers = Cluster(1).client()
    with pytest.raises(RemoteError, match="Expected a method of a parameter server. Got 'reset'"):
        servers.hub.call(servers.peers[0], "reset", {}, seconds=5)


def test_jobs_take_turns_wait_and_end():
    now, said = [0.0], []

    def work(name, steps):
        for _ in range(steps):
            now[0] += 1.0
            said.append(name)
            yield None
        yield WAITING
        said.append(f"{name} goes on")
        return name

    def failing():
        yield None
        raise OSError("no")

    jobs = Jobs(clock=lambda: now[0])
    results = []
    jobs.start(work("a", 3), results.append)
    jobs.start(work("b", 2), results.append)
    jobs.start(failing(), results.append)
    jobs.run(2.0)
    assert said == ["a", "b"]
    jobs.run(10.0)
    assert said == ["a", "b", "a", "b", "a"]
    assert [type(r) for r in results] == [OSError]
    assert jobs
    assert not jobs.ready
    jobs.poke()
    jobs.run(1.0)
    assert results[1:] == ["a", "b"]
    assert not jobs
    jobs.start(work("c", 9), results.append)
    jobs.close()
    assert not jobs
