"""Long work of a server in pieces, so that it answers in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

WAITING: Final = object()
"""What a job yields that goes on when something has come from another process."""

Steps = Generator[Any, None, Any]
"""A job: yields None where it can go on at once, a Future or WAITING where it cannot yet."""


@dataclass(eq=False)
class _Job:
    steps: Steps
    done: Callable[[Any], None]
    wait: Any = None

    def runs(self) -> bool:
        """Whether it can go on now."""
        if isinstance(self.wait, Future):
            return self.wait.done()
        return self.wait is not WAITING


class Jobs:
    """Jobs of one thread, that take turns.

    Args:
        eager: runs each as far as it comes at once. For tests on a network of one thread.
        clock: seconds.
    """

    def __init__(self, eager: bool = False, clock: Callable[[], float] = time.monotonic):
        self._eager, self._clock = eager, clock
        self._jobs: list[_Job] = []
        self._running = False

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._jobs)

    @property
    def ready(self) -> bool:
        """Whether any can go on now."""
        return any(job.runs() for job in self._jobs)

    def start(self, steps: Steps, done: Callable[[Any], None]) -> None:
        """Begins a job.

        Args:
            steps: the job.
            done: called with what it returned, or with the exception that it ended with.
        """
        self._jobs.append(_Job(steps, done))
        self.poke()

    def poke(self) -> None:
        """Something came: jobs that wait for it look again."""
        for job in self._jobs:
            if job.wait is WAITING:
                job.wait = None
        if self._eager:
            self.run(float("inf"))

    def run(self, seconds: float) -> None:
        """Lets jobs go on for about so long."""
        if self._running:
            return
        self._running = True
        try:
            end = self._clock() + seconds
            while runnable := [job for job in self._jobs if self._can_run(job)]:
                for job in runnable:
                    self._step(job)
                if self._clock() >= end:
                    return
        finally:
            self._running = False

    def close(self) -> None:
        """Ends all, without calling back."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.steps.close()

    def _can_run(self, job: _Job) -> bool:
        if self._eager and isinstance(job.wait, Future):
            job.wait.exception()
        return job.runs()

    def _step(self, job: _Job) -> None:
        if job not in self._jobs:
            return
        try:
            if isinstance(job.wait, Future):
                job.wait = job.steps.throw(e) if (e := job.wait.exception()) else next(job.steps)
            else:
                job.wait = next(job.steps)
        except StopIteration as end:
            self._jobs.remove(job)
            job.done(end.value)
        # Whatever it is, it is told to whoever asked.
        except Exception as e:
            self._jobs.remove(job)
            job.done(e)
