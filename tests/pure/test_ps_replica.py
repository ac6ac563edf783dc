"""Two copies of a server's state: the same bits, also while the second is made."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from stratagem.errors import BackupError, NotReadyError
from stratagem.parameter_server import carry, initial
from stratagem.parameter_server.client import Item, Servers
from stratagem.parameter_server.partitioners import FixedShardsPartitioner
from stratagem.parameter_server.plan import Placement, Unit
from stratagem.parameter_server.server import ParameterServer
from stratagem.transport.local import LocalNetwork

SGD = {
    "kind": "rows", "members": 1, "handed": ["rows", "scalar"],
    "steps": [["mul", [1, 2], None], ["sub", [0, 3], None]], "outputs": [4],
}  # fmt: skip
ROWS = 64
RATE = np.array(0.3, np.float32)


class Pair:
    """Two servers, each with a copy of the other."""

    def __init__(self):
        self.network = LocalNetwork()
        self.servers = [self.serve(i) for i in range(2)]
        self.hub = self.network.hub("chief")
        peers = [self.hub.connect(f"ps{i}:1", f"ps {i}") for i in range(2)]
        self.client = Servers(self.hub, peers, "job", "chief")
        self.client.hello(start=True)
        placement = Placement(2, FixedShardsPartitioner(2))
        self.table = placement.place(0, "table", (ROWS, 3), "float32")
        self.scalar = placement.place(1, "scalar", (), "float32")
        self.specs = [self.table, self.scalar]
        self.client.create(self.specs, {0: initial.uniform(-1, 1, 5), 1: np.float32(3)})
        self.units = [Unit("table", (0,), SGD), Unit("scalar", (1,), SGD)]
        self.client.install(self.units)
        self.closure = 0

    def serve(self, i):
        hub = self.network.hub(f"ps {i}")
        server = ParameterServer(hub, i, eager=True)
        hub.listen(f"ps{i}:1", server.serve)
        server.replicate_to(hub.connect(f"ps{1 - i}:1", f"ps {1 - i}"), seconds=5.0)
        return server

    def restart(self, i):
        self.network.kill(self.servers[i].hub)
        self.servers[i] = self.serve(i)
        assert not self.client.hello()[i]["ready"]

    def settle(self, seconds=3.0):
        for _ in range(round(seconds * 10)):
            self.network.run(0.1)
            for server in self.servers:
                server.turn(0.0)

    def push(self, round=None):
        rng = np.random.default_rng(self.closure)
        rows = np.unique(rng.integers(0, ROWS, 20))
        gradient = rng.normal(size=(len(rows), 3)).astype(np.float32)
        items = [
            Item(self.units[0], rows, [("rows", gradient), ("scalar", RATE)]),
            Item(self.units[1], None, [("rows", np.float32(1).reshape(())), ("scalar", RATE)]),
        ]
        self.closure += 1
        return self.client.push(self.closure, self.closure, items, round=round)

    def values(self):
        return [self.client.read(spec) for spec in self.specs]

    def equal(self, i):
        """Whether the other server's copy of this one is as this one is."""
        own, copy = self.servers[i].store, self.servers[1 - i].mirrors.store(i)
        fields, arrays = carry.pack_state(own)
        others, more = carry.pack_state(copy)
        same = fields == others and all(map(np.array_equal, arrays, more))
        return same and all(
            np.array_equal(block.array, copy.blocks[key].array) for key, block in own.blocks.items()
        )


def states(pair):
    return [h["replica"] for h in pair.client.hello()]


def test_both_copies_have_the_same_bits():
    pair = Pair()
    pair.settle()
    assert states(pair) == ["on", "on"]
    for _ in range(10):
        assert pair.push().applied
    pair.client.assign(pair.table, "mul", np.full((2, 3), 1.5), np.array([3, 60]))
    extra = Placement(2).place(5, "extra", (7,), "float32")
    pair.client.create([extra], {5: initial.normal(0, 1, 3)})
    pair.push(round=0)
    pair.push(round=0)
    pair.settle(0.5)
    assert pair.equal(0)
    assert pair.equal(1)
    pair.client.commit(0, [pair.closure])
    pair.client.delete([5])
    pair.settle(0.5)
    assert pair.equal(0)
    assert pair.equal(1)
    assert pair.servers[0].store.version == 11


def test_a_restarted_server_gets_its_state_back(caplog):
    pair = Pair()
    pair.settle()
    assert "in two places" not in caplog.text
    for _ in range(5):
        pair.push()
    pair.push(round=0)
    before, version = pair.values(), pair.servers[1].store.version
    pair.restart(1)
    assert [h["ready"] for h in pair.client.hello()] == [True, False]
    with pytest.raises(NotReadyError):
        pair.client.read(pair.table)
    assert pair.client.recover(1) == {"version": version}
    for a, b in zip(before, pair.values(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert pair.client.commit(0, [pair.closure]).applied  # what was staged is back too
    pair.closure -= 1
    assert not pair.push().applied or pair.servers[1].store.version == version + 2
    pair.settle()
    assert states(pair) == ["on", "on"]
    for said in ("ps 0 has its replica on ps 1 again", "ps 1 has its replica on ps 0 again"):
        assert caplog.text.count(f"{said}: what it holds is in two places.") == 1
    assert pair.equal(0)
    assert pair.equal(1)


def test_a_replica_catches_up_while_pushes_go_on(monkeypatch):
    monkeypatch.setattr(carry, "_COPY_BYTES", 2 * 12)  # two rows a message
    pair = Pair()
    pair.settle()
    pair.network.delay("ps 0", "ps 1", 0.05)
    pair.restart(1)
    # ps 1 has nothing itself; its copy of ps 0 is made anew.
    pair.client.recover(1)
    pushes, seen = 0, set()
    while pushes < 3 or (states(pair)[0] != "on" and pushes < 200):
        pair.push()
        pushes += 1
        seen.add(states(pair)[0])
        pair.settle(0.1)
    assert 3 < pushes < 200
    assert seen == {"off", "copying", "on"}
    for _ in range(3):
        pair.push()
    pair.settle(1.0)
    assert pair.equal(0)


def test_without_its_replica_a_server_goes_on_and_says_so(caplog):
    pair = Pair()
    pair.settle()
    pair.network.cut("ps 0", "ps 1")
    with caplog.at_level(logging.WARNING, "stratagem"):
        assert pair.push().applied
    assert "ps 0 goes on without its replica on ps 1" in caplog.text
    assert states(pair) == ["off", "off"]
    pair.push()
    pair.network.mend("ps 0", "ps 1")
    pair.settle(8.0)
    assert states(pair) == ["on", "on"]
    pair.push()
    pair.settle(0.5)
    assert pair.equal(0)
    assert pair.equal(1)


def test_a_copy_that_is_not_complete_is_not_given_back():
    pair = Pair()
    pair.settle()
    pair.servers[0].mirrors.mirror(1).complete = False
    pair.restart(1)
    with pytest.raises(BackupError, match="Expected a complete copy of ps 1 of the job 'job'"):
        pair.client.recover(1)
    assert not pair.client.hello()[1]["ready"]


def test_a_server_without_a_replica_cannot_recover():
    network = LocalNetwork()
    hub = network.hub("ps 0")
    server = ParameterServer(hub, 0, eager=True)
    hub.listen("ps0:1", server.serve)
    chief = network.hub("chief")
    client = Servers(chief, [chief.connect("ps0:1", "ps 0")], "job", "chief")
    with pytest.raises(BackupError, match="expected a server that replicates this one. Got none"):
        client.recover(0)
    with pytest.raises(BackupError, match="expected a directory of snapshots. Got none"):
        client.restore(1, [], [])
    client.hello(start=True)
    with pytest.raises(BackupError, match="expected a directory for snapshots. Got none"):
        client.snapshot(1, 0)


def test_the_old_server_is_not_heard_after_its_state_was_given_back(caplog):
    """A server that was cut off, and replaced, still sends changes."""
    pair = Pair()
    pair.settle()
    old = pair.servers[1]
    pair.network.cut("ps 1", "ps 0")
    pair.servers[1].hub.close(0.0)
    pair.network.mend("ps 1", "ps 0")
    pair.servers[1] = pair.serve(1)
    assert not pair.client.hello()[1]["ready"]
    pair.client.recover(1)
    pair.settle(0.5)
    mirror = pair.servers[0].mirrors.mirror(1)
    assert mirror.session[0] != old.hub.incarnation
    before = mirror.store.version
    told = {"job": "job", "of": 1, "number": 9, "what": "delete", "fields": {"vids": [0]},
            "session": [old.hub.incarnation, 1]}  # fmt: skip
    with pytest.raises(Exception, match="Expected the stream of ps 1 that this server follows"):
        pair.hub.call(pair.client.peers[0], "mirror", told, seconds=5)
    assert mirror.store.version == before
    assert 0 in mirror.store.specs
