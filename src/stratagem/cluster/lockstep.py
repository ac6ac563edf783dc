"""What all processes of a job do in the same order, done again where the processes change.

A process that is lost takes the step in flight with it. Those that stay meet as a new generation
(`regroup.py`) and find that some have finished that step and others have not, since the last
message of a step reaches some first. They go on from the step that all have finished: who is one
ahead takes it back and does it again with the others, so that all hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stratagem.cluster import regroup
from stratagem.cluster.runtime import Job
from stratagem.errors import GroupChangedError

T = TypeVar("T")


class Lockstep:
    """The units of work of one process, each of which waits for the other processes.

    Args:
        job: the processes.
        rebuild: makes what was laid out over the old processes anew; called at each change.
    """

    def __init__(self, job: Job, rebuild: Callable[[], None]):
        self.finished = 0
        self.changes = 0
        self._job = job
        self._rebuild = rebuild
        self._inside = False
        self._redo: Callable[[], None] | None = None
        self._taken_back = False

    def unit(self, work: Callable[[], T], again: Callable[[T], None]) -> T:
        """Does a unit of work, once all have done the one before it.

        Args:
            work: waits for other processes; may be called several times, and changes nothing
                until it has finished.
            again: gets the result of `work`; takes it back and does the work again, since others
                have not finished it. The result has been used here by then.

        Returns:
            The result of `work`.

        Raises:
            GroupChangedError: the job may not change its processes.
        """
        if self._inside:  # part of another unit
            return work()
        while True:
            try:
                result = self._within(work)
            except GroupChangedError as change:
                self.recover(change)
                continue
            self.finished += 1
            self._redo = lambda: again(result)
            return result

    def recover(self, change: GroupChangedError) -> None:
        """Goes on with the processes that are there now.

        Raises:
            GroupChangedError: the job may not change its processes.
            PeerTimeoutError: they did not come together in time.
        """
        if not self._job.may_change:
            raise change
        while True:
            try:
                self._job.meet()
                stream = self._job.channel.stream("progress")
                progress = regroup.agree(stream, self.finished)
                self._rebuild()
                self.changes += 1
                if self.finished > progress.step:
                    self.finished -= 1
                    self._taken_back = True
                if self._taken_back:
                    self._do_again()
                return
            except GroupChangedError:
                continue

    def _do_again(self) -> None:
        """The last unit, which others have not finished."""
        redo = self._redo
        if redo is None:
            raise RuntimeError("Expected a unit that can be done again. Got none, a fault of ours.")
        self._within(redo)
        self.finished += 1
        self._taken_back = False

    def _within(self, call: Callable[[], Any]) -> Any:
        self._inside = True
        try:
            return call()
        finally:
            self._inside = False
