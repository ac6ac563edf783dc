"""What a lost server gets back: from a snapshot, its replica, or the program's own beginnings."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_ps_servers import Cluster, item, model

from stratagem.errors import (
    BackupError,
    BackupMismatchError,
    CorruptBackupError,
    PeerLostError,
)
from stratagem.parameter_server import catalog
from stratagem.parameter_server.keeper import Keeper, is_final
from stratagem.parameter_server.plan import Placement


class Job:
    """A job of two servers with a keeper."""

    def __init__(self, directory=None, replicated=False):
        self.cluster = Cluster(2, directory)
        self.servers = self.cluster.client()
        self.servers.replicated = replicated
        self.servers.hello(start=True)
        self.noted = []
        self.keeper = Keeper(self.servers, directory, replicated, noted=self.noted.append)
        self.specs, self.units = model(self.servers, 2)
        for spec in self.specs:
            self.keeper.created(spec, self.servers.read(spec))

    def snapshot(self):
        errors = []
        self.keeper.snapshot(self.specs, errors.append)
        while not errors:
            self.servers.hub.turn(0.01)
        return errors[0]

    def push(self, closure):
        self.servers.push(closure, 0, [item(self.units[1], None, np.ones((4, 2)))])

    def assign(self, value, number):
        self.servers.assign(self.specs[2], "set", np.float32(value), token=(number, 0))
        self.keeper.changed(self.specs[2], "set", np.float32(value), None, number)

    def values(self):
        return [self.servers.read(spec) for spec in self.specs]


def same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def lose(job, server):
    """Makes a server one that was just started."""
    lost = job.cluster.servers[server]
    lost.store.clear()
    lost.job, lost.ready = "", False


@pytest.mark.parametrize("server", [0, 1])
def test_before_the_first_push_all_begins_as_it_did(tmp_path, server):
    job = Job(tmp_path)
    job.assign(9.0, 1)
    expected = job.values()
    lose(job, server)
    assert job.keeper.pending
    assert job.keeper.restore(server, job.specs, job.units) == 0
    same(job.values(), expected)


def test_a_snapshot_and_what_the_program_changed_since(tmp_path):
    job = Job(tmp_path)
    assert job.snapshot() is None
    assert job.noted == [None, 1]
    assert not job.keeper.pending
    job.assign(9.0, 1)
    expected = job.values()
    for closure in range(3):
        job.push(closure)
    for server in (0, 1):
        lose(job, server)
        assert job.keeper.restore(server, job.specs, job.units) is None
    same(job.values(), expected)


def test_with_nothing_kept_it_is_an_error():
    job = Job()
    assert not job.keeper.pending  # asked before the first push
    job.push(0)
    lose(job, 1)
    with pytest.raises(BackupError, match=r"Expected ps 1 at ps1:1 to be restored.*is lost") as e:
        job.keeper.restore(1, job.specs, job.units)
    assert is_final(e.value)
    with pytest.raises(BackupError, match="Expected a state directory for snapshots"):
        raise job.snapshot()


def test_with_both_copies_gone_the_error_is_the_same():
    """What to do, once; not the one that the server raised, nor where it did."""
    job = Job(replicated=True)
    assert not job.keeper.pending
    job.push(0)
    for server in (0, 1):  # killed, and started again
        job.cluster.network.kill(job.cluster.servers[server].hub)
        job.cluster.servers[server] = job.cluster.serve(server)
    with contextlib.suppress(PeerLostError):
        job.servers.hello()
    job.servers.hello()
    with pytest.raises(BackupError) as caught:
        job.keeper.restore(1, job.specs, job.units)
    assert str(caught.value) == job.keeper._nothing(1)
    assert caught.value.__suppress_context__
    with pytest.raises(BackupError) as caught:
        job.servers.recover(1)
    assert str(caught.value) == (
        "ps 1 at ps1:1, recover: ps 1: expected its state from ps 0. It is not there: Expected a "
        "complete copy of ps 1 of the job 'job'. Got none. Restore a snapshot."
    )


def test_many_changes_make_a_snapshot_due(tmp_path, monkeypatch):
    monkeypatch.setattr("stratagem.parameter_server.keeper._LOG_BYTES", 8)
    job = Job(tmp_path)
    assert job.snapshot() is None
    for number in range(3):
        assert not job.keeper.pending
        job.assign(1.0, number)
    assert job.keeper.pending
    assert job.snapshot() is None
    assert not job.keeper.pending


def test_a_job_that_goes_on_has_its_variables(tmp_path, caplog):
    job = Job(tmp_path)
    job.snapshot()
    servers = job.cluster.client("another")
    keeper = Keeper(servers, tmp_path, False, complete=1, written=1)
    found = keeper.resume(Placement(2))
    assert [s.name for s in found.values()] == ["table", "dense", "scalar"]
    assert keeper.check(found[1], "dense", [4, 2], "float32") is found[1]
    with pytest.raises(BackupMismatchError, match=r"variable 1: expected 'dense', float32\[4, 2\]"):
        keeper.check(found[1], "dense", [4, 3], "float32")
    with caplog.at_level(logging.WARNING, "stratagem"):
        keeper.ignores(found[2])
        keeper.ignores(found[2])
    assert caplog.text.count("variable 'scalar' keeps its value") == 1
    catalog.prune(tmp_path, 2)
    with pytest.raises(CorruptBackupError, match="expected the variables of snapshot 1"):
        catalog.read(tmp_path, 1)


def test_a_snapshot_that_waits_for_another_one_is_told_when_all_ends(tmp_path):
    job = Job(tmp_path)
    errors = []
    job.keeper.snapshot(job.specs, errors.append)
    job.keeper.snapshot(job.specs, errors.append)
    job.servers.hub.close()
    assert [type(error) for error in errors] == [PeerLostError, RuntimeError]
