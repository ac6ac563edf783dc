"""Hooks in `fit` for backups: what happens after all callbacks, and where the data stands.

A backup must see what every callback did to the model, so it is taken after all of them; and it
must know which batches were trained, so that another `fit` goes on with the next one.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import keras

from stratagem import _keras, context
from stratagem.errors import BackupMismatchError
from stratagem.keras_bridge.adapters import OwnBatches
from stratagem.keras_bridge.hooks import wrap
from stratagem.recovery.position import Pass, decoded, encoded, is_checkpointable


class FitObserver(keras.callbacks.Callback):
    """A callback that is called once more, after all callbacks of the event.

    Having methods for the ends of batches, it keeps Keras from calling callbacks in threads.

    Attributes:
        first: whether it comes before other observers.
    """

    first = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing; see the class."""

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing; see the class."""

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing; see the class."""

    def after_train_begin(self, feed: Feed) -> None:
        """After all `on_train_begin`."""

    def after_epoch_begin(self, epoch: int) -> None:
        """After all `on_epoch_begin`; Keras has reset the metrics before."""

    def after_train_batch(self, batch: int) -> None:
        """After all `on_train_batch_end`."""

    def after_epoch(self, epoch: int) -> None:
        """After all `on_epoch_end`."""

    def after_train(self) -> None:
        """After all `on_train_end`: the fit ran to its end."""


class Feed:
    """The batches of one call of `fit`, and where they stand.

    Attributes:
        stack: what is closed when `fit` is left, however.
        callbacks: those of the fit, in order; known from `after_train_begin` on.
        handover: what gives the state to who joins; None in a job that may not change.
        joined: the cut at which this process has joined the others, if it has.
    """

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        self.callbacks: list[keras.callbacks.Callback] = []
        self.observers: list[FitObserver] = []
        self.iterator: Any = None
        self.handover: Any = None
        self.joined: Any = None
        self._pass: Pass | None = None
        self._skip = 0
        self._resumed: tuple[Any, Any] | None = None

    def position(self, in_epoch: bool, in_flight: int = 0) -> dict[str, Any]:
        """Where the data stands, as JSON can hold it.

        Args:
            in_epoch: False after an epoch's end, when the next one usually begins a new pass.
            in_flight: how many of the batches drawn last are to be trained again.
        """
        run = self._pass
        if not in_epoch and (run is None or not self._goes_on(run)):
            run = None
        source = self._source()
        return {
            "pass": None if run is None else run.position(in_flight),
            "random": None if run is None else run.random_state(),
            "source": encoded(source.get_state()) if source is not None else None,
            "batches": self.batches,
        }

    def resume(self, position: dict[str, Any], random: Any, batch: int) -> None:
        """Goes on where `position()` was; before the first batch is drawn.

        Args:
            position: of the process that this one goes on for.
            random: the random state to go on with.
            batch: batches of the epoch that were trained.

        Raises:
            BackupMismatchError: the epochs have another number of batches.
        """
        per = self.iterator.steps_per_execution
        if batch and position["batches"] != self.batches:
            raise BackupMismatchError(
                f"Expected epochs of {position['batches']} batches, as when the backup was taken "
                f"after {batch} of them. Got epochs of {self.batches}. Go on with the same data, "
                "batch size and steps_per_epoch, or name another directory to start anew."
            )
        if batch % per:
            raise BackupMismatchError(
                f"Expected steps_per_execution to divide the {batch} batches that were trained of "
                f"the epoch. Got {per}. Go on with the same steps_per_execution as before."
            )
        self._skip = batch
        self._resumed = (position["pass"], random) if position["pass"] else None
        source = self._source()
        if source is not None and position["source"] is not None:
            source.set_state(decoded(position["source"]))

    @property
    def batches(self) -> int | None:
        """Batches of an epoch, where that is known before."""
        return self.iterator.steps_per_epoch or self.iterator.data_adapter.num_batches

    def epoch_is_over(self, batch: int) -> bool:
        """True when no batch follows the one of this index in its epoch."""
        if self.batches is not None and batch + 1 >= self.batches:
            return True
        known = self.iterator.data_adapter.num_batches is not None
        return not known and self._pass is not None and self._pass.is_over()

    def _goes_on(self, run: Pass) -> bool:
        """True when the next epoch takes its batches from the same pass (`steps_per_epoch`)."""
        return self.iterator.steps_per_epoch and self.iterator._current_iterator is run

    def _source(self) -> Any:
        """The user's PyDataset, where it can say and be told its state."""
        adapter = self.iterator.data_adapter
        if not isinstance(adapter, _keras.PyDatasetAdapter):
            return None
        return adapter.py_dataset if is_checkpointable(adapter.py_dataset) else None

    def begin_pass(self, source: Any) -> Pass:
        """A new pass through the data; the first one after `resume` goes on with an old one."""
        resumed, self._resumed = self._resumed, None
        position, random = resumed or (None, None)
        in_flight = self.iterator.steps_per_execution if self.handover is not None else 0
        self._pass = Pass(source, position, random, in_flight)
        return self._pass

    def from_position(self, items: Iterator[Any]) -> Iterator[Any]:
        """Keras' enumeration of an epoch, without the batches that were trained already."""
        iterator = self.iterator
        skip, self._skip = self._skip, 0
        for _ in range(skip // iterator.steps_per_execution):
            next(items)
        resumed = self._resumed
        for item in items:
            if resumed is not None and iterator.steps_per_epoch:
                # Keras counts the batches of a pass that spans epochs.
                iterator._steps_seen = resumed[0]["drawn"] + iterator.steps_per_execution
            resumed = None
            yield item


_feed: contextvars.ContextVar[Feed | None] = contextvars.ContextVar("stratagem_feed", default=None)


def install() -> None:
    """Attaches the bridge to Keras' callbacks and to what draws the batches of epochs."""
    wrap(_keras.EpochIterator, "__init__", _made)
    wrap(_keras.EpochIterator, "_enumerate_iterator", _enumerate)
    wrap(_keras.JAXEpochIterator, "_get_iterator", _get_iterator)
    for name, after in _EVENTS.items():
        wrap(keras.callbacks.CallbackList, name, after)


def running() -> Feed | None:
    """The feed of the fit that runs now."""
    return _feed.get()


def fed(around: Callable[..., Any]) -> Callable[..., Any]:
    """`fit` with a feed, around what else is around it."""

    def fit(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        feed = Feed()
        token = _feed.set(feed)
        try:
            with feed.stack:
                return around(original, self, *args, **kwargs)
        finally:
            _feed.reset(token)

    return fit


def _made(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    feed = _feed.get()
    if feed is not None and feed.iterator is None:  # the later ones are for validation
        feed.iterator = self


def _observed(iterator: Any) -> Feed | None:
    feed = _feed.get()
    watched = feed is not None and feed.iterator is iterator and feed.observers
    return feed if watched else None


def _enumerate(original: Any, self: Any) -> Any:
    feed = _observed(self)
    return original(self) if feed is None else feed.from_position(original(self))


def _get_iterator(original: Any, self: Any) -> Any:
    feed, adapter = _observed(self), self.data_adapter
    # Without Keras' look-ahead, which moves batches to a device: behind it Grain's iterator cannot
    # be seen, it does not know our own batches, and workers have devices of their own.
    grain = feed is not None and isinstance(adapter, _keras.GrainDatasetAdapter)
    as_they_are = grain or isinstance(adapter, OwnBatches) or context.get_strategy().served
    iterator = adapter.get_jax_iterator() if as_they_are else original(self)
    return iterator if feed is None else feed.begin_pass(iterator)


def _on_train_begin(original: Any, self: Any, logs: Any = None) -> None:
    original(self, logs)
    observers = sorted(
        (c for c in self.callbacks if isinstance(c, FitObserver)), key=lambda c: not c.first
    )
    feed = _feed.get()
    if observers and (feed is None or feed.iterator is None):
        raise RuntimeError(
            f"Expected {type(observers[0]).__name__} in a call of model.fit. Got it in a loop of "
            "its own. Use stratagem.train.Backup there."
        )
    if observers and feed is not None:
        feed.callbacks, feed.observers = list(self.callbacks), observers
        for observer in observers:
            observer.after_train_begin(feed)


def _notifying(after: Callable[..., None]) -> Callable[..., None]:
    """Calls what Keras calls, then the observers of the fit whose callbacks these are."""

    def event(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        feed = _feed.get()
        if feed is not None and feed.observers and feed.observers[0] in self.callbacks:
            for observer in feed.observers:
                after(observer, *args, **kwargs)

    return event


_EVENTS = {
    "on_train_begin": _on_train_begin,
    "on_epoch_begin": _notifying(lambda o, epoch, logs=None: o.after_epoch_begin(epoch)),
    "on_train_batch_end": _notifying(lambda o, batch, logs=None: o.after_train_batch(batch)),
    "on_epoch_end": _notifying(lambda o, epoch, logs=None: o.after_epoch(epoch)),
    "on_train_end": _notifying(lambda o, logs=None: o.after_train()),
}
