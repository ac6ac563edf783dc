"""The journal of a job over the deaths of its coordinator, and what is at risk after them."""

from __future__ import annotations

import pytest

from stratagem.coordinator import instructions as do
from stratagem.coordinator import journal
from stratagem.coordinator.instructions import Counted, Lease
from stratagem.coordinator.record import Record
from stratagem.coordinator.state import State, Terms
from stratagem.errors import BackupError


def count(record, token, batch):
    lease = Lease("fit 0 epoch 0", batch)
    record.leased(token, lease)
    record.counted(Counted(token, lease, False))


def test_a_job_begins_goes_on_and_is_finished(tmp_path):
    record = Record(tmp_path, "first")
    assert (record.job, record.resumed, record.at) == ("first", None, {})
    record.close()
    record = Record(tmp_path, "second")  # the first never began a step
    assert (record.job, record.resumed) == ("second", None)
    record.used(0)
    assert len(record.begin("fit 0 epoch 0")) == 0
    record.mark(fit=0, epoch=0)
    for batch in (0, 1, 3):
        count(record, batch, batch)
    with pytest.raises(BackupError, match="Expected to be the only coordinator"):
        Record(tmp_path, "third")
    record.close()
    record = Record(tmp_path, "third")
    assert record.job == "second"
    assert record.at == {"fit": 0, "epoch": 0}
    assert list(record.begin("fit 0 epoch 0")) == [0, 1, 3]
    record.end()
    record.close()
    record = Record(tmp_path, "fourth")
    assert (record.job, record.resumed) == ("fourth", None)
    record.close()


@pytest.mark.parametrize("name", ["3-ps0.json", "3-variables.json"])
@pytest.mark.parametrize("left", [None, b"00000000 [torn"])
def test_snapshots_without_their_journal_are_left_alone(tmp_path, name, left):
    """A job that began there would train from initial values, and prune them."""
    (tmp_path / name).write_text("{}")
    if left is not None:
        (tmp_path / "journal").write_bytes(left)
    with pytest.raises(BackupError, match=r"Expected the journal.*snapshots \[3\].*Got none"):
        Record(tmp_path, "new")
    with pytest.raises(BackupError, match="to begin anew, give another state directory"):
        Record(tmp_path, "new")  # that it was tried has changed nothing
    assert (tmp_path / name).exists()
    assert (tmp_path / "journal").exists() == (left is not None)


def test_snapshots_of_a_job_that_has_ended_are_replaced_with_a_warning(tmp_path, caplog):
    record = Record(tmp_path, "first")
    record.used(0)
    record.end()
    record.close()
    (tmp_path / "3-ps0.json").write_text("{}")
    record = Record(tmp_path, "second")
    assert record.resumed is None
    assert "has ended: another one begins, and its snapshots take the place of [3]" in caplog.text
    record.close()


def test_pushes_since_the_last_snapshot_are_at_risk(tmp_path):
    record = Record(tmp_path, "job")
    record.used(0)
    record.begin("fit 0 epoch 0")
    for batch in range(3):
        count(record, batch, batch)
    record.asked()
    count(record, 3, 3)
    record.snapshot(1)
    record.counted(Counted(4, None, False))
    record.counted(Counted(5, None, False, pushes=False))  # of an evaluation: nothing to lose
    record.close()
    record = Record(tmp_path, "job")
    assert (record.resumed.snapshot, record.resumed.since) == (1, 2)
    state = State(Terms(), 0.0, record.resumed)
    record.close()
    state.add_server("ps 0", "host:1", 0.0)
    assert do.Restore("ps 0") in state.server_up("ps 0", "a", False, 1.0)
    said = state.restored("ps 0", 2.0)
    assert do.Warn("ps 0 at host:1 is restored; at most 2 pushes to it are lost") in said
    assert state.lost_pushes == 2


def test_who_waits_for_a_server_that_cannot_be_restored_is_told_each_time():
    state = State(Terms(), 0.0)
    for _ in range(2):
        assert isinstance(state.ask("schedule", 1.0)[0], do.Go)
        state.schedule(1.0)
        state.server_failed(BackupError("it is gone"), 2.0)
        answer, _ = state.ask("join", 3.0)
        assert isinstance(answer, do.Raise)
        assert str(answer.error) == "it is gone"


def test_what_finishes_after_the_last_snapshot_was_asked_for_runs_again(tmp_path):
    record = Record(tmp_path, "job")
    assert not record.began
    record.used(0)
    record.begin("fit 0 epoch 0")
    count(record, 0, 0)
    record.freeze()
    record.asked()
    count(record, 1, 1)
    record.counted(Counted(2, None, False))  # nothing but its program runs that again
    record.snapshot(1)
    record.close()
    record = Record(tmp_path, "job")
    assert record.began
    assert list(record.begin("fit 0 epoch 0")) == [0]
    assert record.resumed.data["fit 0 epoch 0"].open == {1: 1}
    assert record.resumed.since == 1
    record.close()


def test_a_job_is_done_if_its_coordinator_has_left_with_0(tmp_path):
    path = tmp_path / "journal"
    journal.succeeded(path)  # there was none
    record = Record(tmp_path, "job")
    record.used(0)
    record.close()
    journal.succeeded(path)  # another program has: this job is not done
    assert not journal.resume(path).ended
    record = Record(tmp_path, "job")
    record.perhaps()
    record._journal._rewrite()
    with pytest.raises(BackupError, match="Expected to be the only coordinator"):
        journal.succeeded(path)
    record.close()
    record = Record(tmp_path, "job")  # it had not: the job goes on
    assert record.resumed is not None
    assert not journal.resume(path).perhaps
    record.perhaps()
    record.close()
    journal.succeeded(path)
    record = Record(tmp_path, "next")
    assert (record.job, record.resumed) == ("next", None)
    record.close()
