"""What a coordinator knows when it is started again."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stratagem.coordinator import journal as module
from stratagem.coordinator.instructions import Dispatch, Lease
from stratagem.coordinator.journal import Journal, resume
from stratagem.coordinator.progress import Progress
from stratagem.coordinator.state import State
from stratagem.errors import BackupError, CorruptBackupError, JobMismatchError


def test_a_journal_gives_back_what_was_written(tmp_path):
    path = tmp_path / "state" / "journal"
    journal = Journal(path, "job 1")
    journal.used(0)
    journal.data("epoch 0")
    journal.leased(0, Lease("epoch 0", 0))
    journal.leased(1, Lease("epoch 0", 1))
    journal.counted(Lease("epoch 0", 0))
    journal.counted(None)
    journal.leased(2, Lease("epoch 0", 2))
    journal.counted(Lease("epoch 0", 2))
    journal.lost(7)
    journal.snapshot(3)
    journal.mark(epoch=0, step=12)
    journal.logs("epoch 0", {"loss": 1.0})
    journal.logs("epoch 0", {"loss": 1.0, "val_loss": 2.0})
    journal.close()
    found = resume(path)
    assert found.job == "job 1"
    assert found.next_token == 4096
    assert list(found.data["epoch 0"].done) == [0, 2]
    assert found.data["epoch 0"].open == {1: 1}
    assert (found.lost_pushes, found.snapshot, found.mark) == (7, 3, {"epoch": 0, "step": 12})
    assert found.logs == {"epoch 0": {"loss": 1.0, "val_loss": 2.0}}
    with Journal(path) as again:
        assert again.progress == found
        again._rewrite()
        assert resume(path) == found
        again.released("epoch 0")
    assert resume(path).data == {}


def test_a_resumed_job_goes_on_under_the_tokens_of_before():
    data = module.DataProgress(module.Watermark(1, [2]), {1: 17})
    state = State(resumed=Progress("job", 4096, {"epoch": data}))
    assert state.below == 17
    state.worker_up("worker 0", 1, 0.0)
    state.add_dataset("epoch", 0.0)
    (first,) = state.schedule(0.0, dataset="epoch")[1]
    (second,) = state.schedule(0.0, dataset="epoch")[1]
    assert isinstance(first, Dispatch)
    assert (first.closure, first.token, first.lease) == (4096, 17, Lease("epoch", 1))
    assert isinstance(second, Dispatch)
    assert (second.closure, second.token, second.lease) == (4097, 4097, Lease("epoch", 3))
    state.finished("worker 0", 1, 4096, "ok", 0.0)
    assert state.below == 4097


STEPS = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(steps=STEPS, cut=st.integers(0, 10_000), junk=st.binary(max_size=9), worth=st.booleans())
@example(steps=[(0, True), (0, False)], cut=0, junk=b"", worth=True)
def test_a_crash_at_any_byte_forgets_nothing_that_was_synced(
    tmp_path, monkeypatch, steps, cut, junk, worth
):
    monkeypatch.setattr(module, "_WORTH", 200 if worth else 1 << 20)
    path = tmp_path / "journal"
    path.unlink(missing_ok=True)
    files: list[object] = []  # It is made, and then rewritten, which forces all to the disk.
    monkeypatch.setattr(module, "sync_folder", files.append)
    reported: set[int] = set()
    with Journal(path, "job", fsync="never") as journal:
        journal.data("epoch")
        for number, (batch, sync) in enumerate(steps):
            journal.used(number)
            journal.leased(number, Lease("epoch", batch))
            journal.counted(Lease("epoch", batch))
            if sync:
                journal.sync()
                synced, reported = path.stat().st_size, {each for each, _ in steps[: number + 1]}
                known = len(files)
        if not reported:
            journal.sync()
            synced, known = path.stat().st_size, len(files)
    content = path.read_bytes()
    if len(files) > known:
        synced = len(content)
    path.write_bytes(content[: synced + cut] + junk)
    found = set(resume(path).data["epoch"].done)
    assert reported <= found <= {batch for batch, _ in steps}
    with Journal(path, "job") as journal:
        assert set(journal.progress.data["epoch"].done) == found
        journal.counted(Lease("epoch", 10))
    assert set(resume(path).data["epoch"].done) == found | {10}


def test_damage_in_the_middle_is_said(tmp_path):
    path = tmp_path / "journal"
    with Journal(path, "job") as journal:
        journal.mark(step=1)
        journal.mark(step=2)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"step":1', b'"step":7'))
    with pytest.raises(
        CorruptBackupError, match=r"Expected whole records .* at byte 39.*Put it back"
    ):
        Journal(path, "job")


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(CorruptBackupError, match="Got a file of 5000 bytes that is none"):
        Journal(path, "job")
    assert path.stat().st_size == 5000


def test_the_journal_of_another_job_is_refused(tmp_path):
    Journal(tmp_path / "journal", "job 1").close()
    with pytest.raises(JobMismatchError, match="Got that of job 'job 1'"):
        Journal(tmp_path / "journal", "job 2")


def test_two_coordinators_cannot_have_one_journal(tmp_path):
    with Journal(tmp_path / "journal", "job"):
        with pytest.raises(BackupError, match="Expected to be the only coordinator"):
            Journal(tmp_path / "journal", "job")
    Journal(tmp_path / "journal", "job").close()


def test_a_full_disk_is_said_and_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    with Journal(path, "job") as journal:
        before = path.read_bytes()

        def full(file, line):
            module.os.write(file, line[:5])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal, "_write", full)
        with pytest.raises(BackupError, match="Got .*No space left on device.* Make room"):
            journal.mark(step=1)
        assert path.read_bytes() == before


def test_fsync_is_checked(tmp_path):
    with pytest.raises(ValueError, match="'always', 'never' or a number of seconds. Got 'often'"):
        Journal(tmp_path / "journal", "job", fsync="often")


def test_a_job_that_is_done_stays_so_until_another_begins(tmp_path):
    """Also where the file was rewritten after the end: nobody may go on with it."""
    with Journal(tmp_path / "journal", "first") as journal:
        journal.used(0)
        journal.ended()
        journal._rewrite()
    assert resume(tmp_path / "journal").ended
    with Journal(tmp_path / "journal", "first") as journal:
        journal.begin("second")
        assert (journal.progress.job, journal.progress.ended) == ("second", False)
    assert resume(tmp_path / "journal").next_token == 0


def test_a_full_disk_when_another_job_begins(tmp_path, monkeypatch):
    with Journal(tmp_path / "journal", "first") as journal:
        journal.used(0)

        def full(file):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(module.os, "fsync", full)
        with pytest.raises(BackupError, match=r"Expected to write the journal .*No space left"):
            journal.begin("second")
        monkeypatch.undo()
    assert resume(tmp_path / "journal").job == "first"
