"""Callbacks for `fit`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from stratagem.errors import BackupError
from stratagem.keras_bridge.backup import Feed, FitObserver
from stratagem.recovery import agreement, preemption, randomness, state
from stratagem.recovery.archive import Archive, Cut
from stratagem.recovery.backup import check_keep
from stratagem.recovery.peers import Peers
from stratagem.recovery.position import decoded, encoded, is_checkpointable
from stratagem.recovery.termination import TerminationWatch

# What callbacks of Keras remember from epoch to epoch, in public attributes.
_REMEMBERED: Mapping[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


class BackupAndRestore(FitObserver):
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
        self._begin()

    def _begin(self) -> None:
        """What belongs to one call of `fit`."""
        self._epoch = 0
        self._batch = 0  # batches of the epoch that were trained
        self._step = 0  # of all epochs
        self._owed = False
        self._cut: Cut | None = None
        self._leave_at: int | None = None

    # Events of a fit.

    def after_train_begin(self, feed: Feed) -> None:
        """Restores."""
        self._begin()
        self._feed = feed
        self._archive = Archive(
            self.backup_dir, self.keep, Peers.of_this_process(f"backup {self.backup_dir}")
        )
        self._archive.prepare()
        feed.stack.callback(self._finish_writing)
        if self.save_before_preemption:
            self._watch_for_preemption(feed)
        self._cut = self._archive.load()
        if self._cut is None:
            return
        self._cut.check(self._groups())
        fit = self._cut.facts["fit"]
        self._epoch, self._batch, self._step = fit["epoch"], fit["batch"], fit["step"]
        self._restore(self._cut)
        process = self._process(self._cut)
        feed.resume(process["position"], process["random"], self._batch)
        # After a `stop_training` there is no epoch to go on with.
        epochs = self.params["epochs"]
        self.model._initial_epoch = epochs if fit["stopped"] else self._epoch
        feed.stack.callback(setattr, self.model, "_initial_epoch", None)

    def after_epoch_begin(self, epoch: int) -> None:
        """Restores again what the beginning of an epoch changed, in the middle of one."""
        cut, self._cut = self._cut, None
        if cut is not None and self._batch:
            self._restore(cut)
        self._epoch = epoch

    def after_train_batch(self, batch: int) -> None:
        """Saves when it is time."""
        before, trained = self._step, batch + 1 - self._batch
        self._batch, self._step = batch + 1, before + trained
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
        self._epoch, self._batch = epoch + 1, 0
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

    def _groups(self) -> dict[str, list[Any]]:
        return state.collect(model=self.model)

    def _save(self, in_epoch: bool) -> None:
        self.model.jax_state_sync()
        position = self._feed.position(in_epoch)
        random = position.pop("random") or randomness.get_state()
        facts = {
            "fit": {
                "epoch": self._epoch,
                "batch": self._batch,
                "step": self._step,
                "stopped": bool(self.model.stop_training),
            },
            "callbacks": [_memory(c) for c in self._feed.callbacks],
        }
        process = {"random": random, "position": position}
        self._archive.save(self._groups(), facts, process, _best_weights(self._feed.callbacks))

    def _restore(self, cut: Cut) -> None:
        cut.apply(self._groups())
        for callback, memory in zip(self._feed.callbacks, cut.facts["callbacks"], strict=False):
            _remember(callback, memory)
        _give_best_weights(self._feed.callbacks, cut.arrays)
        randomness.set_state(self._process(cut)["random"])

    def _process(self, cut: Cut) -> Any:
        """What this process said of itself; of a larger job than before, what the last one did."""
        return cut.processes[min(self._archive.peers.rank, len(cut.processes) - 1)]

    def _finish_writing(self) -> None:
        """However the fit is left. The other processes may be gone."""
        try:
            self._archive.storage.wait()
        except BackupError as e:
            warnings.warn(str(e), RuntimeWarning, stacklevel=2)

    # Preemption.

    def _watch_for_preemption(self, feed: Feed) -> None:
        self._agreement = agreement.of_this_process(f"fit {self.backup_dir}", preemption.TOPICS)
        feed.stack.callback(self._agreement.close)
        watch = TerminationWatch(lambda: self._agreement.announce(preemption.TOPICS[0]))
        watch.start()
        feed.stack.callback(watch.stop)

    def _is_leaving(self) -> bool:
        """True after the step that all processes agreed to be the last."""
        topic = preemption.TOPICS[0]
        if not self.save_before_preemption or not self._agreement.announced(topic):
            return False
        if self._leave_at is None:
            self._leave_at = self._agreement.latest(topic, self._step)
        return self._step >= self._leave_at

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


def _memory(callback: Any) -> Any:
    """What a callback remembers, as JSON can hold it, with the name of its class."""
    name = type(callback).__name__
    if is_checkpointable(callback):
        return [name, encoded(callback.get_state())]
    attributes = next((a for kind, a in _REMEMBERED.items() if isinstance(callback, kind)), ())
    return [name, {a: encoded(getattr(callback, a, None)) for a in attributes}]


def _remember(callback: Any, memory: Any) -> None:
    """Gives a callback its memory back, where it is the same one."""
    name, values = memory
    if name != type(callback).__name__:
        return
    if is_checkpointable(callback):
        callback.set_state(decoded(values))
        return
    for attribute, value in values.items():
        setattr(callback, attribute, value)


def _best_weights(callbacks: Sequence[Any]) -> dict[str, np.ndarray]:
    """The weights that EarlyStopping holds, by the place of the callback and theirs."""
    return {
        f"callback {i} best weight {j}": np.array(weight)
        for i, callback in enumerate(callbacks)
        for j, weight in enumerate(getattr(callback, "best_weights", None) or ())
    }


def _give_best_weights(callbacks: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> None:
    for i, callback in enumerate(callbacks):
        prefix = f"callback {i} best weight "
        found = {int(n.removeprefix(prefix)): a for n, a in arrays.items() if n.startswith(prefix)}
        if found and isinstance(callback, keras.callbacks.EarlyStopping):
            callback.best_weights = [found[j] for j in sorted(found)]
