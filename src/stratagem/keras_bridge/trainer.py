"""`fit`, `evaluate` and `predict`: Keras' own trainer, its step run on all replicas.

Keras keeps the loop, the callbacks and the data; it asks `make_train_function` and its sisters for
a function `(state, iterator) -> (results, state)`. Under a strategy that function is a compiled
step of the strategy, traced from the model's own `train_step`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import jax
import keras
import numpy as np

from stratagem import _keras, context, variables
from stratagem.data import RebatchRule, split_rows
from stratagem.data.placement import Placement
from stratagem.data.split import row_slices
from stratagem.errors import StrategyMismatchError
from stratagem.keras_bridge import backup, served_fit, workers
from stratagem.keras_bridge.ahead import Ahead
from stratagem.keras_bridge.distributed_input import GlobalBatch, adapt, as_global, join
from stratagem.keras_bridge.handover import value_from
from stratagem.keras_bridge.hooks import wrap
from stratagem.keras_bridge.same_batches import SameBatches
from stratagem.keras_bridge.served import ServedStep
from stratagem.keras_bridge.state import state_groups, traced_step
from stratagem.step.execute import Compiled, Executor, Fit
from stratagem.strategies import Strategy
from stratagem.values import PerReplica

_log = logging.getLogger("stratagem")
_STEPS = {"train_step": "train", "test_step": "test", "predict_step": "predict"}
_ENTRY_POINTS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)


def install() -> None:
    """Attaches the bridge to Keras' JAX trainer."""
    for name in _ENTRY_POINTS:
        wrap(_keras.JAXTrainer, name, backup.fed(_in_scope) if name == "fit" else _in_scope)
    wrap(_keras.EpochIterator, "_interrupted_warning", _end_of_data)
    wrap(Strategy, "lower", _lower)
    wrap(_keras.JAXTrainer, "make_train_function", _make("train"))
    wrap(_keras.JAXTrainer, "make_test_function", _make("test"))
    wrap(_keras.JAXTrainer, "make_predict_function", _make("predict"))


def strategy_of(model: Any) -> Any:
    """The strategy that a model belongs to, or None for plain Keras.

    A model built outside any scope belongs to the strategy that is current.

    Raises:
        StrategyMismatchError: the model's and optimizer's variables have several strategies, or
            another one than the current.
    """
    found: dict[int, tuple[Any, Any]] = {}
    optimizer = getattr(model, "optimizer", None)
    for variable in [*model.variables, *(optimizer.variables if optimizer is not None else ())]:
        where = variables.home(variable)
        if where is not None:
            found.setdefault(id(where.strategy), (where.strategy, variable))
    if context.has_strategy():
        current = context.get_strategy()
        found.setdefault(id(current), (current, None))
    if len(found) > 1:
        lines = [
            f"  {strategy!r}: " + ("the current scope" if v is None else f"variable {v.path!r}")
            for strategy, v in found.values()
        ]
        raise StrategyMismatchError(
            f"Expected model {model.name!r} and its optimizer in one strategy. Got "
            f"{len(found)}:\n" + "\n".join(lines) + "\nBuild and compile the model in the scope of "
            "the strategy that trains it, and reuse that strategy object."
        )
    return next(iter(found.values()))[0] if found else None


def _in_scope(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Variables that a model creates at its first batch belong to its strategy too."""
    strategy = strategy_of(self)
    if strategy is None:
        return original(self, *args, **kwargs)
    if keras.distribution.distribution() is not None:
        raise ValueError(
            f"Expected one way to distribute model {self.name!r}: it belongs to {strategy!r}. Got "
            f"a keras.distribution as well, {keras.distribution.distribution()!r}. Call "
            "keras.distribution.set_distribution(None), or build the model outside the strategy."
        )
    if strategy.described:
        strategy.refuse(original.__name__)
    args = tuple(adapt(data, strategy) for data in args)
    kwargs = {name: adapt(data, strategy) for name, data in kwargs.items()}
    args, kwargs = workers.prepare(strategy, original, args, kwargs)
    with strategy.scope():
        if strategy.served and original.__name__ == "fit":
            return served_fit.fit(original, self, strategy, *args, **kwargs)
        return original(self, *args, **kwargs)


def _end_of_data(original: Any, self: Any) -> None:
    """The end of a dataset of unknown length is the end of the epoch, nothing to warn of (R39)."""
    if self.steps_per_epoch or not context.has_strategy():
        original(self)


def _lower(original: Any, self: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`strategy.lower(model.train_step, (batch,))` lowers the step as `fit` runs it."""
    model, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    if not isinstance(model, _keras.JAXTrainer) or name not in _STEPS:
        return original(self, fn, args, kwargs)
    (batch,) = args
    with self.scope():
        model._symbolic_build(data_batch=batch)
        return ModelStep(model, self, _STEPS[name]).lower(batch)


def _make(kind: str) -> Any:
    attribute = f"{kind}_function"

    def make(original: Any, self: Any, force: bool = False) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, force=force)
        # What Keras made before the model came to the strategy is not kept.
        made_for = getattr(getattr(self, attribute), "_stratagem_strategy", None)
        if made_for is strategy and not force:
            return None
        if strategy.num_replicas_in_sync > 1 or strategy.served:
            _refuse_what_needs_one_replica(self, strategy)
        function: Any
        if strategy.served:
            function = ServedStep(self, strategy, kind)
        else:
            step = ModelStep(self, strategy, kind)
            function = self._make_function(step, concatenate_outputs=kind == "predict")
        function._stratagem_strategy = strategy
        setattr(self, attribute, function)
        return None

    return make


def _refuse_what_needs_one_replica(model: Any, strategy: Any) -> None:
    if model.run_eagerly:
        raise ValueError(
            f"Expected run_eagerly=False for model {model.name!r} under {strategy!r}: its step "
            "is one program for all replicas. Got run_eagerly=True. Debug with "
            "stratagem.OneDeviceStrategy, or print with jax.debug.print."
        )
    stateful = [
        layer.name
        for layer in model._flatten_layers(include_self=False, recursive=True)
        if getattr(layer, "stateful", False)
    ]
    if stateful:
        raise ValueError(
            f"Expected layers with stateful=False in model {model.name!r} under {strategy!r}: the "
            "state of a stateful layer belongs to the rows of one batch, which are dealt to the "
            f"replicas anew at each step. Got {stateful}. Train with "
            "stratagem.OneDeviceStrategy, or give the layers their initial state as an input."
        )


class ModelStep:
    """One training, test or prediction step of a model, on all replicas.

    Args:
        model: a compiled Keras model.
        strategy: its strategy.
        kind: "train", "test" or "predict".
    """

    def __init__(self, model: Any, strategy: Any, kind: str):
        self._model = model
        self._strategy = strategy
        self._kind = kind
        self._groups = state_groups(model, kind)
        self._flat = [v for group in self._groups for v in group]
        # Its own executor, so that programs go when the model goes.
        self._executor = Executor(strategy, strategy.executor.replica, touches=self._flat)
        self._position = {id(v): i for i, v in enumerate(self._flat)}
        self._placement: Placement | None = None  # made anew where the processes change
        self._said = False
        self._same = SameBatches(strategy.job)
        self._ahead = Ahead(strategy, lambda other: ModelStep(model, other, kind))
        self._last = -1  # units of the job when this step was made last

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Keras' step interface: `(state, batch) -> (results, state)`, state as lists of arrays."""
        try:
            if self._strategy.job is not None:
                return self._in_step(state, batch)
            return self._run(state, batch)
        except BaseException:
            self._give_back(state)
            raise

    @property
    def doing(self) -> str:
        """What it is, in words."""
        return f"a {self._kind} step of model {self._model.name!r}"

    def _give_back(self, state: Any) -> None:
        """Keras takes the values out of a model's variables; a failed step puts them back."""
        for variable, value in zip(self._flat, (v for group in state for v in group), strict=True):
            if variable._value is None and not value.is_deleted():
                variable._value = value

    def _in_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The step, done again where it must be, since other processes were lost in it."""

        def again(done: tuple[Any, Any]) -> None:
            _, after = self._run(state, batch)
            states = ([v for group in s for v in group] for s in (done[1], after))
            for variable, old, new in zip(self._flat, *states, strict=True):
                self._strategy.replace_state(variable, old, new)

        doing = self.doing
        fit = self._handover()
        if fit is None:
            return self._strategy.in_step(lambda: self._run(state, batch), again, doing)
        if fit.skips():
            return None, state
        self._admit()
        give = lambda: fit.give(value_from(self._values(state)))  # noqa: E731
        done = self._strategy.in_step(lambda: self._run(state, batch), again, doing, give)
        fit.stepped()
        self._ahead.stepped(batch)
        self._last = self._strategy.job.lockstep.finished
        return done

    def _handover(self) -> Any:
        feed = backup.running() if self._kind == "train" else None
        return None if feed is None else feed.handover

    def _admit(self) -> None:
        """Lets those who wait join in two steps of one fit, in either of which others may be."""
        job = self._strategy.job
        if job.lockstep.finished == self._last and job.member.others_wait:
            job.member.admit()

    def _values(self, state: Any) -> dict[int, Any]:
        """The values that a step begins with, by variable: Keras holds them in `state`."""
        flat = zip(self._flat, (v for group in state for v in group), strict=True)
        return {id(v): self._strategy.place_state(v, x) for v, x in flat}

    def _run(self, state: Any, batch: Any) -> tuple[Any, Any]:
        compiled, values = self._prepare(batch)
        values_now = [v for group in state for v in group]
        place = self._strategy.place_state
        current = [place(v, x) for v, x in zip(self._flat, values_now, strict=True)]
        results, written = compiled.apply(values, self._lookup(current))
        for variable, value in written:
            current[self._position[id(variable)]] = value
        return self._collect(results), _regroup(current, self._groups)

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The program of the step for a batch, not run."""
        compiled, _ = self._prepare(batch)
        return compiled.lower()

    def _prepare(self, batch: Any) -> tuple[Compiled, list[Any]]:
        """The compiled step for a batch, and the batch as its arguments."""
        rows, batch = self._deal(batch)
        fit = Fit(rows, rows_out=self._kind == "predict")
        return self._executor.prepare(self._step, (batch,), {}, fit)

    def _lookup(self, current: list[Any]) -> Any:
        position = self._position

        def value(variable: Any) -> Any:
            i = position.get(id(variable))
            return variable._value if i is None else current[i]

        return value

    def _step(self, batch: Any) -> Any:
        """What is traced."""
        return traced_step(self._model, self._kind, self._groups, batch)

    def _deal(self, batch: Any) -> tuple[tuple[int, ...], Any]:
        """Rows that each replica gets of this batch, and their values."""
        batch = jax.tree.map(self._current, batch)
        dealt = next((x for x in jax.tree.leaves(batch) if isinstance(x, GlobalBatch)), None)
        if dealt is not None and dealt.rows[0]:
            return dealt.rows, batch
        if dealt is not None:
            # Replica 0 keeps the metrics' totals, so it may not be one that takes no part.
            batch = jax.tree.map(lambda x: join(x, self._strategy), batch)
        else:
            self._same.check(batch)
        rows = self._rows(batch)
        slices = row_slices(rows)
        if self._placement is None or self._placement.mesh is not self._strategy.mesh:
            self._placement = Placement(self._strategy.mesh, to_device=not self._strategy.described)
        split = self._placement.split
        return rows, jax.tree.map(lambda x: split(_array(x), slices), batch)

    def _current(self, leaf: Any) -> Any:
        """A part of a batch, dealt anew where the processes have changed since."""
        if not isinstance(leaf, GlobalBatch):
            return leaf
        now = self._strategy.current(leaf)
        return leaf if now is leaf else as_global(now)

    def _rows(self, batch: Any) -> tuple[int, ...]:
        """Rows that each replica gets of a batch that is whole."""
        counts = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                "Expected a batch of tensors with the same number of rows, at least one. Got "
                f"shapes {[np.shape(leaf) for leaf in jax.tree.leaves(batch)]}. Check the dataset."
            )
        (total,) = counts
        rows = split_rows(total, self._strategy.num_replicas_in_sync, RebatchRule.CEIL)
        if not self._said:
            self._said = True
            _log.info(
                "%s: %d rows a step, %s on %s; %d variables (%d values) on each%s",
                self._kind,
                total,
                "+".join(map(str, rows)),
                ", ".join(self._strategy.worker_devices),
                len(self._flat),
                sum(int(np.prod(v.shape)) for v in self._flat),
                f"; combined by {type(self._strategy.cross_device_ops).__name__}"
                if len(rows) > 1
                else "",
            )
        return rows

    def _collect(self, results: Any) -> Any:
        """Predictions as whole arrays in row order."""
        return jax.tree.map(
            lambda leaf: join(leaf, self._strategy) if isinstance(leaf, PerReplica) else leaf,
            results,
            is_leaf=lambda leaf: isinstance(leaf, PerReplica),
        )


def _regroup(flat: list[Any], groups: Iterable[list[Any]]) -> tuple[list[Any], ...]:
    values = iter(flat)
    return tuple([next(values) for _ in group] for group in groups)


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
