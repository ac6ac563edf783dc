"""What all processes of a job do in the same order, done again where the processes change.

A process that is lost takes the step in flight with it. Those that stay meet as a new generation
(`regroup.py`) and find that some have finished that step and others have not, since the last
message of a step reaches some first. They go on from the step that all have finished: who is one
ahead takes it back and does it again with the others, so that all hold the same bits. Who joins
gets the state from one who is not ahead, and does the next step with the others.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from stratagem.cluster import regroup
from stratagem.cluster.channel import Channel
from stratagem.errors import GroupChangedError

T = TypeVar("T")
_log = logging.getLogger("stratagem")


class Changing(Protocol):
    """The processes of a job that may change, as `runtime.Job`."""

    channel: Channel
    generation: regroup.Generation | None

    @property
    def is_waiting(self) -> bool:
        """Whether this process has not joined yet."""

    @property
    def may_change(self) -> bool:
        """Whether the processes may change."""

    def meet(self) -> None:
        """Joins the latest generation."""


class Lockstep:
    """The units of work of one process, each of which waits for the other processes.

    Args:
        job: the processes.
        rebuild: makes what was laid out over the old processes anew; called at each change.
        share: `(data, source)`, gives all processes the data of one rank; every process calls it.

    Attributes:
        finished: units that this process has finished.
        taken_back: how many it has done again since others had not finished them.
    """

    def __init__(
        self,
        job: Changing,
        rebuild: Callable[[], None],
        share: Callable[[bytes, int], bytes],
    ):
        self.finished = self.taken_back = 0
        self._job = job
        self._rebuild = rebuild
        self._share = share
        self._inside = False
        self._redo: Callable[[], object] | None = None
        self._give: Callable[[], bytes] | None = None
        self._taken_back = False
        self._story: Callable[[], None] | None = None

    def unit(
        self,
        work: Callable[[], T],
        again: Callable[[T], object],
        give: Callable[[], bytes] | None = None,
    ) -> T:
        """Does a unit of work, once all have done the one before it.

        Args:
            work: waits for other processes; may be called several times, and changes nothing
                until it has finished.
            again: gets the result of `work`; takes it back and does the work again, since others
                have not finished it. The result has been used here by then.
            give: what a process that joins before this unit needs; None where none can.

        Returns:
            The result of `work`.

        Raises:
            GroupChangedError: the job may not change its processes.
        """
        if self._inside or self._job.is_waiting:  # part of another unit; or nobody to wait for
            return work()
        self._give = give
        while True:
            began = time.monotonic()
            try:
                result = self._within(work)
            except GroupChangedError as change:
                self._recover(change, time.monotonic() - began)
                continue
            self.finished += 1
            self._redo, self._give = functools.partial(again, result), None
            if self._story is not None:
                self._story()
                self._story = None
            return result

    def enter(self) -> bytes:
        """Joins the others, in the place of one that was lost; what they `give`.

        Raises:
            RuntimeError: they are where nobody can join.
        """
        while True:
            try:
                data = self._gather(None)
            except GroupChangedError:
                continue
            if not data:
                raise RuntimeError(
                    "Expected the other processes of the job to be in a step of fit, or in "
                    "stratagem.train.Backup.save, when this one joins. Got another step. Start the "
                    "program again without this process, or all of it from its last backup."
                )
            return data

    def _recover(self, change: GroupChangedError, inside: float) -> None:
        """Goes on with the processes that are there now.

        Raises:
            GroupChangedError: the job may not change its processes.
            PeerTimeoutError: they did not come together in time.
        """
        if not self._job.may_change:
            raise change
        told = time.monotonic()
        while True:
            try:
                self._gather(self.finished)
                met = time.monotonic()
                if self._taken_back:
                    self._do_again()
                break
            except GroupChangedError:
                continue
        self._story = lambda: self._tell(inside, met - told, time.monotonic() - met)

    def _gather(self, finished: int | None) -> bytes:
        """Meets the others, and agrees with them where to go on; what who joins is given."""
        self._job.meet()
        stream = self._job.channel.stream("progress")
        progress = regroup.agree(stream, finished)
        self._rebuild()
        if finished is not None and finished > progress.step:
            self.finished -= 1
            self._taken_back = True
        given = b""
        if progress.newcomers:
            is_source = stream.rank == progress.source
            mine = self._give() if is_source and self._give is not None else b""
            given = self._share(mine, progress.source)
        if finished is None:
            self.finished = progress.step
        return given

    def _do_again(self) -> None:
        """The last unit, which others have not finished."""
        redo = self._redo
        if redo is None:
            raise RuntimeError("Expected a unit that can be done again. Got none, a fault of ours.")
        self._within(redo)
        self.finished += 1
        self.taken_back += 1
        self._taken_back = False

    def _within(self, call: Callable[[], Any]) -> Any:
        self._inside = True
        try:
            return call()
        finally:
            self._inside = False

    def _tell(self, inside: float, meeting: float, first: float) -> None:
        generation = self._job.generation
        if generation is not None:
            _log.warning(
                "%s. Going on with %s after step %d: known %.2f s into the step, together again "
                "%.2f s later, the step finished %.2f s after that.",
                generation.why,
                ", ".join(generation.members),
                self.finished - 1,
                inside,
                meeting,
                first,
            )
