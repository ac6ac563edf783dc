"""The processes that share the input: who they are, and whether they see the same."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from stratagem.cluster.channel import Channel
from stratagem.cluster.runtime import Job
from stratagem.data.exchange import Exchange
from stratagem.errors import JobMismatchError

# Distributed datasets of each channel: all processes make them in the same order.
_made: weakref.WeakKeyDictionary[Channel, Any] = weakref.WeakKeyDictionary()


class Workers:
    """The processes that share one distributed dataset. Every process makes one for it, in order.

    Args:
        job: the processes that train together; None for one that trains alone.
    """

    def __init__(self, job: Job | None):
        self.count = 1 if job is None else job.size
        self.index = 0 if job is None else job.rank
        self.may_change = job is not None and job.may_change
        self._job = job
        self._channel = None if job is None else job.channel
        if self._channel is not None:
            numbers = _made.setdefault(self._channel, itertools.count())
            self._name = f"data {next(numbers)}"
        self._passes = itertools.count()

    def check_same(self, seen: Callable[[], str]) -> None:
        """Refuses to go on when the workers do not see the same first batch; see below.

        Once they have changed they are not compared: who has joined begins in the middle.

        Args:
            seen: says what this worker sees; asked only where there is somebody to compare with.
        """
        job = self._job
        if job is None:
            return

        def check() -> None:
            if not job.has_changed:
                check_same_batch(job.channel, self._name, seen())

        job.together(check)

    def exchange(self) -> Exchange:
        """For the next pass over the dataset. Every process calls it."""
        if self._channel is None:
            raise ValueError("Expected several workers. Got one, who has nobody to tell.")
        return Exchange(self._channel, f"{self._name}/pass {next(self._passes)}")


def fingerprint(leaves: Iterable[Any]) -> str:
    """The shapes and dtypes of arrays, and a digest of their contents."""
    digest = hashlib.sha256()
    shapes = []
    for leaf in map(np.asarray, leaves):
        digest.update(np.ascontiguousarray(leaf).tobytes())
        shapes.append(f"{leaf.dtype}{list(leaf.shape)}")
    return f"{', '.join(shapes)} with digest {digest.hexdigest()[:8]}"


def check_same_batch(channel: Channel, stream: str, seen: str) -> None:
    """Refuses a job whose processes do not read the same global batches. Every process calls it.

    Args:
        channel: of the job.
        stream: name of the channel's stream to use.
        seen: the `fingerprint` of the first batch of a pass, or what else tells it from others.

    Raises:
        JobMismatchError: lists what each process read.
    """
    found = channel.stream(stream).all_gather(seen.encode(), "the first batch of the data")
    if len(set(found)) > 1:
        lines = [f"  {n}: {text.decode()}" for n, text in zip(channel.names, found, strict=True)]
        raise JobMismatchError(
            "Expected every process to read the same global batches, of which each takes its "
            "rows. Got as the first batch:\n" + "\n".join(lines) + "\nGive the shuffle of the "
            "dataset a seed. If every process has data of its own, distribute it with "
            "strategy.distribute_datasets_from_function and pass that."
        )
