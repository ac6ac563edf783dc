"""`fit`, `evaluate` and `predict` under ParameterServerStrategy.

Keras keeps its loop, its callbacks and its data. Where it asks for the next step's function, it
gets one that takes the next batch and schedules the step; it does not wait for it. Each batch is
one closure, so each row is trained on once, whichever worker is lost. At the end of an epoch Keras
brings the state back into the model: there the closures are waited for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np

from stratagem import _keras, context
from stratagem.coordinator import ClusterCoordinator
from stratagem.coordinator.plans import Call, Plans
from stratagem.coordinator.remote_value import RemoteValue
from stratagem.data import RebatchRule, split_rows
from stratagem.data.split import row_slices
from stratagem.keras_bridge import of_parts, postponed
from stratagem.keras_bridge.hooks import wrap
from stratagem.keras_bridge.on_workers import Numbered, WorkerBatches, batches_of
from stratagem.keras_bridge.state import state_groups, traced_step
from stratagem.strategies import tallied
from stratagem.strategies.parameter_server import ASYNCHRONOUS

_LOG_SECONDS = 0.2  # between looks at the metrics for batch callbacks
_log = logging.getLogger("stratagem")

_AHEAD = 4  # batches that wait for each worker

Through: TypeAlias = Callable[[dict[str, Any], bool], dict[str, Any]]


def install() -> None:
    """Attaches the bridge to how Keras' JAX trainer keeps state while it trains."""
    wrap(_keras.JAXTrainer, "_get_jax_state", _get_jax_state)
    wrap(_keras.JAXTrainer, "jax_state_sync", _jax_state_sync)
    wrap(_keras.JAXTrainer, "_get_metrics_result_or_logs", _result_or_logs)


class ServedStep:
    """One kind of step of a model, on workers.

    Args:
        model: a compiled Keras model.
        strategy: its ParameterServerStrategy.
        kind: "train", "test" or "predict".

    Attributes:
        logs: what it said last of how the epoch goes.
    """

    def __init__(self, model: Any, strategy: Any, kind: str):
        self._model, self._strategy, self._kind = model, strategy, kind
        self._coordinator = ClusterCoordinator(strategy)
        self._groups = state_groups(model, kind)
        flat = [v for group in self._groups for v in group]
        self._plans = Plans(strategy, strategy.executor.replica, touches=flat, fit=True)
        self._most = _AHEAD * len(strategy.workers)
        self._in_rounds = strategy.consistency.mode != ASYNCHRONOUS and kind == "train"
        # Whoever comes or goes, a round is the parts of one batch, and parts have their numbers.
        self._shares = len(strategy.workers) if self._in_rounds else 1
        self._divides = False  # its losses, by something else than rows
        self._beforehand: dict[Any, Any] = {}  # what computes by what, by the shapes of a batch
        self._warned = False
        self._first: list[RemoteValue] | None = None  # the parts of the first step of an epoch
        self._batches = postponed.Batches()
        self._last: Any = None
        self.logs: dict[str, Any] = {}
        self._through: Through | None = None
        self._looked = 0.0
        self._key: str | None = None  # of the epoch, where it is noted what is finished
        self._finished: Any = ()
        self._count = 0  # closures of the epoch, finished ones too
        self._ran = False  # whether any of these was not finished before

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Schedules as many steps as there are in an execution; StopIteration where data end."""
        values = self._schedule(next(iterator))
        for _ in range(self._model.steps_per_execution - 1):
            try:
                values += self._schedule(next(iterator))
            except StopIteration:
                break
        if self._kind == "predict":
            return later(values, self._tree), state
        if not values:  # finished before this process began
            self.logs = self.logs or self._results()
            return self.logs, state
        self._ran = True
        if self._first is None:
            self._first, self._looked = values, 0.0
        return self._latest(), state

    def account(
        self, key: str | None, finished: Any = (), logs: Any = None, through: Through | None = None
    ) -> None:
        """An epoch begins, whose batches are noted.

        Args:
            key: names it in the journal; None: no more of it.
            finished: numbers of closures that were finished before, and are skipped.
            logs: what it had reported when all of them were.
            through: takes its logs when all batches are done, and whether any was in this
                process; gives the logs that `fit` is to have.
        """
        self._key, self._finished, self._count = key, finished, 0
        self.logs, self._through, self._ran = logs or {}, through, False

    def told(self, logs: dict[str, Any]) -> dict[str, Any]:
        """All batches of an epoch are done: the logs that `fit` is to have."""
        return logs if self._through is None else self._through(logs, self._ran)

    def settle(self) -> None:
        """Waits for all that was scheduled; the metrics then hold it."""
        try:
            self._coordinator.join()
            self._batches.settle()
        finally:
            self._batches.forget()
            self._first = None

    def _schedule(self, batch: Any) -> list[RemoteValue]:
        """One step: a closure, or in synchronous training one for each worker's share of rows."""
        elsewhere = batches_of(batch)
        if isinstance(elsewhere, WorkerBatches):
            return [self._read_there(elsewhere)]
        if isinstance(elsewhere, Numbered):
            rows = elsewhere.rows
        else:
            batch = jax.tree.map(np.asarray, batch)
            rows = next((len(x) for x in jax.tree.leaves(batch) if np.ndim(x)), 1)
        sizes = [n for n in split_rows(rows, self._shares, RebatchRule.EVEN) if n]
        first, self._count = self._count, self._count + len(sizes)
        every = zip(range(first, self._count), sizes, row_slices(sizes), strict=True)
        cuts = [cut for cut in every if cut[0] not in self._finished]
        values: list[RemoteValue] = []
        batch_number = self._batches.begin(len(cuts))
        divisors = functools.cache(lambda: self._divisors(batch))  # of all parts
        for part_number, (number, n, cut) in enumerate(cuts):
            noted = None if self._key is None else (self._key, number)
            about: Any = {"rows": n, "share": n / rows, "noted": noted, "parts": len(cuts)}
            about["place"] = batch_number, part_number
            if isinstance(elsewhere, Numbered):
                about["step"], about["at"] = self._next_step, elsewhere.at(cut)
                values.append(self._submit(elsewhere.iterator, **about))
            else:
                part = jax.tree.map(lambda x, cut=cut: x[cut] if np.ndim(x) else x, batch)
                values.append(self._submit(part, **about, divisors=divisors))
        return values

    def _read_there(self, batches: WorkerBatches) -> RemoteValue:
        """A step on the next batch of the worker that runs it."""
        if self._kind == "predict":
            raise ValueError(
                "Expected data whose order is known, to predict. Got a DatasetCreator, whose "
                "batches workers read in no special order. Pass arrays or a dataset."
            )
        place = self._batches.begin(1), 0
        value = self._submit(batches.iterator, step=self._next_step, place=place)
        batches.scheduled(value)
        return value

    def _next_step(self, iterator: Any, divisors: Any) -> Any:
        return self._step(next(iterator), divisors)

    def _submit(
        self, batch: Any, rows: int | None = None, share: float | None = None, step: Any = None,
        noted: Any = None, at: Any = None, divisors: Any = lambda: None, parts: int = 0,
        place: tuple[int, int] = (0, 0),
    ) -> RemoteValue:  # fmt: skip
        with self._strategy.scope():
            call = self._call(step or self._step, batch, divisors)
        self._tree = next(iter(call.family.plans.values())).parts.out_tree
        value = self._coordinator.submit(
            call, counts=self._kind == "train", rows=rows, most=self._most, batch=noted, at=at,
            share=share, parts=parts if self._in_rounds else 0,
        )  # fmt: skip
        if self._kind != "predict":
            value.add_done_callback(functools.partial(self._done, *place, rows or 1))
        return value

    def _call(self, step: Any, batch: Any, divisors: Callable[[], Any]) -> Call:
        """A step on a part of a batch; `divisors` gives what the whole has, where that is known."""
        known = divisors() if self._divides else None
        call = self._plans.find(step, (batch, known), {})
        if self._divides and known is None:  # as tracing has shown, the first time perhaps
            if (known := divisors()) is not None:
                return self._plans.find(step, (batch, known), {})
            if not self._warned:
                self._warned = True
                _log.warning(
                    "The loss is divided by what a mask leaves, or by the sum of weights. Each "
                    "worker divides by that of its own part of the batch, and gradients are "
                    "weighed by rows: where parts have not equally much, that is not quite the "
                    "step of one device. It is with arrays, or batches that this process reads, "
                    "and masks and weights that come from those alone."
                )
        return call

    def _step(self, batch: Any, divisors: Any) -> Any:
        """What is traced; gives the logs, and what updates of metrics here are made of."""
        if self._kind == "predict":
            return traced_step(self._model, self._kind, self._groups, batch)
        of, updates = of_parts.Divisors(divisors), postponed.Updates(parts=self._shares > 1)
        with contextlib.ExitStack() as stack:
            stack.enter_context(postponed.collected(updates))
            if self._shares > 1:
                stack.enter_context(of_parts.traced(of))
            result = traced_step(self._model, self._kind, self._groups, batch)
        self._divides = self._divides or bool(of.own)
        self._batches.updates, arrays = updates, updates.given()
        return result, arrays

    def _divisors(self, batch: Any) -> Any:
        """What a whole batch has for each row of what losses are divided by; None if not known."""
        leaves, tree = jax.tree.flatten(batch)
        key = (tree, *((x.shape, x.dtype) for x in leaves))
        if key not in self._beforehand:
            self._beforehand[key] = self._plans.beforehand(self._own_divisors, batch)
        compute = self._beforehand[key]
        return None if compute is None else tuple(np.asarray(x) for x in compute(batch))

    def _own_divisors(self, batch: Any) -> Any:
        of, updates = of_parts.Divisors(), postponed.Updates(parts=True)
        with of_parts.traced(of), postponed.collected(updates):
            traced_step(self._model, self._kind, self._groups, batch)
        return tuple(of.own)

    def _done(self, batch: int, part: int, rows: int, value: RemoteValue) -> None:
        arrays: list[Any] = []
        if not value.cancelled() and value.exception() is None and not value.ended:
            self._last, arrays = value.result()
        self._batches.came(batch, part, rows, arrays)

    def _latest(self) -> dict[str, Any]:
        """The logs of the steps that are done by now: looked at from time to time, and waited for
        at the first step of an epoch alone, since there are none before."""
        now = time.monotonic()
        if now - self._looked >= _LOG_SECONDS:
            for value in self._first or ():
                value.result()
            self._batches.settle()
            self.logs = self._results()
            self._looked = time.monotonic()
        return self.logs

    def _results(self) -> dict[str, Any]:
        with tallied.one_moment(v for m in self._model.metrics for v in m.variables):
            logs = self._model.get_metrics_result()
        # A step of the user's own may report something else.
        logs = logs if set(logs) == set(self._last or logs) else self._last
        return jax.tree.map(np.asarray, logs)  # some metrics have several numbers


class Later:
    """An array of results that workers are still computing; np.asarray waits for it.

    Args:
        values: of the closures whose results follow each other by rows.
        leaf: which leaf of their results.
    """

    def __init__(self, values: list[RemoteValue], leaf: int):
        self._values, self._leaf = values, leaf

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        parts = [jax.tree.leaves(value.result())[self._leaf] for value in self._values]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.asarray(whole, dtype)


def later(values: list[RemoteValue], tree: Any) -> Any:
    """The structure of the results of closures, with arrays that are not there yet."""
    return jax.tree.unflatten(tree, [Later(values, i) for i in range(tree.num_leaves)])


def _get_jax_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Under a served strategy the state stays where it is."""
    if _strategy() is None:
        return original(self, *args, **kwargs)
    groups = ("trainable", "non_trainable", "optimizer", "metrics")
    return tuple([] for group in groups if kwargs.get(f"{group}_variables"))


def _jax_state_sync(original: Any, self: Any) -> None:
    if _strategy() is None:
        original(self)
        return
    if not self._jax_state_synced:
        for kind in ("train", "test", "predict"):
            function = getattr(self, f"{kind}_function")
            if isinstance(function, ServedStep):
                function.settle()
        self._jax_state_synced = True


def _result_or_logs(original: Any, self: Any, logs: Any) -> Any:
    """What an epoch has reported; of a training that is noted, as its `fit` knows it."""
    found, step = original(self, logs), self.train_function
    return step.told(found) if isinstance(step, ServedStep) and logs is step.logs else found


def _strategy() -> Any:
    """The served strategy that trains a model, if one does."""
    strategy = context.get_strategy()
    return strategy if strategy.served else None
