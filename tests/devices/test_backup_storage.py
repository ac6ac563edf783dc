"""What is stored comes back as it was, or is found to be damaged; never something in between."""

from __future__ import annotations

import shutil
import threading

import ml_dtypes
import numpy as np
import pytest

from stratagem.errors import BackupError, CorruptBackupError
from stratagem.recovery import storage as storage_module
from stratagem.recovery.storage import Storage

random = np.random.default_rng(0)
ARRAYS = {
    "model/0": random.normal(size=(40, 7)).astype("float32"),
    "model/1": np.asarray(3, "int32"),
    "model/2": random.normal(size=5).astype(ml_dtypes.bfloat16),
    "model/3": np.zeros((0, 3), "float32"),
    "optimizer/0": np.asarray([True, False]),
    "optimizer/1": np.asarray([-0.0, np.nan, np.inf], "float16"),
}
FACTS = {"step": 7, "loss": 0.1, "list": [1, None, "x"], "big": 2**40}


def saved(directory, count: int = 1, keep: int | None = None) -> Storage:
    storage = Storage(directory, keep)
    for step in range(count):
        storage.save(ARRAYS, {**FACTS, "step": step})
    storage.wait()
    return storage


def assert_whole(found) -> None:
    arrays, facts = found
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert arrays[name].tobytes() == array.tobytes()
    assert {**facts, "step": 7} == FACTS


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    storage = saved(tmp_path)
    assert_whole(storage.read(storage.path(1)))


def test_arrays_larger_than_a_pack(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "_PACK_BYTES", 30)
    storage = saved(tmp_path)
    assert len(storage_module._packed(ARRAYS)[0]) == 2
    assert_whole(storage.read(storage.path(1)))


def test_nothing_at_all_can_be_saved(tmp_path):
    storage = Storage(tmp_path)
    for arrays in ({}, {"empty": np.zeros((0, 2))}):
        path = storage.save(arrays, {})
        storage.wait()
        assert storage.read(path)[0].keys() == arrays.keys()


def test_the_newest_stay(tmp_path):
    storage = saved(tmp_path, count=5, keep=2)
    assert storage.numbers() == [4, 5]
    assert saved(tmp_path, count=1, keep=2).numbers() == [5, 6]  # another process goes on
    assert storage.read(storage.path(5))[1]["step"] == 4


def test_saving_returns_before_it_is_written(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = Storage._write
    monkeypatch.setattr(Storage, "_write", lambda *a: may_write.wait(60) and write(*a))
    storage = Storage(tmp_path)
    storage.save(ARRAYS, FACTS)
    assert storage.numbers() == []
    may_write.set()
    storage.wait()
    assert storage.numbers() == [1]


def damages(path) -> list[tuple[str, bytes | None]]:
    """What may happen to a file: gone, cut short, grown, a bit flipped at several places."""
    content = path.read_bytes()
    found: list[tuple[str, bytes | None]] = [("gone", None), ("grown", content + b"x")]
    found += [(f"cut to {n}", content[:n]) for n in {0, len(content) // 2} if n < len(content)]
    for at in {0, *random.integers(0, max(1, len(content)), 4).tolist()}:
        if at < len(content):
            flipped = bytearray(content)
            flipped[at] ^= 1 << int(random.integers(8))
            found.append((f"bit flipped at {at}", bytes(flipped)))
    return found


def test_damage_to_any_file_is_found_or_harmless(tmp_path):
    storage = saved(tmp_path / "whole")
    source = storage.path(1)
    found = []
    for file in sorted(p.relative_to(source) for p in source.rglob("*") if p.is_file()):
        for what, content in damages(source / file):
            copy = tmp_path / "damaged" / "1"
            shutil.rmtree(copy.parent, ignore_errors=True)
            shutil.copytree(source, copy)
            (copy / file).unlink() if content is None else (copy / file).write_bytes(content)
            try:
                assert_whole(Storage(copy.parent).read(copy))
            except CorruptBackupError as e:
                found.append((str(copy) in str(e), file, what))
    assert all(names_it for names_it, *_ in found), found
    assert len(found) > 20  # most of it is found


def test_a_value_that_changed_with_a_checksum_that_did_not_is_found(tmp_path, monkeypatch):
    other = storage_module._packed({**ARRAYS, "model/1": np.asarray(4, "int32")})[0]
    about = storage_module._packed(ARRAYS)[1]
    monkeypatch.setattr(storage_module, "_packed", lambda _: (other, about))
    storage = Storage(tmp_path)
    storage.save(ARRAYS, FACTS)
    storage.wait()
    with pytest.raises(CorruptBackupError, match=r"1: ValueError: arrays are not .* model/1$"):
        storage.read(storage.path(1))


def test_facts_that_changed_are_found(tmp_path):
    storage = saved(tmp_path)
    (file,) = (p for p in storage.path(1).rglob("*") if p.is_file() and b"loss" in p.read_bytes())
    file.write_bytes(file.read_bytes().replace(b"0.1", b"0.2"))
    with pytest.raises(CorruptBackupError, match="facts do not have the checksum"):
        storage.read(storage.path(1))


def test_another_format_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_module, "_FORMAT", 2)
    storage = saved(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CorruptBackupError, match="format 2, this version reads 1"):
        storage.read(storage.path(1))


def test_what_a_crash_left_unfinished_is_no_state_and_goes(tmp_path):
    saved(tmp_path)
    for name in ("2.orbax-checkpoint-tmp", "0.deleted"):
        (tmp_path / name).mkdir()
    storage = Storage(tmp_path)
    assert storage.numbers() == [1]
    storage.save(ARRAYS, FACTS)
    storage.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_a_state_that_was_found_bad_goes_when_the_next_is_complete(tmp_path):
    storage = saved(tmp_path, count=3, keep=2)
    storage.mark_bad(storage.path(3))
    assert storage.numbers() == [2, 3]
    storage.save(ARRAYS, FACTS)
    storage.wait()
    assert storage.numbers() == [2, 4]


def test_a_failure_to_write_is_told_by_wait_and_the_others_stay(tmp_path, monkeypatch):
    storage = saved(tmp_path)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(storage_module, "_packed", full)
    storage.save(ARRAYS, FACTS)
    # It happens in the thread, and not before.
    with pytest.raises(BackupError, match=r"write .*2\. Got OSError: No space left.* unharmed"):
        storage.wait()
    storage.wait()  # told once
    assert storage.numbers() == [1]


def test_a_directory_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackupError, match=r"can be written to save in. Got .*file/x.*Name another"):
        Storage(tmp_path / "file" / "x").check_writable()


def test_a_name_of_ones_own_is_replaced(tmp_path):
    storage = Storage(tmp_path)
    for step in (1, 2):
        path = storage.save(ARRAYS, {**FACTS, "step": step}, name="best")
        storage.wait()
    assert path == tmp_path / "best"
    assert storage.read(path)[1]["step"] == 2


def test_removing_all_leaves_what_is_somebody_elses(tmp_path):
    storage = saved(tmp_path / "a", count=2)
    storage.remove_all()
    assert not (tmp_path / "a").exists()
    storage = saved(tmp_path / "b", count=2)
    (tmp_path / "b" / "notes.txt").write_text("mine")
    storage.remove_all()
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["notes.txt"]
