"""Where a call of `fit` stands, said as one consistent cut, and gone on with from one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from stratagem.keras_bridge.backup import Feed, FitObserver
from stratagem.recovery import randomness, state
from stratagem.recovery.archive import Cut
from stratagem.recovery.position import decoded, encoded, is_checkpointable

# What callbacks of Keras remember from epoch to epoch, in public attributes.
_REMEMBERED: Mapping[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


class FitCut(FitObserver):
    """A callback that can say where its `fit` stands, and make it go on from there.

    A cut holds the variables, the random state, epoch and step, the position in the data, and what
    the other callbacks remember.
    """

    def set_model(self, model: Any) -> None:
        """Keeps the model: to read `self.model` takes the state out of the loop of `fit`."""
        super().set_model(model)
        self._fitted = model

    def _begin(self, feed: Feed) -> None:
        """What belongs to one call of `fit`."""
        self._feed = feed
        self._epoch = 0
        self._batch = 0  # batches of the epoch that were trained
        self._step = 0  # of all epochs
        self._cut: Cut | None = None

    def after_epoch_begin(self, epoch: int) -> None:
        """Restores again what the beginning of an epoch changed, in the middle of one."""
        cut, self._cut = self._cut, None
        if cut is not None and self._batch:
            self._restore(cut)
        self._epoch = epoch

    def after_train_batch(self, batch: int) -> None:
        """Counts."""
        trained = batch + 1 - self._batch
        self._batch, self._step = batch + 1, self._step + trained

    def after_epoch(self, epoch: int) -> None:
        """Counts."""
        self._epoch, self._batch = epoch + 1, 0

    def _groups(self) -> dict[str, list[Any]]:
        return state.collect(model=self._fitted)

    def _facts(self) -> dict[str, Any]:
        """What all processes say alike."""
        fit = {
            "epoch": self._epoch,
            "batch": self._batch,
            "step": self._step,
            "stopped": bool(self._fitted.stop_training),
        }
        return {"fit": fit, "callbacks": _memories(self._feed.callbacks)}

    def _best_weights(self) -> dict[str, np.ndarray]:
        return _best_weights(self._feed.callbacks)

    def _process(self, in_epoch: bool, in_flight: int = 0) -> dict[str, Any]:
        """What this process says of itself."""
        position = self._feed.position(in_epoch, in_flight)
        random = position.pop("random") or randomness.get_state()
        return {"random": random, "position": position}

    def follow(self, cut: Cut) -> None:
        """Takes the place in the fit from a cut that another observer goes on from."""
        fit = cut.facts["fit"]
        self._epoch, self._batch, self._step = fit["epoch"], fit["batch"], fit["step"]

    def _go_on(self, cut: Cut, rank: int) -> None:
        """Makes the fit go on from a cut; before its first epoch.

        Args:
            cut: where.
            rank: of the process to go on for.

        Raises:
            BackupMismatchError: it is one of another model, or of other data.
        """
        cut.check(self._groups())
        self._cut, self._rank = cut, rank
        self.follow(cut)
        self._restore(cut)
        process = self._said(cut)
        self._feed.resume(process["position"], process["random"], self._batch)
        # After a `stop_training` there is no epoch to go on with.
        epochs = self.params["epochs"]
        self._fitted._initial_epoch = epochs if cut.facts["fit"]["stopped"] else self._epoch
        self._feed.stack.callback(setattr, self._fitted, "_initial_epoch", None)

    def _restore(self, cut: Cut) -> None:
        cut.apply(self._groups())
        _remember(self._feed.callbacks, cut.facts["callbacks"])
        _give_best_weights(self._feed.callbacks, cut.arrays)
        randomness.set_state(self._said(cut)["random"])

    def _said(self, cut: Cut) -> Any:
        """What this process said of itself; of a larger job than before, what the last one did."""
        return cut.processes[min(self._rank, len(cut.processes) - 1)]


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Callbacks by class and number: those that write files are on the chief alone."""
    counts: dict[str, int] = defaultdict(int)
    for callback in callbacks:
        name = type(callback).__name__
        yield f"{name} {counts[name]}", callback
        counts[name] += 1


def _memories(callbacks: Sequence[Any]) -> dict[str, Any]:
    """What callbacks remember, as JSON can hold it."""
    return {name: _memory(callback) for name, callback in _named(callbacks)}


def _memory(callback: Any) -> Any:
    if is_checkpointable(callback):
        return encoded(callback.get_state())
    attributes = next((a for kind, a in _REMEMBERED.items() if isinstance(callback, kind)), ())
    return {a: encoded(getattr(callback, a, None)) for a in attributes}


def _remember(callbacks: Sequence[Any], memories: Mapping[str, Any]) -> None:
    """Gives callbacks their memory back."""
    for name, callback in _named(callbacks):
        if name not in memories:
            continue
        if is_checkpointable(callback):
            callback.set_state(decoded(memories[name]))
            continue
        for attribute, value in memories[name].items():
            setattr(callback, attribute, value)


def _best_weights(callbacks: Sequence[Any]) -> dict[str, np.ndarray]:
    """The weights that EarlyStopping holds, by the name of the callback and their place."""
    return {
        f"{name} best weight {i}": np.array(weight)
        for name, callback in _named(callbacks)
        for i, weight in enumerate(getattr(callback, "best_weights", None) or ())
    }


def _give_best_weights(callbacks: Sequence[Any], arrays: Mapping[str, np.ndarray]) -> None:
    for name, callback in _named(callbacks):
        prefix = f"{name} best weight "
        found = {int(n.removeprefix(prefix)): a for n, a in arrays.items() if n.startswith(prefix)}
        if found and isinstance(callback, keras.callbacks.EarlyStopping):
            callback.best_weights = [found[i] for i in sorted(found)]
