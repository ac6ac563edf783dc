"""SidecarEvaluator: evaluates the checkpoints of a training that runs in other processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from stratagem.errors import BackupMismatchError, CorruptBackupError, PeerTimeoutError
from stratagem.recovery.checkpoint import Checkpoint, latest_checkpoint

_POLL_SECONDS = 1.0
_LOG_SECONDS = 60.0  # between the lines that say that it waits
_SETTLED_SECONDS = 2.0  # a Keras file that was just written may not be whole

_log = logging.getLogger("stratagem")


class SidecarEvaluator:
    """Evaluates each new checkpoint in a directory, beside the training. For the evaluator task.

    Checkpoints are those of `stratagem.train.Checkpoint(model=model, ...)`, or files that Keras
    wrote: `*.weights.h5`, or `*.keras` of the same model. The newest one is evaluated; those that
    came and went meanwhile are left out.

    Args:
        model: compiled, with the variables of the one that is trained. If it has been built with
            an optimizer, checkpoints may also hold `optimizer=`.
        data: a dataset, or a tuple of arrays `(x, y)` or `(x, y, sample_weight)`, as
            `model.evaluate` takes them.
        checkpoint_dir: where the checkpoints are.
        steps: batches of each evaluation; None for all of the data.
        max_evaluations: ends after so many; None: goes on until the deadline.
        callbacks: of Keras, with the methods for tests; `on_test_end` gets the metrics.
        seconds: how long to wait for a new checkpoint at most.

    Raises:
        ValueError: the model is not compiled.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | Path,
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[Any] | None = None,
        *,
        seconds: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if not getattr(model, "compiled", False):
            raise ValueError(
                f"Expected a compiled model to evaluate. Got {getattr(model, 'name', model)!r}, "
                "which has no loss and no metrics. Call model.compile as the training does."
            )
        self.model, self.data, self.steps = model, data, steps
        self.directory = Path(checkpoint_dir)
        self.max_evaluations = max_evaluations
        self.callbacks = list(callbacks or ())
        for callback in self.callbacks:
            callback.set_model(model)
        self.seconds, self._clock = seconds, clock
        self.evaluations = 0
        self._done: tuple[str, float] | None = None

    def start(self) -> dict[str, Any]:
        """Evaluates until `max_evaluations`.

        Returns:
            The metrics of the last evaluation: numbers, or arrays of those that have several.

        Raises:
            PeerTimeoutError: no new checkpoint came for `seconds`.
        """
        logs: dict[str, Any] = {}
        while self.max_evaluations is None or self.evaluations < self.max_evaluations:
            path = self._next()
            try:
                self._load(path)
            except (OSError, CorruptBackupError) as error:  # it was replaced meanwhile
                _log.warning("Leaves out the checkpoint %s: %s", path, error)
                continue
            logs = self._evaluate(path)
        return logs

    def _evaluate(self, path: Path) -> dict[str, Any]:
        logs = self._run(self.steps, self.callbacks)
        self.evaluations += 1
        shown = ", ".join(f"{name}: {_short(value)}" for name, value in logs.items())
        _log.info("Evaluation %d, of %s: %s", self.evaluations, path.name, shown)
        return logs

    def _run(self, steps: int | None, callbacks: list[Any]) -> dict[str, Any]:
        data = self.data if isinstance(self.data, tuple) else (self.data,)
        named = dict(zip(("x", "y", "sample_weight"), data, strict=False))
        return self.model.evaluate(
            **named, steps=steps, verbose=0, return_dict=True, callbacks=callbacks
        )

    def _next(self) -> Path:
        """Waits for a checkpoint that was not evaluated yet."""
        began = said = self._clock()
        while True:
            found = self._newest()
            if found is not None and found != self._done:
                self._done = found
                return Path(found[0])
            now = self._clock()
            if now - began >= self.seconds:
                raise PeerTimeoutError(
                    f"Expected a new checkpoint in {self.directory} within {self.seconds:g} s. Got "
                    f"none after {self.evaluations} evaluations. Look whether the training goes on "
                    "and saves there, or allow more seconds."
                )
            if now - said >= _LOG_SECONDS:
                said = now
                _log.info("Waits for a checkpoint in %s since %.0f s", self.directory, now - began)
            time.sleep(min(_POLL_SECONDS, self.seconds))

    def _newest(self) -> tuple[str, float] | None:
        """Path and time of the newest checkpoint."""
        paths = [str(p) for end in ("*.weights.h5", "*.keras") for p in self.directory.glob(end)]
        found = [(path, Path(path).stat().st_mtime) for path in paths]
        settled = time.time() - min(_SETTLED_SECONDS, self.seconds / 2)
        found = [f for f in found if f[1] <= settled]
        latest = latest_checkpoint(self.directory) if self.directory.is_dir() else None
        if latest is not None:
            found.append((latest, Path(latest).stat().st_mtime))
        return max(found, key=lambda f: (f[1], f[0]), default=None)

    def _load(self, path: Path) -> None:
        if path.name.endswith(".weights.h5"):
            self.model.load_weights(path)
        elif path.suffix == ".keras":
            loaded = keras.saving.load_model(path, compile=False)
            self.model.set_weights([np.asarray(w) for w in loaded.get_weights()])
        else:
            self._restore(path)

    def _restore(self, path: Path) -> None:
        if not self.evaluations:
            self._run(1, [])  # metrics get their variables at the first batch
        try:
            Checkpoint(model=self.model).restore(path)
        except BackupMismatchError:  # it has the optimizer, too
            optimizer = self.model.optimizer
            Checkpoint(model=self.model, optimizer=optimizer).restore(path)


class SidecarEvaluatorModelExport(keras.callbacks.Callback):
    """Saves the model of a SidecarEvaluator where an evaluation was the best so far.

    Args:
        export_filepath: where to; `{name}` of metrics are filled in.
        monitor: the metric; it is as large as can be in "max", as small in "min" mode.
        mode: "min" or "max".
        save_best_only: False saves after each evaluation.
    """

    def __init__(
        self,
        export_filepath: str | Path,
        monitor: str = "loss",
        mode: str = "min",
        save_best_only: bool = True,
    ):
        super().__init__()
        if mode not in ("min", "max"):
            raise ValueError(f"mode: expected 'min' or 'max'. Got {mode!r}.")
        self.filepath, self.monitor, self.mode = str(export_filepath), monitor, mode
        self.save_best_only = save_best_only
        self.best: float | None = None

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves, or not."""
        logs = logs or {}
        numbers = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        if self.monitor not in numbers:
            raise ValueError(
                f"monitor: expected a metric of the model that is one number, {numbers}. Got "
                f"{self.monitor!r}. Name one of those, or compile the model with it."
            )
        value = float(logs[self.monitor])
        better = self.best is None or (
            value < self.best if self.mode == "min" else value > self.best
        )
        if better:
            self.best = value
        if better or not self.save_best_only:
            self.model.save(self.filepath.format(**logs))


def _short(value: Any) -> str:
    return np.array2string(np.asarray(value), precision=4)
