"""A process that joins in the middle of `fit` gets everything from one that is there.

What it gets is the cut of a backup (`fit_cut.py`), from memory: the values that the step in flight
began with, and the data from the batch of that step on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.keras_bridge.backup import Feed
from stratagem.keras_bridge.fit_cut import FitCut
from stratagem.recovery import state
from stratagem.recovery.archive import Cut


class Handover(FitCut):
    """Part of each `fit` of a job that may change.

    Args:
        job: the processes.
    """

    first = True
    _fits = 0  # in this process

    def __init__(self, job: Any):
        super().__init__()
        self._job = job
        self._done = 0  # steps of the execution in flight
        self._skips = 0

    def after_train_begin(self, feed: Feed) -> None:
        """Joins the others, and goes on where they are."""
        self._begin(feed)
        feed.handover = self
        Handover._fits += 1
        if not self._job.is_waiting:
            return
        cut = Cut.unpacked(self._job.lockstep.enter())
        about = cut.facts.get("handover")
        if about is None or about["fit"] != Handover._fits:
            where = "a loop of its own" if about is None else f"fit number {about['fit']}"
            raise RuntimeError(
                f"Expected the other processes in fit number {Handover._fits} of the program, as "
                f"this one, which replaces a lost one. Got them in {where}. A process can join in "
                "a program's first fit alone, or with stratagem.train.Backup in a loop; else use "
                "BackupAndRestore and leave out --min-workers, so that the group restarts."
            )
        self._skips = about["done"]
        self._go_on(cut, 0)
        feed.joined = cut

    def after_train_batch(self, batch: int) -> None:
        """Counts."""
        super().after_train_batch(batch)
        self._done = 0

    def skips(self) -> bool:
        """Whether the next step of the execution was done by the others before this one joined."""
        if self._done < self._skips:
            self._done += 1
            return True
        self._skips = 0
        return False

    def stepped(self) -> None:
        """A step has finished; its execution may have more."""
        self._done += 1

    def give(self, value: Callable[[Any], Any]) -> bytes:
        """What a process that joins needs to do the step in flight with the others.

        Args:
            value: of a variable, before that step.
        """
        facts = {**self._facts(), "handover": {"fit": Handover._fits, "done": self._done}}
        process = self._process(in_epoch=True, in_flight=self._done + 1)
        groups, arrays = self._groups(), self._best_weights()
        return Cut.of_this_process(groups, facts, process, arrays, value).packed()


def value_from(found: dict[int, Any]) -> Callable[[Any], Any]:
    """Values of variables by id, and of others their own."""
    return lambda variable: found[id(variable)] if id(variable) in found else state.mine(variable)
