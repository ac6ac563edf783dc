"""Callbacks for `fit`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from stratagem.errors import BackupError
from stratagem.keras_bridge.backup import Feed
from stratagem.keras_bridge.fit_cut import FitCut
from stratagem.recovery import agreement, preemption
from stratagem.recovery.archive import Archive
from stratagem.recovery.backup import check_keep
from stratagem.recovery.peers import Peers
from stratagem.recovery.termination import TerminationWatch


class BackupAndRestore(FitCut):
    """Makes `fit` go on where it was interrupted, bit for bit, at the step after the last backup.

    A backup is one consistent cut: weights, optimizer, metrics, random state, epoch, step, the
    position in the data, and what other callbacks remember. The next `fit` with the same directory
    restores it and trains the rest; its logs are those of a run without interruption. A backup is
    written while training goes on, and is complete or not there at all. It does not depend on the
    strategy: it may be restored on another number of replicas or processes (then equal to float
    tolerance only).

    The data must be the same, in the same order: arrays and PyDatasets are, with the random state
    that is part of the backup; Grain's iterators are asked; of any other iterable the batches that
    were trained are drawn again and dropped. A PyDataset that changes itself between epochs can
    have `get_state()` and `set_state(state)`; so can a callback of one's own.

    Every process of a job passes the callback; the chief writes, and only it needs the directory.

    Args:
        backup_dir: where the backups are, and nothing else.
        save_freq: "epoch", a number of steps, or False: only before preemption. A backup that is
            due at an epoch's last step is taken after the epoch's end.
        delete_checkpoint: whether the backups are deleted when a fit has run to its end.
        save_before_preemption: on SIGTERM, saves after the step in which it came (of an epoch's
            last step: after its end) and exits with 42. Needs the main thread.
        keep: how many backups stay.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(
        self,
        backup_dir: str | Path,
        save_freq: str | int | bool = "epoch",
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
        keep: int = 2,
    ):
        super().__init__()
        if not backup_dir:
            raise ValueError("backup_dir: expected a directory. Got an empty path.")
        _check_save_freq(save_freq, save_before_preemption)
        check_keep(keep)
        self.backup_dir = Path(backup_dir)
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self.save_before_preemption = save_before_preemption
        self.keep = keep

    def _begin(self, feed: Feed) -> None:
        """What belongs to one call of `fit`."""
        super()._begin(feed)
        self._owed = False
        self._leave_at: int | None = None

    # Events of a fit.

    def after_train_begin(self, feed: Feed) -> None:
        """Restores."""
        self._begin(feed)
        self._archive = Archive(self.backup_dir, self.keep, Peers.of_this_process("backup"))
        feed.stack.callback(self._finish_writing)
        if feed.joined is None:
            self._archive.prepare()
        if self.save_before_preemption:
            self._watch_for_preemption(feed)
        cut = self._archive.load() if feed.joined is None else None
        if cut is not None:
            self._go_on(cut, self._archive.peers.rank)
        elif feed.joined is not None:
            self.follow(feed.joined)

    def after_train_batch(self, batch: int) -> None:
        """Saves when it is time."""
        before = self._step
        super().after_train_batch(batch)
        due = isinstance(self.save_freq, int) and self.save_freq and (
            self._step // self.save_freq > before // self.save_freq
        )  # fmt: skip
        leaving = self._is_leaving()
        if not due and not leaving:
            return
        if self._feed.epoch_is_over(batch):
            self._owed = True
            return
        self._save(in_epoch=True)
        if leaving:
            self._leave()

    def after_epoch(self, epoch: int) -> None:
        """Saves when it is time."""
        super().after_epoch(epoch)
        leaving = self._is_leaving()
        if self._owed or leaving or self.save_freq == "epoch":
            self._save(in_epoch=False)
        self._owed = False
        if leaving:
            self._leave()

    def after_train(self) -> None:
        """Deletes the backups of a finished fit."""
        if self.delete_checkpoint:
            self._archive.remove_all()
        else:
            self._archive.wait()

    # Saving and restoring.

    def _save(self, in_epoch: bool) -> None:
        self.model.jax_state_sync()
        facts, process, arrays = self._facts(), self._process(in_epoch), self._best_weights()
        self._archive.save(self._groups(), facts, process, arrays)

    def _finish_writing(self) -> None:
        """However the fit is left. The other processes may be gone."""
        try:
            self._archive.storage.wait()
        except BackupError as e:
            warnings.warn(str(e), RuntimeWarning, stacklevel=2)

    # Preemption.

    def _watch_for_preemption(self, feed: Feed) -> None:
        self._agreement = agreement.of_this_process("fit", preemption.TOPICS)
        feed.stack.callback(self._agreement.close)
        watch = TerminationWatch(lambda: self._agreement.announce(preemption.TOPICS[0]))
        watch.start()
        feed.stack.callback(watch.stop)

    def _is_leaving(self) -> bool:
        """True after the step that all processes agreed to be the last."""
        topic = preemption.TOPICS[0]
        if not self.save_before_preemption or not self._agreement.announced(topic, self._step):
            return False
        if self._leave_at is None:
            self._leave_at = self._agreement.latest(topic, self._step)
        return self._leave_at is not None and self._step >= self._leave_at

    def _leave(self) -> None:
        self._archive.wait()
        preemption.leave()


def _check_save_freq(save_freq: Any, save_before_preemption: bool) -> None:
    number = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq > 0
    if save_freq is False and not save_before_preemption:
        raise ValueError(
            "save_freq: expected 'epoch' or a number of steps. Got False, which would never save. "
            "Pass save_before_preemption=True with it."
        )
    if save_freq != "epoch" and save_freq is not False and not number:
        raise ValueError(
            "save_freq: expected 'epoch', a number of steps that is at least 1, or False. Got "
            f"{save_freq!r}."
        )
