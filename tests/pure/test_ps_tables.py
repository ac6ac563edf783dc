"""Dynamic tables in stores: pushes make rows, snapshots move buckets, replicas have the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from stratagem.errors import BackupError, CorruptBackupError
from stratagem.parameter_server import carry, initial, snapshot, table_calls
from stratagem.parameter_server.client import Item, Servers
from stratagem.parameter_server.plan import Placement, Unit
from stratagem.parameter_server.policy import Policy
from stratagem.parameter_server.server import ParameterServer
from stratagem.parameter_server.tables import in_order
from stratagem.transport.local import LocalNetwork

NOMINAL = (1 << 31) - 1
# New weight: old - gradient; new slot: old + 1.
STEP = {
    "kind": "rows", "members": 2, "handed": ["rows"],
    "steps": [["sub", [0, 2], None], ["add", [1, ["float32", 1.0]], None]],
    "outputs": [3, 4],
}  # fmt: skip


class Job:
    """Some servers on a network of this thread, with a table and a slot beside it."""

    def __init__(self, servers, directory=None, replicate=False, start=True, **policy):
        self.network = LocalNetwork()
        self.servers = []
        for i in range(servers):
            hub = self.network.hub(f"ps {i}")
            self.servers.append(ParameterServer(hub, i, directory, eager=True))
            hub.listen(f"ps{i}:1", self.servers[-1].serve)
        if replicate:
            for i, server in enumerate(self.servers):
                peer = server.hub.connect(f"ps{1 - i}:1", f"ps {1 - i}")
                server.replicate_to(peer, seconds=5.0)
        hub = self.network.hub("chief")
        peers = [hub.connect(f"ps{i}:1", f"ps {i}") for i in range(servers)]
        self.client = Servers(hub, peers, "job", "chief")
        self.count = servers
        placement = Placement(servers)
        about = {"start": initial.uniform(-1, 1, 5), "policy": vars(Policy(**policy))}
        self.table = placement.spread(0, "table", (NOMINAL, 3), "float32", about)
        slot = {"start": initial.constant(0.5), "policy": None}
        self.slot = placement.spread(1, "slot", (NOMINAL, 3), "float32", slot, self.table)
        self.specs, self.unit = [self.table, self.slot], Unit("unit", (0, 1), STEP)
        self.client.hello(start=start)
        if start:
            starts = {0: about["start"], 1: slot["start"]}
            self.client.create(self.specs, starts)
            self.client.install([self.unit])
        self.closure = 0

    def settle(self):
        for _ in range(20):
            self.network.run(0.1)
            for server in self.servers:
                server.turn(0.0)

    def push(self, ids, closure=None):
        self.closure += closure is None
        number = self.closure if closure is None else closure
        ids = in_order(np.array(ids, np.int64), self.count)
        gradient = np.ones((len(ids), 3), np.float32)
        return self.client.push(number, 0, [Item(self.unit, ids, [("rows", gradient)])])

    def items(self, spec=None):
        ids, rows = table_calls.items(self.client, spec or self.table)
        order = np.argsort(ids)
        return ids[order].tolist(), rows[order]

    def rows(self, ids):
        ordered = in_order(np.array(ids, np.int64), self.count)
        return self.client.pull(rows=[(self.table, ordered)]).rows[0][np.argsort(ordered)]


IDS = [-(1 << 63), -5, 0, 7, 12345, 1 << 40, (1 << 63) - 1]


def test_pulls_make_no_rows_and_pushes_do():
    job = Job(2)
    before = job.rows(IDS)
    assert job.items()[0] == []
    assert len(np.unique(before)) == before.size
    assert job.push(IDS).applied
    ids, rows = job.items()
    assert ids == IDS
    np.testing.assert_allclose(rows, before - 1, rtol=1e-6)
    np.testing.assert_array_equal(job.items(job.slot)[1], np.full((7, 3), 1.5, np.float32))
    assert not job.push(IDS, closure=1).applied  # again: it counts once
    np.testing.assert_array_equal(job.items()[1], rows)


def test_rows_are_set_by_id():
    job = Job(2)
    values = np.arange(21, dtype=np.float32).reshape(7, 3)
    table_calls.put(job.client, job.table, np.array(IDS), values)
    np.testing.assert_array_equal(job.rows(IDS), values)
    np.testing.assert_array_equal(job.items(job.slot)[1], np.full((7, 3), 0.5, np.float32))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_snapshot_on_any_number_of_servers(tmp_path, servers):
    job = Job(2, tmp_path, admit_after=2)
    many = [*IDS, *range(100, 300)]
    job.push(many)
    job.push(many[:150])
    job.client.snapshot(1, 0)
    other = Job(servers, tmp_path, start=False)
    other.client.restore(1, other.specs, [other.unit])
    assert job.items()[0] == other.items()[0]
    for mine, theirs in zip(job.specs, other.specs, strict=True):
        np.testing.assert_array_equal(job.items(mine)[1], other.items(theirs)[1])
    other.closure = 10
    other.push(many[150:])  # they had been seen once
    assert other.items()[0] == sorted(many)


def test_a_snapshot_is_the_table_when_it_began(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 24 * 7)
    job = Job(1, tmp_path, max_rows=40, when_full="evict")
    job.push(range(40))
    before = [job.items(spec) for spec in job.specs]
    ids = itertools.count(5, 5)
    for wait in snapshot.taking(job.servers[0].store, tmp_path, 1, "job", 0):
        if wait is not None:
            wait.result()
        first = next(ids)
        job.push(range(first, first + 9))  # later ones take the place of others
    assert job.items()[0] != before[0][0]
    other = Job(1, tmp_path, start=False)
    other.client.restore(1, other.specs, [other.unit])
    for (ids, rows), spec in zip(before, other.specs, strict=True):
        found = other.items(spec)
        assert found[0] == ids
        np.testing.assert_array_equal(found[1], rows)
    job.client.snapshot(2, 0)  # the first one has let go of the table


def test_a_damaged_snapshot(tmp_path):
    job = Job(2, tmp_path)
    job.push(range(50))
    job.client.snapshot(1, 0)
    path = tmp_path / "1-ps0.data"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    other = Job(2, tmp_path, start=False)
    with pytest.raises(CorruptBackupError, match="expected rows of a dynamic table"):
        other.client.restore(1, other.specs, [other.unit])
    (tmp_path / "1-ps1.json").unlink()
    third = Job(3, tmp_path, start=False)
    with pytest.raises(BackupError, match="Put the files of all servers there"):
        third.client.restore(1, third.specs, [third.unit])


def test_a_replica_has_the_same():
    job = Job(2, replicate=True, max_rows=40, when_full="evict", expire_after=8)
    job.settle()
    for i in range(10):
        job.push(range(10 * i, 10 * i + 15))
    job.settle()
    for i, server in enumerate(job.servers):
        fields, arrays = carry.pack_state(server.store)
        others, more = carry.pack_state(job.servers[1 - i].mirrors.store(i))
        assert fields == others
        assert len(arrays) == len(more) > 5
        assert all(map(np.array_equal, arrays, more))


def test_what_a_server_refuses():
    job = Job(1)
    with pytest.raises(ValueError, match="expected ids of rows to update"):
        job.servers[0].store.tables.admit(0, None, 1)
    item = Item(job.unit, None, [("rows", np.ones((NOMINAL, 0), np.float32))])
    with pytest.raises(ValueError, match=r"expected values of shape \(0, 3\)"):
        job.client.push(1, 0, [item])
    other = Placement(1).place(9, "x", (4, 3), "float32")
    with pytest.raises(ValueError, match="a dynamic table that is here"):
        table_calls.items(job.client, other)
    with pytest.raises(ValueError, match="Expected a shard"):
        job.client.read(job.table, 0, 10)
    two = Job(2)
    with pytest.raises(ValueError, match="expected ids by the server that has them"):
        two.client.pull(rows=[(two.table, np.arange(100))])
