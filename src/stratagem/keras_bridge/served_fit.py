"""Where a `fit` under ParameterServerStrategy stands, noted in the job's journal.

A coordinator that is started again runs its program again. Each call of `fit` finds in the journal
which epochs are finished, and of the one that was at work which batches: these are not trained
again. It finds what epochs have reported, too, also one whose training alone is through: so the
history is whole, and callbacks are told of an epoch that only has to be validated. Batches have
numbers in the order in which they are drawn, so the data of an epoch must come in the same order
again: the random state that the epoch began with is noted, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras
import numpy as np

from stratagem.keras_bridge.backup import Feed, FitObserver
from stratagem.keras_bridge.workers import add_callback
from stratagem.recovery import randomness

_log = logging.getLogger("stratagem")


class ServedFit(FitObserver):
    """A callback that notes what is finished, and skips what is.

    Args:
        model: that is trained.
        strategy: its strategy, with a record.
    """

    def __init__(self, model: Any, strategy: Any):
        super().__init__()
        self._fitted, self._strategy, self._record = model, strategy, strategy.record
        self._dispatcher = strategy.coordinator.dispatcher
        self._number = strategy.fits
        strategy.fits += 1
        at = self._record.at
        self._at = at if at.get("fit", -1) == self._number else {}
        self._finished = at.get("fit", -1) > self._number
        self._key: str | None = None
        self._logs: Any = None  # of the epoch, when it is over

    def set_model(self, model: Any) -> None:
        """Keras tells the model; to read `self.model` would take the state out of the loop."""

    def after_train_begin(self, feed: Feed) -> None:
        """Skips epochs that are finished."""
        if not self._finished and not self._at:
            return
        epochs = self.params["epochs"]
        first = epochs if self._finished else self._at["epoch"]
        _log.warning(
            "This job goes on from its journal: fit %d (counted from 0) begins with epoch %d of "
            "%d. The history has those before it as well; metrics of an epoch that was in the "
            "middle of its training have the batches from here on.",
            self._number, first, epochs,
        )  # fmt: skip
        if feed.iterator.steps_per_epoch:
            _log.warning(
                "steps_per_epoch: expected None in a job that goes on, so that the batches of each "
                "epoch are the same again. Got %d: which rows they have depends on the dataset.",
                feed.iterator.steps_per_epoch,
            )
        for history in [c for c in feed.callbacks if isinstance(c, keras.callbacks.History)]:
            for epoch in range(first):
                if (logs := self._record.logs_of(self._name(epoch))) is not None:
                    history.on_epoch_end(epoch, _as_logs(logs))
        self._fitted._initial_epoch = first
        feed.stack.callback(setattr, self._fitted, "_initial_epoch", None)

    def after_epoch_begin(self, epoch: int) -> None:
        """Accounts for the batches of an epoch."""
        random = self._at.get("random") if self._at.get("epoch") == epoch else None
        if random is not None:
            randomness.set_state(random)
        self._record.mark(fit=self._number, epoch=epoch, random=randomness.get_state())
        if self._strategy.unfinished is not None:  # of a fit that has failed
            self._dispatcher.end_data(self._strategy.unfinished)
        key = self._key = self._strategy.unfinished = self._name(epoch)
        plain = self._record.logs_of(key)
        kept = None if plain is None else _as_logs(plain)
        through = functools.partial(self._trained, key, kept)
        self._account(key, self._dispatcher.begin_data(key), kept, through)

    def _trained(
        self, key: str, kept: dict[str, Any] | None, logs: dict[str, Any], ran: bool
    ) -> dict[str, Any]:
        """All batches of an epoch are done; `kept`: what it had reported when they were before."""
        if not ran and kept is not None:
            return kept
        if not ran:
            _log.warning(
                "All batches of %s were finished when this job was left, but what they report was "
                "not noted yet: it is NaN in the history, and for callbacks.", key,
            )  # fmt: skip
            logs = jax.tree.map(lambda x: np.full(np.shape(x), math.nan), logs)
        self._record.logs(key, _plain(logs))
        return logs

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Looked at again when all callbacks have added to it."""
        self._logs = logs

    def after_epoch(self, epoch: int) -> None:
        """An epoch is finished."""
        self._record.logs(self._name(epoch), _plain(self._logs or {}))
        self._record.mark(fit=self._number, epoch=epoch + 1)
        self._release()

    def after_train(self) -> None:
        """All are."""
        self._record.mark(fit=self._number + 1, epoch=0)

    def end(self) -> None:
        """`fit` is left, however; an epoch that was not finished stays in the journal."""
        self._account(None)

    def _name(self, epoch: int) -> str:
        return f"fit {self._number} epoch {epoch}"

    def _account(self, key: str | None, *about: Any) -> None:
        step = self._fitted.train_function
        if step is not None:
            step.account(key, *about)

    def _release(self) -> None:
        if self._key is not None:
            self._account(None)
            self._dispatcher.end_data(self._key)
            self._key = self._strategy.unfinished = None


def _plain(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Logs as JSON can hold them; flat, as Keras' history has them."""
    plain: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            plain |= _plain(value)
            continue
        with contextlib.suppress(TypeError, ValueError):  # callbacks add what they like to logs
            plain[name] = np.asarray(value, np.float64).tolist()
    return plain


def _as_logs(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(x) if isinstance(x, list) else x for name, x in plain.items()}


def fit(original: Callable[..., Any], model: Any, strategy: Any, *args: Any, **kwargs: Any) -> Any:
    """`fit` of a model of a served strategy; with a record it is noted what is finished."""
    if strategy.record is None:
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    observer = ServedFit(model, strategy)
    add_callback(bound.arguments, observer)
    try:
        return original(*bound.args, **bound.kwargs)
    finally:
        observer.end()
