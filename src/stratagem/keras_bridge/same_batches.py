"""The first batch of each pass is the same on all processes of a job, or training stops."""

from __future__ import annotations

import logging
from typing import Any

import jax

from stratagem import _keras
from stratagem.data.workers import check_same_batch, fingerprint
from stratagem.keras_bridge.hooks import wrap

_log = logging.getLogger("stratagem")


class _Passes:
    """Passes over data that Keras began in this process."""

    begun = 0


def install() -> None:
    """Attaches the bridge to what begins a pass."""
    wrap(_keras.EpochIterator, "__iter__", _begin)


def _begin(original: Any, self: Any) -> Any:
    _Passes.begun += 1
    return original(self)


class SameBatches:
    """Compares the first batch of each pass between processes; for the step of one model.

    Args:
        job: the processes; None for one that has nobody to compare with.
    """

    def __init__(self, job: Any):
        self._job = job
        self._checked = -1

    def check(self, batch: Any) -> None:
        """Every process calls it with every batch that Keras read.

        Raises:
            JobMismatchError: lists what each process read.
        """
        if self._job is None or self._checked == _Passes.begun:
            return
        if self._job.has_changed:  # in the middle of a pass, which who has joined has just begun
            return
        if self._checked < 0:
            _log.info(
                "Input: every process reads all of it and takes its rows. With "
                "stratagem.data.batches or stratagem.data.from_files each reads only its own."
            )
        self._checked = _Passes.begun
        check_same_batch(self._job.channel, "batches", fingerprint(jax.tree.leaves(batch)))
