"""What a process that joins is given, and where it is refused; the others are stand-ins here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import stratagem
from stratagem.errors import GroupChangedError
from stratagem.keras_bridge.backup import Feed
from stratagem.keras_bridge.handover import Handover
from stratagem.recovery import randomness, state
from stratagem.recovery.archive import Cut
from stratagem.recovery.position import Pass
from stratagem.step.together import in_step


def cut(**facts: Any) -> Cut:
    arrays = {"a/0": np.arange(6, dtype="float32").reshape(2, 3), "a/1": np.array(7, "int32")}
    entries = {"a": [state.Entry("x", [2, 3], "float32"), state.Entry("y", [], "int32", "sum")]}
    return Cut(Path("somewhere"), arrays, facts, [{"random": None}], entries)


def waiting(data: bytes) -> Any:
    """A job of which this process is no part yet; the others give some data."""
    return SimpleNamespace(is_waiting=True, lockstep=SimpleNamespace(enter=lambda: data))


def test_a_cut_goes_through_bytes_unchanged():
    before, after = cut(step=3), Cut.unpacked(cut(step=3).packed())
    assert (after.facts, after.processes, after.entries) == (
        before.facts, before.processes, before.entries,
    )  # fmt: skip
    assert list(after.arrays) == list(before.arrays)
    for name, array in before.arrays.items():
        assert after.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(after.arrays[name], array)


def test_who_joins_holds_its_own_component_of_a_sum_as_zero():
    strategy = stratagem.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = keras.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)
        last = keras.Variable(
            0.0, aggregation="only_first_replica", synchronization="on_read", trainable=False
        )
    strategy.run(lambda: (total.assign_add(3.0), last.assign(5.0)) and None)
    found = Cut.of_this_process({"v": [total, last]}, {}, None, {}, state.mine)
    assert [float(found.arrays[f"v/{i}"]) for i in (0, 1)] == [0.0, 5.0]
    Cut.unpacked(found.packed()).apply({"v": [total, last]})
    assert np.asarray(total.components).tolist() == [0.0, 0.0]
    assert np.asarray(last.components).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("checkpointable", [False, True])
def test_batches_in_flight_are_drawn_again(checkpointable):
    class Source:
        def __init__(self) -> None:
            self.next = 0

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> int:
            self.next += 1
            return self.next

    if checkpointable:
        Source.get_state = lambda self: self.next
        Source.set_state = lambda self, state: setattr(self, "next", state)
    run = Pass(Source(), in_flight=3)
    assert [next(run) for _ in range(5)] == [1, 2, 3, 4, 5]
    position = run.position(in_flight=2)
    other = Pass(Source(), position, randomness.get_state(), 3)
    assert [next(other) for _ in range(3)] == [4, 5, 6]
    assert other.position(in_flight=1)["drawn"] == 5
    first = Pass(Source(), Pass(Source()).position(), randomness.get_state())
    assert next(first) == 1


def test_another_fit_than_that_of_the_others_is_refused(monkeypatch):
    for about, where in ({}, "a loop of its own"), ({"fit": 2, "done": 0}, "fit number 2"):
        monkeypatch.setattr(Handover, "_fits", 0)
        facts = {"handover": about} if about else {}
        observer = Handover(waiting(cut(**facts).packed()))
        with pytest.raises(RuntimeError, match=f"Got them in {where}.*BackupAndRestore"):
            observer.after_train_begin(Feed())


def test_a_step_before_the_state_is_there_is_refused():
    strategy = SimpleNamespace(job=waiting(b""))
    with pytest.raises(RuntimeError, match=r"by stratagem\.train\.Backup\.restore\(\) in a loop"):
        in_step(None, strategy, lambda: None, (), {})


def test_data_of_lost_workers_is_refused():
    strategy = stratagem.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = strategy.distribute_datasets_from_function(lambda _: [np.zeros((2, 1))])
    with pytest.raises(GroupChangedError, match="policy OFF.*restart from a backup"):
        dataset.follow(strategy.mesh, SimpleNamespace())
